"""run/install.py: which Pythons it takes, which settings of pip it keeps, which damage it finds."""

import importlib.util
import os
import subprocess
import sys

import install
import messages
import pytest
from fake_machine import BASH


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to work in, and no settings of pip."""
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("PIP_", "XDG_CONFIG")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))
    monkeypatch.setattr(install, "SHARED", [str(tmp_path / "none")])
    return tmp_path


# ---- Before --------------------------------------------------------------------------------------
@pytest.mark.parametrize("name, value, reason", [
    ("version_info", (3, 10, 0), "is 3.10"), ("maxsize", 2**31 - 1, "has 32 bits"),
])  # fmt: skip
def test_a_python_that_jax_has_no_wheels_for_is_unfit(folder, monkeypatch, name, value, reason):
    assert install.unfit(11, False) == ""
    monkeypatch.setattr(sys, name, value)
    assert install.unfit(11, True) == reason


def test_the_python_of_venv_cannot_make_it_anew(folder, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(folder / ".venv"))
    assert install.unfit(11, False) == "is of .venv itself"


@pytest.mark.parametrize("fault, message", [
    ("noexec", "this disk is mounted noexec"), ("links", "this disk has no symbolic links"),
    ("rights", "cannot make .venv in "), ("venv", " failed: the last line"),
])  # fmt: skip
def test_a_venv_that_cannot_be_made_is_one_line(folder, monkeypatch, fault, message):
    def refuse(*_, **__):
        raise PermissionError(1, "Operation not permitted")

    python = folder / "python"
    python.write_text(f"#!{BASH}\necho first; echo the last line >&2; exit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    if fault == "noexec":
        monkeypatch.setattr(install, "is_noexec", lambda _: True)
    if fault == "links":
        monkeypatch.setattr(os, "symlink", refuse)
    if fault == "rights":
        monkeypatch.setattr(os, "makedirs", refuse)
    line = install.make()
    assert message in line and "\n" not in line


# ---- After ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("path, size, text, found", [
    ("x/a.so", 3, "abc", ""),
    ("x/a.so", 3, None, "has a damaged package (x/a.so: No such file or directory)"),
    ("x/a.so", 3, "ab", "imported"),
    ("x/a.py", 3, "", "has a damaged package (x/a.py is empty)"),
    ("x/a.py", 3, "edited", "imported"),
    ("x/__pycache__/a.pyc", 3, None, ""),
    ('"x/a, b.so"', 3, None, "has a damaged package ("),
    ("x/a.py", "", None, ""), ("a list in another format", "x", "abc", "imported"),
])  # fmt: skip
def test_damage_is_found_by_the_list_of_a_package(folder, monkeypatch, path, size, text, found):
    monkeypatch.setattr(install, "failure", lambda: "imported")
    (folder / "x").mkdir()
    (folder / "x-1.dist-info").mkdir()
    (folder / "x-1.dist-info/RECORD").write_text(f"{path},sha256=0,{size}\n")
    if text is not None:
        (folder / path).write_text(text)
    line = install.damage(str(folder))
    assert line == found or found and line.startswith(found)


def test_an_older_python_and_other_wheels_do_not_fit(folder):
    minor = sys.version_info[1]
    assert install.wrong(minor, []) == ""
    assert install.wrong(minor + 1, []) == f"is of Python 3.{minor}"
    (folder / ".venv").mkdir()
    (folder / ".venv/installed-tpu").write_text("other==1\n")  # as run.sh wrote it until November
    assert install.wrong(minor, ["cuda12"]) == ""
    assert install.wrong(minor, ["cuda12", "tpu"]) == "has the wheels of tpu"


def test_what_is_not_there_at_all_is_noticed(folder, monkeypatch):
    minor = sys.version_info[1]
    packages = folder / f".venv/lib/python3.{minor}/site-packages"
    for name in "pip", "numpy-2.4.6.dist-info":
        (packages / name).mkdir(parents=True)
    (folder / ".venv/made-by-run.sh").touch()
    monkeypatch.setattr(sys, "prefix", str(folder / ".venv"))
    assert install.wrong(minor, []) == "has only a part of pip"
    (packages / "pip").rmdir()
    assert install.wrong(minor, []).startswith("has a damaged package (.venv/lib")  # no RECORD
    (packages / "numpy-2.4.6.dist-info/RECORD").write_text("x,,\n")
    (folder / ".venv/installed-cpu").write_text("numpy==2.4.6\n")
    assert install.wrong(minor, []) == ""
    (folder / ".venv/installed-cpu").write_text("numpy==2.5\noptax==0.2.8\n")
    assert install.wrong(minor, []) == "lacks numpy 2.5"
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    assert install.wrong(minor, []) == "is no virtual environment any more"


def test_the_first_cause_of_a_failed_import_is_told_in_one_line(folder, monkeypatch):
    (folder / "outer.py").write_text(
        "try:\n    import inner\nexcept ImportError as error:\n"
        "    raise ImportError('a\\n\\nlong page') from error\n"
    )
    (folder / "inner.py").write_text("raise ImportError('no\\nlibrary')\n")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(install, "PACKAGES", ["os", "outer"])
    monkeypatch.setattr(os, "environ", {"JAX_ENABLE_X64": "wrong"})
    monkeypatch.setattr(install, "is_noexec", lambda _: False)
    assert install.failure() == "cannot import outer: ImportError: no library"
    assert not os.environ  # a wrong value there is no damage


# ---- pip -----------------------------------------------------------------------------------------
def test_pip_keeps_where_packages_come_from_and_nothing_else(folder, monkeypatch):
    (folder / "pip").mkdir()
    (folder / "pip/pip.conf").write_text(
        "[global]\nindex-url = https://a\nproxy = p\nconstraint = c.txt\nretries = 1\n"
    )
    (folder / ".config/pip").mkdir(parents=True)
    user = folder / ".config/pip/pip.conf"
    user.write_text(
        "[global]\nextra_index_url =\n  https://b\n  https://c d\ntimeout = 5\ncert = old\n"
        "[install]\ntarget = x\nuser = true\nuse-feature = fast-deps truststore\n"
        "cert = it's here\n[list]\nproxy = no\n"
    )
    monkeypatch.setenv("PIP_TIMEOUT", "9")
    monkeypatch.setenv("PIP_RETRIES", "")  # counts as unset
    monkeypatch.setenv("PIP_PREFIX", "/other")
    expected = {
        "PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "https://a", "PIP_PROXY": "p",
        "PIP_EXTRA_INDEX_URL": "\nhttps://b\nhttps://c d", "PIP_TIMEOUT": "9", "PIP_RETRIES": "1",
        "PIP_CERT": "it's here", "PIP_USE_FEATURE": "truststore",
    }  # fmt: skip
    code = f"{install.for_shell()}\nexec env -0"
    printed = subprocess.run([BASH, "-c", code], capture_output=True, text=True, check=True).stdout
    found = dict(row.split("=", 1) for row in printed.split("\0") if row.startswith("PIP_"))
    assert found == expected

    named = folder / "named.conf"  # which comes in place of the user's
    named.write_text("[global]\nproxy = q\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(named))
    assert install.sources()["proxy"] == "q" and "cert" not in install.sources()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert install.sources() == {"timeout": "9"}


def test_uv_gets_where_packages_come_from_and_nothing_else(folder, monkeypatch):
    for name in os.environ:
        if name.startswith("UV_"):
            monkeypatch.delenv(name)
    for name, value in {
        "PIP_INDEX_URL": "https://a", "PIP_EXTRA_INDEX_URL": "https://b https://c",
        "PIP_TRUSTED_HOST": "b", "PIP_CERT": "it's here", "PIP_RETRIES": "1", "PIP_TARGET": "x",
        "PIP_NO_CACHE_DIR": "1", "PIP_USE_FEATURE": "truststore", "UV_TARGET": "/other",
        "UV_CACHE_DIR": "kept", "UV_PYTHON": "3.9", "UV_INDEX_OURS_PASSWORD": "kept",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    code = f"{install.for_uv()}\nexport uv_flags\nexec env -0"
    printed = subprocess.run([BASH, "-c", code], capture_output=True, text=True, check=True).stdout
    found = dict(row.split("=", 1) for row in printed.split("\0") if row)
    assert {*found["uv_flags"].split()} == {
        "--index-strategy", "unsafe-best-match", "--index-url=https://a", "--native-tls",
        "--extra-index-url=https://b", "--extra-index-url=https://c", "--no-cache",
        "--allow-insecure-host=b",
    }  # fmt: skip
    assert {name: value for name, value in found.items() if name.startswith("UV_")} == {
        "UV_NO_CONFIG": "1", "UV_CACHE_DIR": "kept", "UV_HTTP_RETRIES": "1",
        "UV_INDEX_OURS_PASSWORD": "kept",
    }  # fmt: skip
    assert found["SSL_CERT_FILE"] == "it's here"


def test_a_settings_file_that_pip_cannot_read_is_named(folder, monkeypatch, capsys):
    named = folder / "named.conf"
    named.write_bytes(b"no section = 1\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(named))
    assert install.sources() == {}
    line = capsys.readouterr().err
    assert line.startswith(f"run.sh: warning: {named} is not read: ") and line.count("\n") == 1


@pytest.mark.parametrize("pip, uv, expected", [
    (True, True, "PYTHON -m pip install x"), (False, True, "uv pip install --python PYTHON x"),
    (False, False, "python3 -m pip --python PYTHON install x"),
])  # fmt: skip
def test_what_adds_a_package_works_where_venv_has_no_pip(folder, monkeypatch, pip, uv, expected):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: pip or None)
    monkeypatch.setenv("PATH", str(folder))
    if uv:
        (folder / "uv").write_text("")
        (folder / "uv").chmod(0o755)
    assert messages.install_command("x") == expected.replace("PYTHON", sys.executable)
