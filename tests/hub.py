"""A server on loopback that answers as huggingface.co does, and fails where a test wants it to.

It answers the requests of huggingface_hub 2.4.0, by kind: `info` is the commit of a branch, `paths`
the sizes and hashes of files, `head` the address and the hash of a file, `get` a redirect to
another host, and `cdn` the bytes there. A failure ("trouble") is a function that changes a reply:
those in `plans` apply to one request each, those in `always` to every request.
"""

import collections
import hashlib
import http.server
import json
import re
import threading
import time
import types
import urllib.parse
from collections.abc import Callable

ROUTES = {
    "info": r"/api/datasets/(?P<repo>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)",
    "paths": r"/api/datasets/(?P<repo>[^/]+/[^/]+)/paths-info/(?P<revision>[^/]+)",
    "get": r"/datasets/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)",
    "cdn": r"/cdn/(?P<revision>[^/]+)/(?P<name>.+)",
}


def hurry(script, assign: Callable) -> None:
    """Makes a download script's pauses short, and chunks so small that a cut file has some."""
    from huggingface_hub import constants, file_download
    from huggingface_hub.utils import _http

    quick = types.SimpleNamespace(**vars(time) | dict(sleep=lambda seconds: time.sleep(0.005)))
    for module in (file_download, _http):
        assign(module, "time", quick)
    assign(constants, "DOWNLOAD_CHUNK_SIZE", 4096)
    assign(script, "PINNED", {})
    assign(script, "PAUSES", (0.01, 0.01, 0.01))


class Hub:
    """Serves `commits`, {commit: {name: bytes}}, of one repository; "main" is the first of them."""

    def __init__(self, repo: str, commits: dict[str, dict[str, bytes]]):
        self.repo = repo
        self.commits = commits
        self.main = [*commits][0]
        self.requests = []  # namespaces of kind, name, revision, headers
        self.plans = collections.defaultdict(list)  # (kind, name) -> troubles of the next requests
        self.always = {}  # (kind, name) -> trouble of all requests
        self.released = threading.Event()  # when it is set, stalled replies go on
        self.lock = threading.Lock()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub = self
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.server.handle_error = lambda *_: None  # clients may break connections
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def asked(self, kind: str) -> list[str]:
        """The file names in the requests of a kind, in order; for kind info, the revisions."""
        return [r.name or r.revision for r in list(self.requests) if r.kind == kind]

    def wait_for(self, kind: str, count: int) -> None:
        end = time.monotonic() + 20
        while len(self.asked(kind)) < count:
            assert time.monotonic() < end, f"{self.asked(kind)} of {count} requests of kind {kind}"
            time.sleep(0.01)

    def answer(self, method: str, url: str, headers: dict, body: bytes) -> types.SimpleNamespace:
        path = urllib.parse.unquote(url.split("?")[0])
        matches = {kind: re.fullmatch(pattern, path) for kind, pattern in ROUTES.items()}
        (kind,) = [kind for kind, match in matches.items() if match]
        route = matches[kind].groupdict()
        name = route.get("name")
        if method == "HEAD":
            kind = "head"
        asked = dict(kind=kind, name=name, revision=route["revision"], headers=headers)
        with self.lock:
            self.requests.append(types.SimpleNamespace(**asked))
            trouble = self.always.get((kind, name))
            if self.plans[kind, name]:
                trouble = self.plans[kind, name].pop(0)
        repo = route.get("repo", self.repo)
        reply = self.reply(kind, repo, route["revision"], name, headers, body)
        if trouble:
            trouble(reply)
        return reply

    def reply(self, kind, repo, revision, name, headers, body) -> types.SimpleNamespace:
        if headers.get("authorization", "Bearer good") != "Bearer good" and kind != "cdn":
            return refusal(401, None, "Invalid credentials in Authorization header")
        if repo != self.repo:
            return refusal(401, "RepoNotFound", "Repository not found")
        commit = self.main if revision == "main" else revision
        files = self.commits[commit]
        if kind == "info":
            return make_reply(200, dict(id=repo, sha=commit, private=False, siblings=[], tags=[]))
        if kind == "paths":
            paths = urllib.parse.parse_qs(body.decode())["paths"]
            known = []
            for path in set(paths) & files.keys():
                size = len(files[path])
                digest = hashlib.sha256(files[path]).hexdigest()
                file = dict(type="file", path=path, oid="0" * 40, size=size)
                known.append(file | dict(lfs=dict(oid=digest, size=size, pointerSize=134)))
            return make_reply(200, known) if len(paths) <= 1000 else refusal(413, None, "too many")
        if name not in files:
            return refusal(404, "EntryNotFound", "Entry not found")
        etag = f'"{hashlib.sha256(files[name]).hexdigest()}"'
        if kind == "cdn":
            return make_reply(200, files[name], {"ETag": etag})
        # For huggingface_hub, localhost is another host than 127.0.0.1, as a CDN is. Most files of
        # the real hub offer Xet, so it is offered here.
        url = self.endpoint.replace("127.0.0.1", "localhost") + f"/cdn/{commit}/{name}?signed=yes"
        file = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(files[name])), "Location": url}
        xet = {"X-Xet-Hash": "0" * 64, "Link": f'<{self.endpoint}/xet/{commit}>; rel="xet-auth"'}
        return make_reply(302, b"", {**file, **xet, "ETag": '"pointer"', "X-Repo-Commit": commit})


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {key.lower(): value for key, value in self.headers.items()}
        reply = self.server.hub.answer(self.command, self.path, headers, body)
        start = 0
        content = reply.body
        asked = re.fullmatch(r"bytes=(\d+)-", headers.get("range", ""))
        if reply.status == 200 and asked:
            start = int(asked[1])
            reply.status = 206
            reply.headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send_response(reply.status)
        for key, value in reply.headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(content)
        if reply.share is not None:
            end = max(start, int(reply.share * len(content)))
        self.wfile.write(content[start:end])
        if reply.stalls:
            self.server.hub.released.wait(60)
            self.wfile.write(content[end:])
        elif reply.share is not None:
            self.close_connection = True

    do_HEAD = do_POST = do_GET

    def log_message(self, *_) -> None:
        pass


def make_reply(status: int, body: object, headers: dict | None = None) -> types.SimpleNamespace:
    """A whole reply. A trouble may set `share`, the part of the body that is sent before the
    connection is cut or, if `stalls`, before the reply waits."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    about = dict(status=status, body=body, headers=headers or {})
    return types.SimpleNamespace(**about, share=None, stalls=False)


def refusal(status: int, code: str | None, message: str) -> types.SimpleNamespace:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return make_reply(status, {"error": message}, headers)


# ---- Troubles ------------------------------------------------------------------------------------
def says(status: int, code: str | None = None, message: str = "of the test") -> Callable:
    return lambda reply: vars(reply).update(vars(refusal(status, code, message)))


def sends(body: object, status: int = 200) -> Callable:
    """Another body in place of the right one."""
    return lambda reply: vars(reply).update(vars(make_reply(status, body)))


def cut(reply) -> None:
    reply.share = 0.5


def stall(reply) -> None:
    reply.share = 0.5
    reply.stalls = True


def flip(reply) -> None:
    reply.body = reply.body[:-2] + bytes([reply.body[-2] ^ 1]) + reply.body[-1:]


def states(**changes: object) -> Callable:
    """For kind paths: other facts about every file."""
    return lambda reply: sends([file | changes for file in json.loads(reply.body)])(reply)
