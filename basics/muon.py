"""Muon: a matrix moves equally far along all of its singular directions.

Run     ./run.sh basics/muon.py [--draw FILE.svg]
Look    at `orthogonalize`; at how quintics lift small singular values; at what needs collectives
Source  Jordan et al. 2024, kellerjordan.github.io/posts/muon; Amsel et al. 2025, arXiv:2505.16932
In train_gpt.py  `orthogonalize` is this one in bfloat16, after which `normuon` gives the rows equal
        sizes. `bank` shards by whole matrices, `apply_update` decays only weights that it shrinks
"""

import os
import re
import sys
from argparse import ArgumentParser, FileType, RawDescriptionHelpFormatter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, P
from jax.sharding import AxisType, NamedSharding

# Coefficients a, b, c of a x + b x^3 + c x^5, for five iterations.
JORDAN = ((3.4445, -4.7750, 2.0315),) * 5
POLAR = (  # Polar Express, rounded: each quintic is the best for what the one before it leaves
    (8.15655, -22.48329, 15.87877),
    (4.04293, -2.80892, 0.50002),
    (3.89167, -2.77248, 0.50606),
    (3.28575, -2.36813, 0.46449),
    (2.34654, -1.70978, 0.42324),
)
WIDTH = 64  # of the model that is trained
STEPS = 200
CONTEXT = 8  # bytes that the model reads to predict the next one


# ---- Muon ----------------------------------------------------------------------------------------
def orthogonalize(G_NRC: Array, quintics: tuple = POLAR) -> Array:
    """About U V^T for each G = U S V^T, by products alone. An odd polynomial in X acts on its
    singular values: a X + b (X X^T) X + c (X X^T)^2 X = U (a S + b S^3 + c S^5) V^T."""
    tall = G_NRC.shape[-2] > G_NRC.shape[-1]
    X = G_NRC.mT if tall else G_NRC  # so that X X^T is the smaller product
    # No singular value exceeds this norm, so all of them start in [0, 1), where quintics lift them.
    X = X / (1.02 * jnp.linalg.norm(X, axis=(-2, -1), keepdims=True) + 1e-6)
    for a, b, c in quintics:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if tall else X


def muon(beta: float = 0.95) -> optax.GradientTransformation:
    """Nesterov momentum, then orthogonalization, of each array in a tree: matrices (..., R, C)."""

    def average(momentum, grad):
        return beta * momentum + (1 - beta) * grad

    def step(momentum, grad):
        rows, columns = grad.shape[-2:]
        scale = max(1, rows / columns) ** 0.5  # so that each output of a tall one changes as much
        return scale * orthogonalize(average(momentum, grad))

    def update(grads, momentum, params=None):
        momentum = jax.tree.map(average, momentum, grads)
        return jax.tree.map(step, momentum, grads), momentum

    return optax.GradientTransformation(optax.tree.zeros_like, update)


# ---- What the quintics do ------------------------------------------------------------------------
def lift_singular_values() -> dict[str, list[np.ndarray]]:
    """Singular values of a 96 x 48 matrix after 0 to 5 quintics; at first as uneven as those of a
    gradient."""
    rng = np.random.default_rng(0)
    U, _, Vt = np.linalg.svd(rng.normal(size=(96, 48)), full_matrices=False)
    S = np.geomspace(1, 1e-3, 48)
    G = (U * S @ Vt).astype(np.float32)
    curves = {}
    for name, quintics, least in ("Jordan", JORDAN, 0.2), ("Polar Express", POLAR, 0.4):
        p = S / (1.02 * np.linalg.norm(S))
        curve = [p]
        for a, b, c in quintics:
            p = a * p + b * p**3 + c * p**5
            curve.append(p)
        print(f"{name}: number of quintics; singular values; relative distance from U V^T")
        for n, p in enumerate(curve):
            distance = np.mean((p - 1) ** 2) ** 0.5  # U p V^T - U V^T has singular values p - 1
            print(f"{n} {p.min():10.4f} .. {p.max():.3f} {distance:12.3f}")
        X = jax.jit(orthogonalize, static_argnums=1)(G, quintics)
        error = np.abs(X - U * p @ Vt).max()
        lifted = least < p.min() and p.max() < 1.25
        check(
            f"orthogonalize(U S V^T) is U p(S) V^T within {error:.1e}, and {least} < p(S) < 1.25",
            error < 3e-5 and lifted,
        )
        curves[name] = curve
    return curves


