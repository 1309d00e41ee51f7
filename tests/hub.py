"""A server on loopback that answers as huggingface.co does, and fails where a test wants it to.

It answers the requests of huggingface_hub 2.4.0, by kind: `info` is the commit of a branch with the
sizes and hashes of its files, `tree` the list of its files, `head` the address and the hash of a
file, `get` a redirect to another host, and `cdn` the bytes there. A failure ("trouble") is a
function that changes a reply: those in `plans` apply to one request each, those in `always` to
every request. It does not offer Xet.
"""

import collections
import hashlib
import http.server
import json
import re
import threading
import types
import urllib.parse
from collections.abc import Callable

ROUTES = {
    "info": r"/api/datasets/(?P<repo>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)",
    "tree": r"/api/datasets/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)",
    "get": r"/datasets/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)",
    "cdn": r"/cdn/(?P<revision>[^/]+)/(?P<name>.+)",
}


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

    def answer(self, method: str, url: str, headers: dict) -> types.SimpleNamespace:
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
        reply = self.reply(kind, repo, route["revision"], name, headers)
        if trouble:
            trouble(reply)
        return reply

    def reply(self, kind, repo, revision, name, headers) -> types.SimpleNamespace:
        if headers.get("authorization", "Bearer good") != "Bearer good" and kind != "cdn":
            return refusal(401, None, "Invalid credentials in Authorization header")
        if repo != self.repo:
            return refusal(401, "RepoNotFound", "Repository not found")
        commit = self.main if revision == "main" else revision
        files = self.commits[commit]
        if kind == "info":
            about = dict(id=repo, sha=commit, private=False, tags=[])
            siblings = [dict(rfilename=path, lfs=lfs(it)) for path, it in files.items()]
            return make_reply(200, about | dict(siblings=siblings))
        if kind == "tree":
            entries = [dict(type="file", path=path, lfs=lfs(it)) for path, it in files.items()]
            return make_reply(200, [e | dict(oid="0" * 40, size=e["lfs"]["size"]) for e in entries])
        if name not in files:
            return refusal(404, "EntryNotFound", "Entry not found")
        etag = f'"{hashlib.sha256(files[name]).hexdigest()}"'
        if kind == "cdn":
            return make_reply(200, files[name], {"ETag": etag})
        # For huggingface_hub, localhost is another host than 127.0.0.1, as a CDN is.
        url = self.endpoint.replace("127.0.0.1", "localhost") + f"/cdn/{commit}/{name}?signed=yes"
        file = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(files[name])), "Location": url}
        return make_reply(302, b"", file | {"ETag": '"pointer"', "X-Repo-Commit": commit})


def lfs(content: bytes) -> dict:
    """What the hub states about the bytes of a file."""
    digest = hashlib.sha256(content).hexdigest()
    return dict(oid=digest, sha256=digest, size=len(content), pointerSize=134)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        headers = {key.lower(): value for key, value in self.headers.items()}
        reply = self.server.hub.answer(self.command, self.path, headers)
        self.send_response(reply.status)
        for key, value in reply.headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        half = len(reply.body) // 2
        self.wfile.write(reply.body[:half])
        if reply.stalls:
            self.server.hub.released.wait(60)
        self.wfile.write(reply.body[half:])

    do_HEAD = do_GET

    def log_message(self, *_) -> None:
        pass


def make_reply(status: int, body: object, headers: dict | None = None) -> types.SimpleNamespace:
    """A whole reply. A trouble may set `stalls`: then it waits in the middle of its body."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    about = dict(status=status, body=body, headers=headers or {})
    return types.SimpleNamespace(**about, stalls=False)


def refusal(status: int, code: str | None, message: str) -> types.SimpleNamespace:
    headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
    return make_reply(status, {"error": message}, headers)


# ---- Troubles ------------------------------------------------------------------------------------
def says(status: int, code: str | None = None, message: str = "of the test") -> Callable:
    return lambda reply: vars(reply).update(vars(refusal(status, code, message)))


def sends(body: object, status: int = 200) -> Callable:
    """Another body in place of the right one."""
    return lambda reply: vars(reply).update(vars(make_reply(status, body)))


def stall(reply) -> None:
    reply.stalls = True


def flip(reply) -> None:
    reply.body = reply.body[:-2] + bytes([reply.body[-2] ^ 1]) + reply.body[-1:]
