"""compile_kernels.py: what attempts save, and whether its page is of these kernels."""

import re

import compile_kernels
import jax
import pytest
from compile_kernels import ALL, Row, Work
from messages import Fault

PAGE = compile_kernels.PAGE.read_text(encoding="utf-8")
VERSION = re.search(r"^- jax (\S+),", PAGE, re.M)[1]
traces = pytest.mark.skipif(jax.__version__ != VERSION, reason="the page is of another JAX")


def test_an_attempt_loses_below_the_rate_at_which_it_saves_nothing():
    work = Work(products=0.006, epilogues=0.001, others=0.5)
    share = compile_kernels.break_even(work, saved=0.002)
    assert work.products / share == pytest.approx(work.products + 0.002)
    assert compile_kernels.break_even(Work(others=0.003), saved=0.001) == 0.75
    assert compile_kernels.break_even(work, saved=-0.001) > 1, "it loses at the assumed rate"


def test_another_version_of_jax_is_one_line(monkeypatch):
    monkeypatch.setattr(jax, "__version__", "0.99")
    with pytest.raises(Fault, match=f"h100_kernels.md is of jax {VERSION}, and jax 0.99 traces"):
        compile_kernels.is_current()


def test_the_page_has_every_row_and_the_shelf_has_its_numbers():
    """The pages of the shelf and of the kernels."""
    times = PAGE.partition("## Milliseconds")[2].partition("\n## ")[0]
    shelf = (compile_kernels.ROOT / "records/ideas/README.md").read_text(encoding="utf-8")
    shelf = shelf.partition("## Kernels for Hopper")[2]
    for row in compile_kernels.ROWS:
        names, flags = row.cells()
        (line,) = re.findall(rf"^\| *{names} *\| *{flags} *\|(.*)\|$", times, re.M)
        *ms, GB, seconds = [cell.strip() for cell in line.split("|")]
        names = names if row.names == ALL else f"`{names}`"
        flags = f"`{flags}`" if flags else ""
        expected = f"| {names} | {flags} | {ms[0]} / {ms[2]} | {GB} | {seconds} |"
        assert expected.replace("|  |", "| |") in shelf.replace("**", "")


def test_the_compilers_flags_are_set_before_jax_starts(monkeypatch):
    """JAX reads them once, when the digest of the record's page makes it start."""
    calls = []
    tool = compile_kernels.compile_8xh100
    monkeypatch.setattr(jax, "__version__", VERSION)
    monkeypatch.setattr(tool, "prepare", lambda preset: calls.append("flags"))
    monkeypatch.setattr(tool, "digest_line", lambda: calls.append("digest"))
    with pytest.raises(Fault, match="h100_compile.md is of other programs"):
        compile_kernels.compile_rows(())
    assert calls == ["flags", "digest"]


@pytest.mark.slow
@traces
def test_the_page_is_of_these_kernels():
    """The rows with all attempts have all the code of the others."""
    rows = tuple(row for row in compile_kernels.ROWS if row.names == ALL)
    renew = "python lab/compile_kernels.py --write renews it"
    assert compile_kernels.is_current(rows), renew


@pytest.mark.slow
@traces
def test_a_digest_notices_a_change_of_a_kernel():
    row = Row(("fused_head",))
    source = row.source()
    wait = "plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile"
    assert source.count(wait) == 1
    digest = compile_kernels.traced_digest(source, ())
    assert digest in PAGE
    changed = source.replace(wait, wait.replace("(0", "(1"))
    assert compile_kernels.traced_digest(changed, ()) != digest
    assert compile_kernels.traced_digest(f"{source}# a comment\n", ()) == digest
