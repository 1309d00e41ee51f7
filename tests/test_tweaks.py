"""The promise "copy one file and tweak it": the README's diffs, and others, applied and run."""

import dataclasses
import importlib.util
import json
import math
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import train_gpt
from tests.tools import FLOAT32, SMALL, make_mesh, text, write_shard

README = (Path(train_gpt.__file__).parent / "README.md").read_text(encoding="utf-8")
DIFFS = re.findall(r"^```diff\n(.*?)^```", README, re.M | re.S)
FLAGS = ["tiny", *SMALL, "--stages", "2 256 8 8 0 1 0,1", "--steps", "2", "--seed", "5"]
FLAGS += [word for name in FLOAT32.items() for word in ("--{} {}".format(*name)).split()]
PLAN = "--plan", "Lv0 -"  # of all but the one that changes it: they compile sooner
ONE = "--steps", "1"  # the second is of another program, where Adam works
SWIGLU = """\
-        mlp    = bank(F, D, every, (b, 0), (m * tall, 2 * m * tall), 1.2 * m),  # fc, proj^T
+        mlp    = bank(F, D, every, (b, b, 0), (m * tall, m * tall, 2 * m * tall), 1.2 * m),
@@
-    fc, proj = w.mlp
-    fc, proj = fc.astype(x.dtype), (scale * proj).astype(x.dtype)
+    fc, gate, proj = w.mlp
+    fc, gate, proj = (matrix.astype(x.dtype) for matrix in (fc, gate, scale * proj))
@@
-    hidden = jnp.square(jax.nn.relu(norm_linear(x, fc, "output", c.mlp_forward, c)))
+    hidden = jax.nn.silu(norm_linear(x, gate, "output", c.mlp_forward, c))
+    hidden *= norm_linear(x, fc, "output", c.mlp_forward, c)
"""
NO_MLP_IN_ONE = """\
-        mlp    = bank(F, D, every, (b, 0), (m * tall, 2 * m * tall), 1.2 * m),  # fc, proj^T
+        mlp    = bank(F, D, attends, (b, 0), (m * tall, 2 * m * tall), 1.2 * m),
@@
+    if layer.window == "-":
+        return x
     return weighted_sum((w.mlp_lambdas[0], x), (1.0, mlp(x, w, c, w.mlp_lambdas[1])))
"""


def apply(diff: str, source: str = train_gpt.SOURCE) -> str:
    """Each hunk's old lines stand once in the source, and its new ones take their place."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.M):
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] for line in lines if line[0] in " -")
        assert source.count(old) == 1, old
        source = source.replace(old, "".join(line[1:] for line in lines if line[0] in " +"))
    return source


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Trains the tweaked script for two steps on one device; its module, log and weights."""
    write_shard(tmp_path / "x_train_000001.bin", text(1100))
    write_shard(tmp_path / "x_val_000000.bin", text(1100, 2))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices()[:1])
    jax.config.update("jax_disable_most_optimizations", True)

    def start(source: str, *flags: str):
        (tmp_path / "tweaked.py").write_text(source)
        spec = importlib.util.spec_from_file_location("tweaked", tmp_path / "tweaked.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.main([*FLAGS, *flags, "--data", str(tmp_path)])
        (log,) = Path("logs").glob("*.txt")
        facts = dict(re.findall(r"^(config|RESULT) (.*)$", log.read_text(), re.M))
        weights = dict(np.load(log.with_suffix(".npz")))
        for path in Path("logs").iterdir():
            path.unlink()
        return module, json.loads(facts["config"]), json.loads(facts["RESULT"]), weights

    yield start
    jax.config.update("jax_disable_most_optimizations", False)


def test_the_four_tweaks_of_the_readme_run(run):
    changes, losses, flags = [], set(), [(*PLAN, *ONE), ONE, PLAN, PLAN]
    for diff, argv in zip(DIFFS, flags, strict=True):
        module, config, result, weights = run(apply(diff), *argv)
        same = dataclasses.asdict(train_gpt.parse_config([*FLAGS, *argv])[1])
        same |= dict(preset="tiny", attention="xla", data=config["data"])
        changes.append({name for name, value in config.items() if value != same[name]})
        assert math.isfinite(result["val_loss"])
        losses.add(result["val_loss"])
        if "mlp_gains" in diff:
            assert weights["mlp_gains"].shape == (2, 32) and np.all(weights["mlp_gains"] != 1)
    assert changes == [{"muon_lr"}, {"plan"}, set(), set()]
    assert len(losses) == 4  # each of them made another run
    state = module.state_shapes(module.PRESETS["tiny"], make_mesh(8)).optimizer
    assert "ScaleByLionState" in str(state)


@pytest.mark.parametrize("diff, matrices", [(SWIGLU, 6), (NO_MLP_IN_ONE, 2)])
def test_matrices_a_layer_may_have_more_of_or_none(run, diff, matrices):
    _, _, result, weights = run(apply(diff), *PLAN)
    assert math.isfinite(result["val_loss"]) and weights["mlp"].shape == (matrices, 64, 32)
    assert all(np.any(matrix) for matrix in weights["mlp"])  # every one was trained


@pytest.mark.parametrize("old, new", [
    ("mlp    = bank(F, D, every, (b, 0), (", "mlp    = bank(F, D, attends, (b, 0), ("),
    ("mlp    = bank(F, D, every, (b, 0), (", "mlp    = bank(D, F, every, (b, 0), ("),
    ("    fc, proj = w.mlp", "    fc, gate, proj = w.mlp"),
])  # fmt: skip
def test_rows_and_layers_that_do_not_match_fail_before_they_train(run, old, new):
    """What was written in one of the two places only."""
    assert train_gpt.SOURCE.count(old) == 1
    with pytest.raises((ValueError, TypeError)):
        run(train_gpt.SOURCE.replace(old, new), *PLAN)


def test_what_cannot_be_dealt_evenly_is_said():
    c = train_gpt.PRESETS["tiny"]
    weights = {name: [0.0] * row.shape[0] for name, row in train_gpt.param_table(c).items()}
    assert len(train_gpt.deal(weights, c)) == 6
    with pytest.raises(ValueError, match="1 of mlp are left when 6 layers have 2 each"):
        train_gpt.deal(weights | {"mlp": [0.0] * 13}, c)
