"""basics/kernel.py runs, shows races, and its exercises have these answers."""

import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lab.tests.interpreted import CAN_INTERPRET, interpreter
from tests.tools import ROOT, basic

sys.path.append(str(ROOT / "basics"))
import kernel  # noqa: E402

SOURCE = Path(kernel.__file__).read_text(encoding="utf-8")
interprets = pytest.mark.skipif(not CAN_INTERPRET, reason="this version of JAX has no interpreter")


@interprets
@pytest.mark.parametrize("wait, first, second", [
    ("barrier_wait", "copy_gmem_to_smem(a_g", "copy_gmem_to_smem(a_g"),
    ("commit_smem", "copy_smem_to_gmem(y_s", "y_s[...] = "),
])  # fmt: skip
def test_it_runs_and_shows_two_lines_that_race(tmp_path, wait, first, second):
    done = basic(tmp_path, "kernel", "--forget", wait)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    *results, one, other = done.stdout.splitlines()
    assert len(results) == 3 and all(line.startswith("ok   ") for line in results)
    assert first in one and second in other


# ---- Exercises -----------------------------------------------------------------------------------
def changed(*changes: tuple[str, str]) -> ModuleType:
    """The file with other texts in place of some."""
    source = SOURCE
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    module = ModuleType("kernel_changed")
    exec(compile(source, "kernel_changed.py", "exec"), module.__dict__)
    return module


def run(module: ModuleType) -> tuple:
    """What the kernel returns, and the right result in float64."""
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.normal(size=(kernel.M, kernel.K)), jnp.bfloat16)
    b = jnp.asarray(rng.normal(size=(kernel.N, kernel.K)), jnp.bfloat16)
    with interpreter():
        results = jax.block_until_ready(module.fused_relu2_product(a, b))
    return results, np.square(np.maximum(np.float64(a) @ np.float64(b).T, 0))


def error(got, want) -> float:
    """The largest error, as a share of the largest number."""
    return np.abs(np.float64(got) - want).max() / want.max()


BEGIN, END = "        def multiply_step", "        return acc[...]"
ONE_SLOT = SOURCE[SOURCE.index(BEGIN) : SOURCE.index(END)]
TWO_SLOTS = """
        def start_copies(k):
            slot = lax.rem(k, 2)
            step = pl.ds(k * STEP, STEP)
            plgpu.copy_gmem_to_smem(a_g.at[rows, step], a_s.at[slot], copied.at[slot])
            plgpu.copy_gmem_to_smem(b_g.at[columns, step], b_s.at[slot], copied.at[slot])

        def multiply_step(k, _):
            slot = lax.rem(k, 2)
            plgpu.barrier_wait(copied.at[slot])
            plgpu.wgmma(acc, a_s.at[slot], b_s.at[slot].transpose((1, 0)))
            plgpu.wgmma_wait(0)

            @pl.when(k + 2 < K // STEP)
            def _():
                start_copies(k + 2)

        start_copies(0)
        start_copies(1)
        lax.fori_loop(0, K // STEP, multiply_step, None)
"""
MORE_MEMORY = [
    ("shared(TILE_M, STEP)", "shared(2, TILE_M, STEP)"),
    ("shared(TILE_N, STEP)", "shared(2, TILE_N, STEP)"),
    ("Barrier(num_arrivals=2)", "Barrier(num_arrivals=2, num_barriers=2)"),
]


@interprets
def test_exercise_1_two_slots():
    """A copy into a slot has to come after the product that reads it. If it comes before, the
    numbers are wrong."""
    y, want = run(changed((ONE_SLOT, TWO_SLOTS), *MORE_MEMORY))
    assert error(y, want) < 0.005
    lines = TWO_SLOTS.splitlines(keepends=True)
    product = next(i for i, line in enumerate(lines) if "wgmma(" in line)
    copy = next(i for i, line in enumerate(lines) if "pl.when" in line)
    early = [*lines[:product], *lines[copy : copy + 3], *lines[product:copy], *lines[copy + 3 :]]
    y, want = run(changed((ONE_SLOT, "".join(early)), *MORE_MEMORY))
    assert error(y, want) > 0.5


@interprets
def test_exercise_2_sums_of_rows_need_no_copy():
    """Threads have the numbers of a row in their registers, and write the sums to global memory
    themselves: without TMA, no fence and no wait is needed."""
    module = changed(
        ("a_g, b_g, y_g, a_s", "a_g, b_g, y_g, sums_g, a_s"),
        (
            "    y_s[...] = jnp.square(jnp.maximum(z, 0)).astype(y_s.dtype)\n",
            "    y = jnp.square(jnp.maximum(z, 0))\n"
            '    sums_g[lax.axis_index("n"), rows] = y.sum(axis=1)\n'
            "    y_s[...] = y.astype(y_s.dtype)\n",
        ),
        (
            "out_type=jax.ShapeDtypeStruct((M, N), jnp.bfloat16),",
            "out_type=[jax.ShapeDtypeStruct((M, N), jnp.bfloat16),"
            " jax.ShapeDtypeStruct((N // TILE_N, M), jnp.float32)],",
        ),
    )
    (y, sums), want = run(module)
    assert error(y, want) < 0.005
    assert error(sums.sum(axis=0), want.sum(axis=1)) < 1e-5