# ---- Muon on several devices ---------------------------------------------------------------------
def shard_a_stack() -> None:
    """The update of 16 matrices on 8 devices: each has two matrices, or 8 rows of every matrix."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    grads, momentum = jax.random.normal(jax.random.key(1), (2, 16, 64, 128))
    on_one_device, _ = jax.jit(muon().update)(grads, momentum)
    for name, spec in dict(matrices=P("fsdp"), rows=P(None, "fsdp")).items():
        sharding = NamedSharding(mesh, spec)
        arguments = jax.device_put((grads, momentum), sharding)
        update = jax.jit(muon().update, out_shardings=sharding)
        program = update.lower(*arguments).compile()
        updates, _ = program(*arguments)
        error = np.abs(np.asarray(updates) - on_one_device).max()
        collectives = re.findall(r" (all-|reduce-scatter|collective-).*\(", program.as_text())
        n = len(collectives)
        exchanges = n > 0
        expected = name == "rows"
        check(
            f"by {name}: {n} collectives, update within {error:.1e} of one device's",
            error < 2e-5 and exchanges == expected,
        )


# ---- Muon against AdamW --------------------------------------------------------------------------
def rms_norm(x: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)


def loss_fn(params: dict[str, Array], rows: Array) -> Array:
    """Mean loss, nats: an MLP predicts the last byte of each row from the others."""
    x = params["embed"][rows[:, :-1]].reshape(len(rows), WIDTH)
    for up, down in zip(params["up"], params["down"], strict=True):
        x = x + jnp.square(jax.nn.relu(rms_norm(x) @ up.T)) @ down.T
    logits = rms_norm(x) @ params["head"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, -1]).mean()


def initial_params(rng: np.random.Generator) -> dict[str, Array]:
    params = dict(
        embed=rng.normal(size=(257, WIDTH // CONTEXT)),
        up=rng.normal(size=(2, 4 * WIDTH, WIDTH)) / WIDTH**0.5,
        down=np.zeros((2, WIDTH, 4 * WIDTH)),
        head=np.zeros((257, WIDTH)),
    )
    return jax.tree.map(jnp.float32, params)


def read_rows(split: str) -> np.ndarray:
    """All runs of 9 consecutive bytes in the training or validation text."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "data"))
    import shards
    import source_code

    source_code.make(source_code.FOLDER)
    tokens = shards.tokens(source_code.FOLDER, split).astype(np.int32)
    return np.lib.stride_tricks.sliding_window_view(tokens, CONTEXT + 1)


def train(
    rule: optax.GradientTransformation, rate: float, table_rate: float, seed: int = 0
) -> float:
    """Trains the matrices with the rule, at a highest rate of `rate`, and embedding and head with
    Adam, at `table_rate`. Returns the validation loss in nats."""
    rows = read_rows("train")
    schedule = optax.schedules.warmup_cosine_decay_schedule
    rules = dict(
        rule=optax.chain(rule, optax.scale_by_learning_rate(schedule(0, rate, 20, STEPS))),
        adam=optax.adam(schedule(0, table_rate, 20, STEPS), 0.9, 0.99),
    )
    optimizer = optax.partition(rules, dict(embed="adam", up="rule", down="rule", head="adam"))
    rng = np.random.default_rng(seed)
    params = initial_params(rng)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, batch):
        grads = jax.grad(loss_fn)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(STEPS):
        batch = rows[rng.integers(len(rows), size=512)]
        params, state = step(params, state, batch)
    return float(jax.jit(loss_fn)(params, read_rows("val")[::20]))


# ---- Plumbing ------------------------------------------------------------------------------------
def draw(path: str, curves: dict[str, list[np.ndarray]]) -> None:
    os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=os.devnull)  # not a notebook's
    import matplotlib.pyplot as plt

    plt.style.use(["default", {"svg.hashsalt": "jNanoGPT", "font.size": 9}])
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.5), sharey=True, layout="constrained")
    for ax, (name, curve) in zip(axes, curves.items(), strict=True):
        ax.semilogx(curve[0], np.transpose(curve), label=[f"{i} quintics" for i in range(6)])
        ax.set(title=name, xlabel="singular value before", ylabel="after", ylim=(-0.1, 2.6))
    axes[0].legend()
    figure.savefig(path, metadata={"Date": None})


def check(what: str, right: bool) -> None:
    print("ok   " if right else "WRONG", what)
    if not right:
        sys.exit(1)


def main() -> None:
    jax.config.update("jax_platforms", "cpu")  # with 8 TPUs or GPUs, delete these two lines
    jax.config.update("jax_num_cpu_devices", 8)
    cli = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    cli.add_argument("--draw", type=FileType("ab"), metavar="FILE.svg", help="also draw a picture")
    flags = cli.parse_args()
    curves = lift_singular_values()
    shard_a_stack()
    # These rates were the best of 20 pairs for AdamW and 16 for Muon, with two seeds each:
    # records/other/basics/muon_rates.txt. Over four seeds AdamW ends at 2.274 .. 2.284, Muon at
    # 2.102 .. 2.144.
    adamw = optax.chain(optax.scale_by_adam(0.9, 0.95), optax.add_decayed_weights(0.1))
    by_adamw = train(adamw, 0.012, 0.08)
    by_muon = train(muon(), 0.04, 0.08)
    gain = by_adamw - by_muon
    text = f"loss {by_adamw:.3f} with AdamW, {by_muon:.3f} with Muon: lower by {gain:.3f} (> 0.05)"
    check(text, gain > 0.05)
    if flags.draw:
        draw(flags.draw.name, curves)


if __name__ == "__main__":
    main()
