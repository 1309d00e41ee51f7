"""Exports weights (evals/export.py) and uploads the export's four files to the Hugging Face Hub.

    ./run.sh share [WEIGHTS]            exports only, and prints the command that uploads
    ./run.sh share [WEIGHTS] ME/MODEL   also makes the page of the model, or a new version of it

Log in once before: .venv/bin/hf auth login. Or set HF_TOKEN to a token that may write.
"""

import contextlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import export
import weights
from export import HfApi
from weights import refuse, shards

# isort: split
# After export, which exits with a line if huggingface_hub cannot be imported.
from huggingface_hub import errors, get_token
from huggingface_hub.utils import validate_repo_id

# Errors of a server that is no hub, or of an address that is none.
NO_HUB = (
    "TooManyRedirects DecodingError UnsupportedProtocol InvalidURL JSONDecodeError "
    "UnicodeDecodeError KeyError TypeError AttributeError"
).split()
# A second try may help after these statuses, and after those from 500 on that are not in FINAL.
BUSY = 408, 425, 429
FINAL = 501, 505, 507, 508, 510, 511


def check_arguments(repo: str, endpoint: str) -> None:
    """Exits with status 2 if no hub could accept the name, the token or HF_ENDPOINT. Raises
    OSError."""
    try:
        validate_repo_id(repo)
    except errors.HFValidationError:
        refuse(
            f"a model cannot be called {repo!r}: pass ME/MODEL of letters, digits and single - _ . "
            "inside, 96 characters for each part"
        )
    # huggingface_hub has removed line breaks and spaces around it.
    if not re.fullmatch(r"[\w.~+/=-]*", get_token() or "", re.ASCII):
        refuse(
            "your token contains characters that tokens never have, such as quotes: remove them "
            "from HF_TOKEN, or type .venv/bin/hf auth login"
        )
    if "@" in endpoint:  # huggingface_hub would send that password in place of the token
        refuse("HF_ENDPOINT has a user or a password, which would replace your token: remove it")


def explain(error: Exception, hub: str, repo: str) -> str:
    """What the Hub, or the way to it, did not allow, and what to do, in one line."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    why = " ".join(str(error).split()) or type(error).__name__
    token = get_token()
    if token:  # a server may repeat it
        why = why.replace(token, "<your token>")
    why = why[:300]
    if isinstance(error, errors.LocalTokenNotFoundError):
        return "you are not logged in: type .venv/bin/hf auth login, or set HF_TOKEN"
    if status == 401:
        return f"{hub} does not accept your token: type .venv/bin/hf auth login, or set HF_TOKEN"
    if status == 403:
        return f"your token may not write to {repo}: take one that may, or another name ({why})"
    if status in BUSY or (status and status >= 500 and status not in FINAL):
        return f"{hub} is busy or out of order: try again later ({why})"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set: unset it"
    if type(error).__name__ in NO_HUB or status == 511:
        return (
            f"{hub} is no hub, or a login page answers for it: check HF_ENDPOINT, the proxy "
            f"and the network ({type(error).__name__}: {why})"
        )
    if status is None:
        fault = shards.certificate_fault("SSL_CERT_FILE", "SSL_CERT_DIR")
        if fault:
            return fault
        if isinstance(error, (errors.HTTPError, ConnectionError, TimeoutError)):
            return f"cannot reach {hub}: check the network and HF_ENDPOINT, and try again ({why})"
        if shards.is_of_system(error):
            return shards.reason(error)
    return f"{hub} did not take the upload to {repo} ({type(error).__name__}: {why})"


@contextlib.contextmanager
def errors_as_lines(hub: str, repo: str) -> Iterator[None]:
    """Exits with status 2 and a line if the block fails."""
    try:
        yield
    except Exception as error:  # from the Hub or the network
        if isinstance(error, RuntimeError) and error.__cause__:  # from the upload of one file
            print(file=sys.stderr)  # its progress bar ends here
            error = error.__cause__
        refuse(explain(error, hub, repo))


def find_place(api: HfApi, repo: str, private: bool) -> str:
    """The full name of the model on the Hub. Exits with status 2 if a private upload would be
    public. Raises the errors of huggingface_hub."""
    user = api.whoami()["name"]
    repo = repo if "/" in repo else f"{user}/{repo}"
    try:
        present = api.model_info(repo)
    except errors.RepositoryNotFoundError:
        return repo
    if private and not present.private:
        where = f"{api.endpoint}/{repo}/settings"
        refuse(f"{repo} exists and is public: change that on {where}, or choose another name")
    print(f"{repo} exists: this upload will be its newest version")
    return repo


@shards.one_line("share.py", status=2)
def main() -> None:
    """Exports, and uploads if a name is given."""
    cli = weights.parser(__doc__, repo="ME/MODEL")
    cli.add_argument("--private", action="store_true", help="only you see the model's page")
    what = "the export's folder; default: <run>_export"
    cli.add_argument("--out", type=shards.folder_name, help=what)
    args = cli.parse_args()
    api = HfApi()
    repo = args.repo
    if repo is not None:  # before the export, because that may take minutes
        with errors_as_lines(api.endpoint, repo):
            check_arguments(repo, api.endpoint)
            repo = find_place(api, repo, args.private)
    w = export.open_on_cpu(args.weights, args.script)
    out = args.out or w.path.with_name(f"{w.path.stem}_export")
    export.export(w, out)
    if repo is None:
        command = ["./run.sh", "share", *sys.argv[1:], "YOUR_NAME/my-gpt"]
        print(f"to upload it: {shlex.join(command)}")
        return
    name = export.as_utf8(w.path.stem)
    # The model's newest version must not have an older one's.
    stale = [file for file in export.FILES if not (out / file).exists()]
    with errors_as_lines(api.endpoint, repo):
        # None leaves it to the settings of an organization.
        page = api.create_repo(repo, private=args.private or None, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=out,
            allow_patterns=sorted(export.FILES),
            delete_patterns=stale or None,
            commit_message=f"{name}, validation loss {w.result['val_loss']:.4f}",
        )
    print(f"uploaded to {page}")


if __name__ == "__main__":
    main()
