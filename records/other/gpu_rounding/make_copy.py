"""Prints train_gpt.py with a `tiny` that rounds as the record does on eight H100s: README.md.

It was made for train_gpt.py of 9f7bd7b.

    python records/other/gpu_rounding/make_copy.py abc > gpu_rounding.py
    JAX_NUM_CPU_DEVICES=8 ./run.sh gpu_rounding.py tiny --seed 1

The argument names the parts of the change, below; with part c, the copy needs eight devices.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

# a: every bfloat16 rounding that the program states takes place, as OPTIONS has it for GPUs.
ROUNDINGS = [
    (
        "    return program.lower(*arguments).compile(OPTIONS.get(platform))",
        '    options = OPTIONS.get(platform, {}) | {"xla_allow_excess_precision": False}\n'
        "    return program.lower(*arguments).compile(options)",
    ),
]

# b: the head's formats are the record's, which are the defaults of Config.
FP8 = [
    (
        'prefixes="", head_forward="bfloat16",\n        head_backward="bfloat16", muon_lr=0.018',
        'prefixes="",\n        muon_lr=0.018',
    ),
]

# c: eight devices. All read the step's one sequence, and the loss of each counts an eighth of its
# tokens, so that the gradients of the eight add up to the gradient of `tiny` on one device.
DEVICES = [
    ("devices = devices[: c.batch]", "devices = devices[:8]"),
    ("if (n not in (1, 2, 4) and n % 8) or c.batch % n:", "if n != 8:"),
    ("at_once = math.gcd(c.microbatch, c.batch // mesh.size)", "at_once = 1"),
    ("tokens = shapes_on(mesh, P(mesh.axis_names), ", "tokens = shapes_on(mesh, P(), "),
    ("shardings = NamedSharding(mesh, P(mesh.axis_names)), ", "shardings = everywhere, "),
    (
        "    # All-gather the weights; the gather's vjp",
        "    tokens_MBS = varying(tokens_MBS, mesh_axes())\n"
        "    # All-gather the weights; the gather's vjp",
    ),
    (
        "jax.value_and_grad(loss_fn)(w, tokens_BS, loss_weights, c, stage)",
        "jax.value_and_grad(loss_fn)(\n"
        '            w, tokens_BS, loss_weights, c, stage, lax.axis_index("fsdp")\n'
        "        )",
    ),
    (
        "loss_weights: dict, c: Config, stage: int) -> Array:",
        "loss_weights: dict, c: Config, stage: int, eighth=None) -> Array:",
    ),
    (
        "    weights_J = jnp.stack([jnp.float32(loss_weights[k])",
        "    if eighth is not None:  # in training: what is not in it is no target\n"
        "        is_mine_T1 = (8 * jnp.arange(T) // T == eighth)[:, None]\n"
        "        targets_NJ = jnp.where(is_mine_T1, targets_NJ, -1)\n"
        "    weights_J = jnp.stack([jnp.float32(loss_weights[k])",
    ),
]

# c, too: reduce-scatters add in bfloat16 around a ring. The sum for device r begins with the part
# of device r + 1; each device that it reaches adds its own part and rounds, and r is the last.
RING = [
    (
        '    grad = lax.psum_scatter(grad_VD.astype(c.compute), "fsdp", tiled=True)\n'
        "    return lax.psum(grad, node_axes()).astype(jnp.float32)\n",
        '    n = lax.axis_size("fsdp")\n'
        "    parts = grad_VD.astype(c.compute).reshape(n, -1, *grad_VD.shape[1:])\n"
        '    parts = lax.all_to_all(parts, "fsdp", split_axis=0, concat_axis=0)  # of each device\n'
        '    parts = jnp.roll(parts, -1 - lax.axis_index("fsdp"), axis=0)\n'
        "    return functools.reduce(jnp.add, parts).astype(jnp.float32)\n"
        "\n\n"
        "all_gather.defvjp(\n"
        "    lambda x, c: (all_gather(x, c), None),\n"
        "    lambda c, _, grad: (reduce_scatter(grad, c),),\n"
        ")\n",
    ),
    (
        "def all_gather(x: Array, c: Config)",
        "@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))\n"
        "def all_gather(x: Array, c: Config)",
    ),
]
PARTS = {"a": ROUNDINGS, "b": FP8, "c": DEVICES + RING}


def main() -> None:
    """Prints the copy; every text that it replaces must be there exactly once."""
    source = (ROOT / "train_gpt.py").read_text(encoding="utf-8")
    for part in sys.argv[1]:
        for old, new in PARTS[part]:
            assert source.count(old) == 1, old
            source = source.replace(old, new)
    print(source, end="")


if __name__ == "__main__":
    main()
