"""How far tests/test_golden.py's numbers are from ours with the record's roundings: README.md.

    python records/other/gpu_rounding/golden_errors.py float32 | bfloat16 | fp8 [rounded]

The argument is the format of the model and of Muon, fp8 that of the record: bfloat16, and the head
in FP8. With `rounded`, XLA keeps every bfloat16 rounding. Of each comparison in the test, this
prints the largest error and the tolerance.
"""

import dataclasses
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
import tests.conftest  # noqa: E402, F401  sets XLA_FLAGS, which the next line adds to

if "rounded" in sys.argv:
    os.environ["XLA_FLAGS"] += " --xla_allow_excess_precision=false"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import train_gpt  # noqa: E402
from tests import golden  # noqa: E402

NAMES = "compute", "head_forward", "head_backward"
FORMATS = {
    "float32": ["float32"] * 3,
    "bfloat16": ["bfloat16"] * 3,
    "fp8": ["bfloat16", "float8_e4m3fn", "float8_e5m2"],
}
FORMAT = sys.argv[1]
golden.C = dataclasses.replace(golden.C, **dict(zip(NAMES, FORMATS[FORMAT], strict=True)))
from tests import test_golden as test  # noqa: E402  after C has changed

C, GOLDEN = golden.C, golden.GOLDEN
golden.patch_fixture(type("Patch", (), {"setattr": staticmethod(setattr)}))
SIGNS = train_gpt.random_signs
train_gpt.random_signs = lambda rows, c: SIGNS(rows, c).astype(c.compute)


def show(what: str, found: dict[str, float], tolerance: float) -> None:
    """Prints how many comparisons hold, and the worst one."""
    worst = max(found, key=found.get)
    hold = sum(error < tolerance for error in found.values())
    print(f"{what}: {hold} of {len(found)} hold {tolerance:.0e}; {worst} {found[worst]:.2e}")


def losses_and_gradients() -> None:
    """Those of stage 1; with FP8, without the loss of validation, which has none."""
    train, val, grads = test.stage_1()
    found = {}
    for name, loss in {"train": train, "eval": val}.items():
        want = GOLDEN[f"loss/{name}/tied"][0][0]
        found[name] = abs(float(loss) / want - 1)
    if FORMAT == "fp8":
        del found["eval"]
    show("losses of stage 1", found, 1e-6)
    zero = {name: np.zeros_like(array) for name, array in golden.parameters().items()}
    grads = golden.theirs(golden.unstacked(grads), zero)
    grads["tied_head"] = grads["lm_head.weight"] + grads["embed.weight"].T
    show("gradients of stage 1", golden.errors("grad/stage1/autodiff", grads), 1e-4)


def eight_steps() -> None:
    """test_eight_steps_of_the_optimizers(), with errors in place of assertions."""
    rows, starts = test.optimizer_table()
    train_gpt.param_table = lambda c: rows
    params = {name: jnp.asarray(start) for name, start in starts.items()}
    waits = [name for name in params if not rows[name].every_step]
    lookups = [name for name in params if rows[name].kind == train_gpt.LOOKUP]
    state = train_gpt.State(
        params,
        {name: rows[name].optimizer.init(p) for name, p in params.items()},
        {name: jnp.zeros_like(params[name]) for name in waits},
        {name: params[name].astype(C.compute) for name in lookups},
        jnp.zeros((), jnp.int32),
    )
    history = []
    for step in range(8):
        lr = GOLDEN["optim/lr_multiplier"][step]
        row = train_gpt.schedule(C)[0]._replace(
            adam_lr=np.float32(C.adam_lr * lr),
            muon_lr=np.float32(C.muon_lr * lr),
            momentum=np.float32(GOLDEN["optim/muon_momentum"][step]),
            tied=np.bool_(step <= int(GOLDEN["optim/split_step"])),
        )
        gradients = {n: test.optimizer_gradient(n, step, p.shape) for n, p in params.items()}

        def update(state, gradients, row, adam_step=bool(step % 2)):
            return train_gpt.update_parameters(state, gradients, row, C, adam_step)

        state = golden.on_one_device(update)(state, gradients, row)
        history.append({name: np.asarray(array) for name, array in state.params.items()})
    moved, sums = {}, {}
    for name in rows.keys() - {"resid_lambdas"}:
        key = test.THEIRS.get(name, name)
        for after in (2, 8):
            if f"optim/after{after}/{key}" in GOLDEN:
                want = GOLDEN[f"optim/after{after}/{key}"]
                want = want.T if name == "head" else want.reshape(starts[name].shape)
                steps = history[after - 1][name] - starts[name], want - starts[name]
                moved[f"{name} after {after}"] = golden.relative(*steps)
        for step, want in enumerate(GOLDEN[f"optim/each_step/{key}"]):
            got = history[step][name].T if name == "head" else history[step][name]
            error = np.abs(golden.checksum(got, 2) - want).max() / want[0]
            sums[f"{name} after {step + 1}"] = error
    for kind, found in {"moved": moved, "sums": sums}.items():
        banks = {name: error for name, error in found.items() if "bank" in name}
        show(f"eight steps, {kind}, Muon", banks, 1e-4)
        rest = {name: error for name, error in found.items() if "bank" not in name}
        show(f"eight steps, {kind}, Adam", rest, 1e-4)
    buffer, average = state.opt_state["qk_bank"]
    get = lambda name: GOLDEN[f"optim/state/qk_bank/{name}"]
    show("Muon's momentum", {"qk": golden.relative(buffer[0], get("momentum_buffer"))}, 1e-5)
    error = golden.relative(average[0], get("second_momentum_buffer"))
    show("Muon's second moments", {"qk": error}, 1e-4)


print(sys.argv[1:])
with jax.default_matmul_precision("highest"):
    losses_and_gradients()
    eight_steps()
