"""./run.sh idea makes copies of train_gpt.py with patches, and never overwrites an edited one."""

import subprocess

import idea
import pytest


def function(name: str) -> str:
    """A function of ten lines."""
    return f"def {name}():\n" + "".join(f"    {name}{i} = 1\n" for i in range(9)) + "\n\n"


BASE = function("a") + function("b") + function("c")


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A repository with a train_gpt.py and a shelf of four ideas. Of these, two change the same
    line, and one was made for another file. In a repository, git apply would pass over what is in
    no commit, and say nothing, as where TMPDIR is in one."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(idea.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "train_gpt.py").write_text(BASE)
    shelf = tmp_path / "records/ideas"
    shelf.mkdir(parents=True)
    lines = {"first": "a4 = 2", "second": "c4 = 2", "third": "c4 = 3", "old": "d4 = 2"}
    for name, line in lines.items():
        base = BASE if name != "old" else function("d")
        patch = idea.difference(base.encode(), base.replace(f"{line[:2]} = 1", line).encode())
        (shelf / f"{name}.patch").write_bytes(f"# The {name} idea.\n".encode() + patch)
    monkeypatch.setattr(idea, "SHELF", shelf)
    monkeypatch.setattr(idea, "TRAINER", tmp_path / "train_gpt.py")
    monkeypatch.setattr(idea.write_copy, "__defaults__", (tmp_path,))
    return tmp_path


def test_ideas_make_a_copy_that_run_sh_trains(place, capsys, monkeypatch):
    started = []
    monkeypatch.setattr(idea.os, "execv", lambda program, words: started.append((program, words)))
    idea.main(["second", "first", "tiny", "--steps", "3", "--data", "x y"])
    words = ["run.sh", "idea_second_first.py", "tiny", "--steps", "3", "--data", "x y"]
    assert started == [(idea.ROOT / "run.sh", words)]
    expected = BASE.replace("a4 = 1", "a4 = 2").replace("c4 = 1", "c4 = 2")
    assert (place / "idea_second_first.py").read_text() == expected
    idea.main([])
    assert "\nfirst              The first idea.\n" in capsys.readouterr().out


def test_an_edited_copy_stays(place):
    copy = place / "idea_first.py"
    idea.write_copy(["first"])
    idea.write_copy(["first"])
    text = copy.read_text()
    copy.write_text(text + "x = 1\n")
    with pytest.raises(idea.Conflict, match="idea_first.py is there, edited or older"):
        idea.write_copy(["first"])
    assert copy.read_text() == text + "x = 1\n"


@pytest.mark.parametrize("words, message", [
    ("frist tiny", "there is no idea frist: ./run.sh idea  lists them"),
    ("second first third", "do not combine: third changes lines of those before it"),
    ("old tiny", "old.patch does not apply: error: patch failed"),
])  # fmt: skip
def test_what_cannot_be_made_is_refused(place, words, message, capsys):
    with pytest.raises((idea.Conflict, SystemExit)) as refused:
        idea.main(words.split())
    assert message in str(refused.value) + capsys.readouterr().err
    assert not [*place.glob("idea_*")]
