"""A server on loopback that answers as huggingface.co does, and fails where a test wants it to.

It answers the requests of huggingface_hub 2.4.0, by kind: `info` is the commit of a branch with the
sizes and hashes of its files, `tree` the list of its files, `head` the address and the hash of a
file, `get` a redirect to another host, and `cdn` the bytes there. A failure ("trouble") in `plans`
is a function that changes the reply to one request. It does not offer Xet.
"""

import collections
import hashlib
import http.server
import json
import re
import threading
import types
import urllib.parse

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
        self.requests = []  # (kind, name)
        self.plans = collections.defaultdict(list)  # (kind, name) -> troubles of the next requests
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub = self
        self.server.daemon_threads = True
        self.server.block_on_close = False
        self.server.handle_error = lambda *_: None  # clients may break connections
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def asked(self, kind: str) -> list[str]:
        """The file names in the requests of a kind, in order."""
        return [name for asked, name in list(self.requests) if asked == kind]

    def answer(self, method: str, url: str) -> types.SimpleNamespace:
        path = urllib.parse.unquote(url.split("?")[0])
        matches = {kind: re.fullmatch(pattern, path) for kind, pattern in ROUTES.items()}
        (kind,) = [kind for kind, match in matches.items() if match]
        route = matches[kind].groupdict()
        kind = "head" if method == "HEAD" else kind
        name = route.get("name")
        self.requests.append((kind, name))
        commit = [*self.commits][0] if route["revision"] == "main" else route["revision"]
        reply = self.reply(kind, commit, name)
        if self.plans[kind, name]:
            self.plans[kind, name].pop(0)(reply)
        return reply

    def reply(self, kind: str, commit: str, name: str | None) -> types.SimpleNamespace:
        files = self.commits[commit]
        if kind == "info":
            siblings = [dict(rfilename=path, lfs=lfs(it)) for path, it in files.items()]
            about = dict(id=self.repo, sha=commit, private=False, tags=[], siblings=siblings)
            return make_reply(200, json.dumps(about).encode())
        if kind == "tree":
            entries = [dict(type="file", path=path, lfs=lfs(it)) for path, it in files.items()]
            entries = [e | dict(oid="0" * 40, size=e["lfs"]["size"]) for e in entries]
            return make_reply(200, json.dumps(entries).encode())
        etag = f'"{hashlib.sha256(files[name]).hexdigest()}"'
        if kind == "cdn":
            return make_reply(200, files[name], ETag=etag)
        # For huggingface_hub, localhost is another host than 127.0.0.1, as a CDN is.
        url = self.endpoint.replace("127.0.0.1", "localhost") + f"/cdn/{commit}/{name}?signed=yes"
        file = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(files[name])), "Location": url}
        return make_reply(302, b"", **file, ETag='"pointer"', **{"X-Repo-Commit": commit})


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        reply = self.server.hub.answer(self.command, self.path)
        self.send_response(reply.status)
        for key, value in reply.headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    do_HEAD = do_GET

    def log_message(self, *_) -> None:
        pass


def lfs(content: bytes) -> dict:
    """What the hub states about the bytes of a file."""
    digest = hashlib.sha256(content).hexdigest()
    return dict(oid=digest, sha256=digest, size=len(content), pointerSize=134)


def make_reply(status: int, body: bytes, **headers: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(status=status, body=body, headers=headers)


def flip(reply: types.SimpleNamespace) -> None:
    """A trouble: one bit of the body is wrong."""
    reply.body = reply.body[:-2] + bytes([reply.body[-2] ^ 1]) + reply.body[-1:]
