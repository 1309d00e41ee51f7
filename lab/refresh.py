"""Makes the shelf's patches, which applied to an older train_gpt.py, apply to the file as it is.

    .venv/bin/python lab/refresh.py COMMIT

A patch that conflicts with what has changed since that commit stays as it is, with a line."""

import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "records"))
import idea


def refresh(old: bytes) -> None:
    """Renews all patches, which were made for an old train_gpt.py."""
    new = idea.TRAINER.read_bytes()
    for patch in [*idea.shelf().values(), *idea.SHELF.glob("base/*.patch")]:
        base = idea.base_of(patch)
        old_base = idea.patched(old, base) if base else old
        new_base = idea.merge(new, old, old_base)
        merged = idea.merge(new, old, idea.patched(old, patch))
        if merged is None or new_base is None:
            print(f"{patch.stem} conflicts with what has changed")
        else:
            comment = "".join(f"# {line}\n" for line in idea.description(patch))
            patch.write_bytes(comment.encode() + idea.difference(new_base, merged))


if __name__ == "__main__":
    refresh(subprocess.check_output(["git", "show", f"{sys.argv[1]}:train_gpt.py"]))
