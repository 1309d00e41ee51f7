"""cached_fineweb10B.py against a server on loopback that answers as huggingface.co does, and sends
wrong bytes where a test wants them."""

import hashlib
import http.server
import json
import os
import re
import signal
import sys
import threading
import urllib.parse

import cached_fineweb10B as script
import pytest
import shards
from huggingface_hub import close_session, constants

REPO = "kjj0/fineweb10B-gpt2"
COMMIT = "a" * 40
FIRST, SECOND = "fineweb_train_000001.bin", "fineweb_train_000002.bin"
NAMES = ["fineweb_val_000000.bin", FIRST, SECOND]
FILES = {name: shards.header(9999) + name.encode() * 700 for name in NAMES}
DIGESTS = {name: hashlib.sha256(content).hexdigest() for name, content in FILES.items()}


# ---- The server ----------------------------------------------------------------------------------
ROUTES = {
    "info": r"/api/datasets/(?P<repo>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)",
    "tree": r"/api/datasets/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)",
    "get": r"/datasets/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)",
    "cdn": r"/cdn/(?P<revision>[^/]+)/(?P<name>.+)",
}


class Hub:
    """Serves `files`, {name: bytes}, of one commit of one repository, to huggingface_hub 2.4.0. Its
    requests are of these kinds: `info` is the commit of a branch with the sizes and hashes of its
    files, `tree` the list of its files, `head` the address and the hash of a file, `get` a redirect
    to another host, and `cdn` the bytes there. It does not offer Xet."""

    def __init__(self, repo: str, commit: str, files: dict[str, bytes]):
        self.repo = repo
        self.commit = commit
        self.files = files
        self.requests = []  # (kind, name)
        self.flipped = set()  # names whose bytes are sent with one wrong bit, once
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub = self
        self.server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def asked(self, kind: str) -> list[str]:
        """The file names in the requests of a kind, in order."""
        return [name for asked, name in list(self.requests) if asked == kind]

    def answer(self, method: str, url: str) -> tuple[int, bytes, dict[str, str]]:
        """The status, the body and the headers of the reply to a request."""
        path = urllib.parse.unquote(url.split("?")[0])
        matches = {kind: re.fullmatch(pattern, path) for kind, pattern in ROUTES.items()}
        (kind,) = [kind for kind, match in matches.items() if match]
        name = matches[kind].groupdict().get("name")
        kind = "head" if method == "HEAD" else kind
        self.requests.append((kind, name))
        if kind == "info":
            siblings = [dict(rfilename=path, lfs=lfs(it)) for path, it in self.files.items()]
            about = dict(id=self.repo, sha=self.commit, private=False, tags=[], siblings=siblings)
            return 200, json.dumps(about).encode(), {}
        if kind == "tree":
            entries = [dict(type="file", path=path, lfs=lfs(it)) for path, it in self.files.items()]
            entries = [e | dict(oid="0" * 40, size=e["lfs"]["size"]) for e in entries]
            return 200, json.dumps(entries).encode(), {}
        content = self.files[name]
        etag = f'"{lfs(content)["sha256"]}"'
        if kind == "cdn":
            if name in self.flipped:
                self.flipped.remove(name)
                content = content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]
            return 200, content, {"ETag": etag}
        # For huggingface_hub, localhost is another host than 127.0.0.1, as a CDN is.
        url = self.endpoint.replace("127.0.0.1", "localhost") + f"/cdn/{self.commit}/{name}?x=1"
        file = {"X-Linked-Etag": etag, "X-Linked-Size": str(len(content)), "Location": url}
        return 302, b"", file | {"ETag": '"pointer"', "X-Repo-Commit": self.commit}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, body, headers = self.server.hub.answer(self.command, self.path)
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_) -> None:
        pass


def lfs(content: bytes) -> dict:
    """What the hub states about the bytes of a file."""
    digest = hashlib.sha256(content).hexdigest()
    return dict(oid=digest, sha256=digest, size=len(content), pointerSize=134)


# ---- The script ----------------------------------------------------------------------------------
@pytest.fixture
def hub(monkeypatch, tmp_path):
    for key in [key for key in os.environ if key.startswith("HF_") or "proxy" in key.lower()]:
        monkeypatch.delenv(key)
    hub = Hub(REPO, COMMIT, dict(FILES))
    url = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    settings = dict(ENDPOINT=hub.endpoint, HUGGINGFACE_CO_URL_TEMPLATE=url)
    for key in ("HF_TOKEN_PATH", "HF_HUB_CACHE", "AGENT_HARNESSES_PATH"):
        settings[key] = str(tmp_path / "home" / key)
    for key, value in settings.items():
        monkeypatch.setattr(constants, key, value)
    monkeypatch.setattr(script, "PINNED", {})
    yield hub
    hub.server.shutdown()
    close_session()


@pytest.fixture
def run(hub, tmp_path, monkeypatch, capfd):
    """Runs the script in this process: its status, and what it printed last."""

    def run(count=2):
        argv = ["cached_fineweb10B.py", str(count), "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", argv)
        monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handler
        hub.requests.clear()
        status = 0
        try:
            script.main()
        except SystemExit as stopped:
            status = stopped.code
        return status, "".join(capfd.readouterr()).splitlines()[-1]

    return run


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def is_complete(out):
    """The folder has the files, their MANIFEST.json and nothing else."""
    assert {path.name: path.read_bytes() for path in out.glob("*.bin")} == FILES
    assert len([*out.iterdir()]) == len(FILES) + 1
    entry = lambda name: dict(sha256=DIGESTS[name], revision=COMMIT)
    listed = {name: entry(name) for name in FILES}
    about = dict(source=REPO, vocab=50257, eot=50256, files=listed)
    return json.loads((out / "MANIFEST.json").read_bytes()) == about


def test_files_are_fetched_once_and_a_damaged_or_missing_one_again(hub, run, out):
    assert run()[0] == 0 and is_complete(out)
    assert sorted(hub.asked("cdn")) == sorted(NAMES)
    assert run() == (0, f"{out}: 3 files are there and right") and not hub.requests
    flipped = FILES[SECOND][:-1] + bytes([FILES[SECOND][-1] ^ 1])
    for content in (flipped, FILES[SECOND][:-2], FILES[FIRST]):
        (out / SECOND).write_bytes(content)
        assert run()[0] == 0 and is_complete(out) and hub.asked("cdn") == [SECOND]


@pytest.mark.parametrize("pinned", [{}, {FIRST: "0" * 64}])
def test_other_bytes_than_those_of_the_stated_hash_are_deleted(hub, run, out, monkeypatch, pinned):
    monkeypatch.setattr(script, "PINNED", pinned)
    if not pinned:
        hub.flipped.add(FIRST)
    status, line = run()
    assert status == 2 and f"{FIRST}: downloaded with another sha256 and deleted; run this" in line
    assert not (out / FIRST).exists()


def test_without_a_network(hub, run, out, monkeypatch):
    """The pinned bytes are recognized, also if they were copied by hand. Else, one line says so."""
    monkeypatch.setattr(script, "PINNED", DIGESTS)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    out.mkdir()
    for name in NAMES:
        status, line = run()
        assert status == 2 and f"{REPO} is not all here and cannot be downloaded; run" in line
        (out / name).write_bytes(FILES[name])
    assert run() == (0, f"{out}: 3 files are there and right")
    shards.write_manifest(out, "mine", vocab=257, eot=256, files={})
    assert run()[0] == 2 and run()[1].endswith("has another data set, mine: pass another --out")
