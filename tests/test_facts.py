"""What a log states of the machine and the repository."""

import subprocess
from pathlib import Path

import pytest
from facts import machine_facts

NOISY = "#!/bin/sh\necho 580.95.05\necho 'WARNING: infoROM is corrupted at gpu 0'\nexit 14\n"


@pytest.mark.parametrize(
    "nvidia_smi, driver",
    [(NOISY, "580.95.05"), ("#!/bin/sh\nexec sleep 2\n", ""), (None, "")],
    ids=["it warns", "it hangs", "there is none"],
)
def test_an_odd_nvidia_smi_costs_no_run(tmp_path, monkeypatch, nvidia_smi, driver):
    """It hangs where a GPU has fallen off the bus. Here a minute is short."""
    if nvidia_smi:
        (tmp_path / "nvidia-smi").write_text(nvidia_smi)
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    communicate = subprocess.Popen.communicate
    brief = lambda process, timeout: communicate(process, timeout=timeout / 200)
    monkeypatch.setattr(subprocess.Popen, "communicate", brief)
    assert machine_facts(tmp_path)["driver"] == driver


@pytest.mark.parametrize("folder", [".", "clone"])
def test_the_commit_is_that_of_the_files_own_repository(tmp_path, monkeypatch, folder):
    """A ZIP of the project may lie inside another repository, and GIT_DIR may name one."""
    git = "git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x"
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    found = machine_facts(tmp_path / folder)["git"]
    assert len(found) == (40 if folder == "." else 0)


@pytest.mark.parametrize(
    "home, logged",
    [
        ("/home/me", "--to=~/x:~ /mnt/home/me /home/metoo"),
        ("/", "--to=/home/me/x:/home/me /mnt/home/me /home/metoo"),
        (None, "--to=/home/me/x:/home/me /mnt/home/me /home/metoo"),
    ],
)
def test_the_home_folder_is_replaced_only_at_the_beginning_of_a_path(monkeypatch, home, logged):
    monkeypatch.delenv("HOME")
    if home:
        monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("XLA_SOMETHING", "--to=/home/me/x:/home/me /mnt/home/me /home/metoo")
    assert machine_facts(Path())["environment"]["XLA_SOMETHING"] == logged
