"""evals/share.py: what it uploads, to a hub on loopback, and what it says if it cannot."""

import base64
import hashlib
import http.server
import json
import os
import re
import subprocess
import sys
import threading

import export
import pytest
import share
import yaml
from huggingface_hub import ModelCard, constants

from tests.test_export import MODELS, ROOT, call, save


class Hub:
    """A model hub that answers the requests of huggingface_hub 2.4.0 at an upload over plain HTTP.
    Its user is "me", who may write to me/... only. A file of *.safetensors goes to another address,
    as large files do, and belongs to a commit only if it arrived there whole."""

    def __init__(self):
        self.repos = {}  # name: private or not
        self.commits = []  # (repo, summary, {file: bytes})
        self.objects = {}  # sha256: bytes
        self.is_full = False
        self.requests = []  # kinds, in order
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.hub = self
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str, token: str, body: bytes) -> tuple[int, object]:
        """The status and the JSON of a reply, or a message in place of the JSON."""
        if path.startswith("/objects/"):  # signed addresses, which need no token
            if self.is_full:
                return 403, "no room for large files"
            self.objects[path.removeprefix("/objects/")] = body
            return 200, {}
        if token != "Bearer good":
            return 401, "Invalid credentials in Authorization header"
        if path == "/api/whoami-v2":
            return 200, dict(name="me", type="user")
        if path == "/api/validate-yaml":
            yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            return 200, dict(errors=[], warnings=[])
        if path == "/api/repos/create":
            return self.create(**json.loads(body))
        match = re.match(r"/(?:api/models/)?([\w-]+/[\w-]+)", path)
        repo = match[1]
        if repo not in self.repos:
            return 404, "Repository not found"
        rest = path[match.end() :]
        if (method, rest) == ("GET", ""):
            return 200, dict(id=repo, sha="0" * 40, private=self.repos[repo], tags=[], siblings=[])
        if not repo.startswith("me/"):
            return 403, "Forbidden: pass a token that may write"
        if rest.startswith("/tree/main"):
            files = [files for name, _, files in self.commits if name == repo][-1]
            return 200, [dict(type="file", path=path, size=9, oid="0" * 40) for path in files]
        if rest == "/preupload/main":
            files = []
            for file in json.loads(body)["files"]:
                mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
                files.append(dict(path=file["path"], uploadMode=mode, shouldIgnore=False))
            return 200, dict(files=files)
        if rest == ".git/info/lfs/objects/batch":
            objects = json.loads(body)["objects"]
            for entry in objects:
                upload = dict(href=f"{self.endpoint}/objects/{entry['oid']}", header={})
                entry["actions"] = dict(upload=upload)
            return 200, dict(transfer="basic", objects=objects)
        assert rest == "/commit/main", path
        return self.commit(repo, [json.loads(line) for line in body.splitlines()])

    def create(self, name, organization, visibility="public") -> tuple[int, object]:
        repo = f"{organization}/{name}"
        if organization != "me":
            return 403, f"You may not create a model under the namespace {organization}"
        known = repo in self.repos
        self.repos.setdefault(repo, visibility == "private")
        return 409 if known else 200, dict(url=f"{self.endpoint}/{repo}")

    def commit(self, repo: str, lines: list[dict]) -> tuple[int, object]:
        header, *rest = lines
        files = {}
        for line in rest:
            value = line["value"]
            if line["key"] == "deletedFile":
                files[value["path"]] = None
                continue
            if line["key"] == "file":
                content = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile"
                content = self.objects[value["oid"]]
                assert hashlib.sha256(content).hexdigest() == value["oid"]
                assert len(content) == value["size"]
            files[value["path"]] = content
        self.commits.append((repo, header["value"]["summary"], files))
        return 200, dict(success=True, commitOid="1" * 40, commitUrl=f"{self.endpoint}/{repo}")


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        headers = self.headers
        if headers.get("Transfer-Encoding") == "chunked":
            body = b""
            size = int(self.rfile.readline(), 16)
            while size:
                body += self.rfile.read(size + 2)[:-2]
                size = int(self.rfile.readline(), 16)
        else:
            body = self.rfile.read(int(headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        hub = self.server.hub
        hub.requests.append(path)
        status, reply = hub.answer(self.command, path, headers.get("Authorization"), body)
        self.send_response(status)
        if isinstance(reply, str):
            self.send_header("X-Error-Message", reply)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            reply = dict(error=reply)
        content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_PUT = do_GET

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def hub():
    made = Hub()
    yield made
    made.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Weights of the preset `tiny`, but small, in a folder of their own."""
    path = tmp_path_factory.mktemp("run") / "a_run.npz"
    save(path, MODELS["tiny"])
    return path


def test_the_hub_gets_the_files_of_the_export_and_no_others(run, hub):
    out = run.parent / "a_run_export"
    (out / "__pycache__").mkdir(parents=True)  # as after `import reference`
    (out / "__pycache__/reference.pyc").write_bytes(b"mine")
    env = os.environ | dict(HF_ENDPOINT=hub.endpoint, HF_TOKEN="good", HF_HUB_DISABLE_XET="1")
    command = [sys.executable, ROOT / "evals/share.py", run, "me/my-gpt"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"uploaded to {hub.endpoint}/me/my-gpt"
    ((repo, summary, files),) = hub.commits
    assert (repo, summary) == ("me/my-gpt", "a_run, validation loss 1.2500")
    assert files == {name: (out / name).read_bytes() for name in export.FILES}
    assert hub.repos == {"me/my-gpt": False} and len(hub.objects) == 1
    card = ModelCard(files["README.md"].decode())
    about = card.data.to_dict()
    (result,) = card.data.eval_results
    assert about["library_name"] == "jnanogpt" and about["pipeline_tag"] == "text-generation"
    assert about["license"] == "mit" and about["language"] == "code" and "datasets" not in about
    assert (result.metric_type, result.metric_value) == ("loss", 1.25)
    assert result.metric_name == "validation loss, nats per byte"
    assert result.dataset_name == "Python source of optax and huggingface_hub"
    assert card.text.strip().startswith("# jNanoGPT: a_run\n")


@pytest.fixture
def share_it(run, hub, monkeypatch, capsys):
    """Calls share.py in this process, with an empty export; returns its status, stdout, stderr."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(run.parent / "none"))
    monkeypatch.setenv("HF_TOKEN", "good")

    def write(w, out):
        out.mkdir(exist_ok=True)
        for name in export.FILES:
            (out / name).write_text("---\nlicense: mit\n---\n")

    monkeypatch.setattr(export, "export", write)

    def start(*argv):
        status = 0
        try:
            call(share, run, "--out", run.parent / "out", *argv)
        except SystemExit as stopped:
            status = stopped.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return start


def test_without_a_name_it_only_exports_and_prints_the_command(share_it, hub, run):
    status, out, err = share_it()
    assert (status, err, hub.requests) == (0, "", [])
    command = out.removeprefix("to upload it: ./run.sh share ").split()
    assert command == [str(run), "--out", str(run.parent / "out"), "YOUR_NAME/my-gpt"]


def test_a_private_model_is_private_and_can_get_a_new_version(share_it, hub):
    """A name without a slash is a model of the user who is logged in."""
    for line in f"uploaded to {hub.endpoint}/me/a", "me/a exists: this upload will be its newest":
        status, out, err = share_it("a", "--private")
        assert status == 0 and out.startswith(line), (out, err)
    assert hub.repos == {"me/a": True} and len(hub.commits) == 2


def test_a_version_without_reference_has_not_that_of_an_older_one(share_it, hub, monkeypatch, run):
    share_it("me/a")
    (run.parent / "out/reference.py").unlink()
    monkeypatch.setattr(export, "export", lambda *_: None)
    status, _, err = share_it("me/a")
    assert status == 0, err
    files = hub.commits[1][2]
    assert files.pop("reference.py") is None and len(files) == 3 and None not in files.values()


def nobody(monkeypatch, hub):
    monkeypatch.delenv("HF_TOKEN")


def stranger(monkeypatch, hub):
    monkeypatch.setenv("HF_TOKEN", "bad")


def public(monkeypatch, hub):
    hub.repos["me/a"] = False


def others(monkeypatch, hub):
    hub.repos["you/a"] = False


def offline(monkeypatch, hub):
    hub.close()


def full(monkeypatch, hub):
    hub.is_full = True


def answers(status, reply):
    return lambda monkeypatch, hub: monkeypatch.setattr(hub, "answer", lambda *_: (status, reply))


def endpoint(value):
    return lambda monkeypatch, hub: monkeypatch.setattr(constants, "ENDPOINT", value)


def odd(monkeypatch, hub):
    monkeypatch.setattr(hub, "create", lambda **_: (400, "Invalid name"))


# Nothing is sent to the Hub.
@pytest.mark.parametrize("name", [
    "", "  ", "my gpt", "me/a--b", "-a", "a.git", "a/b/c", "https://x.y/me/a", "a" * 97, "me/\xe9",
])  # fmt: skip
def test_a_name_that_no_hub_accepts_gets_a_line(share_it, hub, name):
    status, out, err = share_it(f"--out={hub.endpoint}", "--", name)
    assert (status, out, hub.requests, err.count("\n")) == (2, "", [], 1)
    assert err.startswith(f"share.py: a model cannot be called {name!r}: pass ME/MODEL of letters")


@pytest.mark.parametrize("token", ["\u201cgood\u201d", "'good'", "go od", "go\x00od"])
def test_a_token_that_no_hub_gives_gets_a_line_without_it(share_it, hub, monkeypatch, token):
    monkeypatch.setattr(share, "get_token", lambda: token)
    status, out, err = share_it("me/a")
    assert (status, out, hub.requests, err.count("\n")) == (2, "", [], 1)
    assert err.startswith("share.py: your token contains characters that") and "good" not in err


@pytest.mark.parametrize("trouble, argv, message", [
    (nobody, "me/a", "you are not logged in: type .venv/bin/hf auth login, or set HF_TOKEN"),
    (stranger, "me/a", "does not accept your token: type .venv/bin/hf auth login, or set"),
    (public, "me/a --private", "me/a exists and is public: change that on"),
    (None, "you/a", "your token may not write to you/a: take one that may, or another name"),
    (others, "you/a", "your token may not write to you/a: take one that may, or another name"),
    (offline, "me/a", "check the network and HF_ENDPOINT, and try again"),
    (full, "me/a", "your token may not write to me/a: take one that may, or another name (403 F"),
    (answers(503, "Unavailable"), "me/a", "out of order: try again later (Server error '503"),
    (answers(408, "Timeout"), "me/a", "or out of order: try again later (Client error '408"),
    (answers(501, "No"), "me/a", "did not take the upload to me/a (HfHubHTTPError: Server"),
    (answers(500, "of Bearer good"), "me/a", "of Bearer <your token>)"),
    (answers(200, {}), "me/a", "is no hub, or a login page answers for it: check HF_ENDPOINT, the"),
    (answers(200, b"<html>"), "me/a", "the proxy and the network (JSONDecodeError"),
    (endpoint("htp://x"), "me/a", "htp://x is no hub, or a login page answers for it: check"),
    (endpoint("http://me:good@x"), "me/a", "HF_ENDPOINT has a user or a password, which would"),
    (odd, "me/a", "did not take the upload to me/a (BadRequestError: "),
])  # fmt: skip
def test_what_the_hub_refuses_gets_a_line(share_it, hub, monkeypatch, trouble, argv, message):
    if trouble:
        trouble(monkeypatch, hub)
    status, _, err = share_it(*argv.split())
    lines = [line for line in err.splitlines() if line.startswith("share.py: ")]
    assert status == 2 and len(lines) == 1 and message in lines[0], err
    assert err.splitlines()[-1] == lines[0] and hub.commits == []
