"""A hub on loopback: what huggingface_hub asks one for, and troubles on demand.

It speaks as huggingface.co did to huggingface_hub 2.4.0: a commit of a branch (`info`), sizes and
hashes of files (`paths`), where a file is and which (`head`), and its bytes, after a redirect
(`get`) to another host (`cdn`). Troubles wait in `plans`, each for one request of a kind.
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
    "get": r"/datasets/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>[^/]+)",
    "cdn": r"/cdn/(?P<revision>[^/]+)/(?P<name>[^/]+)",
}


class Hub:
    """Serves `commits`, {commit: {name: bytes}}, of one repository; "main" is the first of them."""

    def __init__(self, repo: str, commits: dict[str, dict[str, bytes]]):
        self.repo, self.commits, self.main = repo, commits, next(iter(commits))
        self.requests = []  # of kind, name, revision, headers
        self.plans = collections.defaultdict(list)  # (kind, name) -> troubles of the next requests
        self.always = {}  # (kind, name) -> trouble of all requests
        self.released = threading.Event()  # ends the stalls
        self.lock = threading.Lock()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub, self.server.daemon_threads, self.server.block_on_close = self, True, False
        self.server.handle_error = lambda *_: None  # connections that clients have broken
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def asked(self, kind: str) -> list[str]:
        """Names of the files asked for (revisions, of kind info), in order."""
        return [r.name or r.revision for r in list(self.requests) if r.kind == kind]

    def wait_for(self, kind: str, count: int) -> None:
        end = time.monotonic() + 20
        while len(self.asked(kind)) < count:
            assert time.monotonic() < end, f"{self.asked(kind)} of {count} requests of kind {kind}"
            time.sleep(0.01)

    def answer(self, method: str, url: str, headers: dict, body: bytes) -> types.SimpleNamespace:
        path = urllib.parse.unquote(url.split("?")[0])
        routes = {kind: re.fullmatch(pattern, path) for kind, pattern in ROUTES.items()}
        kind, route = next((kind, route.groupdict()) for kind, route in routes.items() if route)
        kind, name = "head" if method == "HEAD" else kind, route.get("name")
        asked = dict(kind=kind, name=name, revision=route["revision"], headers=headers)
        with self.lock:
            self.requests.append(types.SimpleNamespace(**asked))
            trouble = self.always.get((kind, name))
            if self.plans[kind, name]:
                trouble = self.plans[kind, name].pop(0)
        reply = self.reply(
            kind, route.get("repo", self.repo), route["revision"], name, headers, body
        )
        if trouble:
            trouble(reply)
        return reply

    def reply(self, kind, repo, revision, name, headers, body) -> types.SimpleNamespace:
        if headers.get("authorization", "Bearer good") != "Bearer good" and kind != "cdn":
            return refusal(401, None, "Invalid credentials in Authorization header")
        if repo != self.repo:
            return refusal(401, "RepoNotFound", "Repository not found")
        commit = self.main if revision == "main" else revision
        if commit not in self.commits:
            return refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = self.commits[commit]
        if kind == "info":
            return make_reply(200, dict(id=repo, sha=commit, private=False, siblings=[], tags=[]))
        if kind == "paths":
            paths = urllib.parse.parse_qs(body.decode())["paths"]
            known = [about(path, files[path]) for path in paths if path in files]
            return make_reply(200, known) if len(paths) <= 1000 else refusal(413, None, "too many")
        if name not in files:
            return refusal(404, "EntryNotFound", "Entry not found")
        etag = f'"{sha256(files[name])}"'
        if kind == "cdn":
            return make_reply(200, files[name], {"ETag": etag})
        # localhost is another host than 127.0.0.1 to huggingface_hub, as a CDN is. Xet, as
        # for most files of the real one, which it offers over plain HTTP too.
        host, auth = (
            self.endpoint.replace("127.0.0.1", "localhost"),
            f"{self.endpoint}/xet/{commit}",
        )
        target = dict(Location=f"{host}/cdn/{commit}/{name}?signed=yes", ETag='"of the pointer"')
        file = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(files[name]))}
        xet = {"X-Xet-Hash": "0" * 64, "Link": f'<{auth}>; rel="xet-auth"'}
        return make_reply(302, b"", {**target, **file, **xet, "X-Repo-Commit": commit})


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        headers = {key.lower(): value for key, value in self.headers.items()}
        reply = self.server.hub.answer(self.command, self.path, headers, body)
        start, content = 0, reply.body
        asked = re.fullmatch(r"bytes=(\d+)-", headers.get("range", ""))
        if reply.status == 200 and asked:
            start, reply.status = int(asked[1]), 206
            reply.headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self.send_response(reply.status)
        for key, value in reply.headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(content) if reply.share is None else int(reply.share * len(content))
        self.wfile.write(content[start : max(start, end)])
        self.wfile.flush()
        if reply.stalls:
            self.server.hub.released.wait(60)
            self.wfile.write(content[max(start, end) :])
        elif reply.share is not None:
            self.close_connection = True

    do_HEAD = do_POST = do_GET

    def log_message(self, *_) -> None:
        pass


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def about(path: str, content: bytes) -> dict:
    lfs = dict(oid=sha256(content), size=len(content), pointerSize=134)
    return dict(type="file", path=path, oid="0" * 40, size=len(content), lfs=lfs)


def make_reply(status: int, body: object, headers: dict | None = None) -> types.SimpleNamespace:
    """share: of the body, where the reply is cut, or stalls."""
    headers, more = dict(headers or {}), dict(share=None, stalls=False)
    if not isinstance(body, bytes):
        headers["Content-Type"], body = "application/json", json.dumps(body).encode()
    return types.SimpleNamespace(status=status, body=body, headers=headers, **more)


def refusal(status: int, code: str | None, message: str) -> types.SimpleNamespace:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return make_reply(status, {"error": message}, headers)


# ---- Troubles ------------------------------------------------------------------------------------
def says(status: int, code: str | None = None, message: str = "of the test") -> Callable:
    return lambda reply: vars(reply).update(vars(refusal(status, code, message)))


def sends(body: object, status: int = 200) -> Callable:
    """Something else entirely."""
    return lambda reply: vars(reply).update(vars(make_reply(status, body)))


def cut(reply) -> None:
    reply.share = 0.5


def stall(reply) -> None:
    reply.share, reply.stalls = 0.5, True


def flip(reply) -> None:
    reply.body = reply.body[:-2] + bytes([reply.body[-2] ^ 1]) + reply.body[-1:]


def states(**changes: object) -> Callable:
    """Of kind paths: something else about every file."""
    return lambda reply: sends([file | changes for file in json.loads(reply.body)])(reply)
