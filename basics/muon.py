"""Muon: a matrix moves equally far along all of its singular directions.

Run     ./run.sh basics/muon.py [--draw FILE.svg]
Look    at `orthogonalize`; at how quintics lift small singular values; at who needs collectives
Source  Jordan et al. 2024, kellerjordan.github.io/posts/muon; Amsel et al. 2025, arXiv:2505.16932
In train_gpt.py  `orthogonalize` is this one, in bfloat16; `normuon` then evens out the rows; `bank`
        shards by whole matrices; `apply_update` decays only weights that the update shrinks
"""

import re
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, P
from jax.sharding import AxisType, NamedSharding

D, STEPS, JORDAN = 64, 200, ((3.4445, -4.7750, 2.0315),) * 5
POLAR = (  # Polar Express, rounded: each quintic is the best for what the one before it leaves
    (8.15655, -22.48329, 15.87877), (4.04293, -2.80892, 0.50002), (3.89167, -2.77248, 0.50606),
    (3.28575, -2.36813, 0.46449), (2.34654, -1.70978, 0.42324))  # fmt: skip


def orthogonalize(G_NRC: Array, quintics: tuple = POLAR) -> Array:
    """About U V^T of each G = U S V^T, by products alone. An odd polynomial in X acts on its
    singular values: a X + b (X X^T) X + c (X X^T)^2 X = U (a S + b S^3 + c S^5) V^T."""
    X = G_NRC.mT if (tall := G_NRC.shape[-2] > G_NRC.shape[-1]) else G_NRC  # small X X^T
    # No singular value is above this norm: they begin in [0, 1), where the quintics lift them.
    X = X / (1.02 * jnp.linalg.norm(X, axis=(-2, -1), keepdims=True) + 1e-6)
    for a, b, c in quintics:
        A = X @ X.mT
        X = a * X + (b * A + c * A @ A) @ X
    return X.mT if tall else X


def muon(beta: float = 0.95) -> optax.GradientTransformation:
    """Nesterov momentum, then orthogonalization of each matrix in a tree of (..., R, C)."""

    def update(grads, momentum, params=None):
        average = lambda m, g: beta * m + (1 - beta) * g
        momentum = jax.tree.map(average, momentum, grads)
        gain = lambda g: max(1, g.shape[-2] / g.shape[-1]) ** 0.5  # so outputs move alike in all
        step = lambda m, g: gain(g) * orthogonalize(average(m, g))
        return jax.tree.map(step, momentum, grads), momentum

    return optax.GradientTransformation(optax.tree.zeros_like, update)


def lift() -> dict[str, list[np.ndarray]]:
    """Singular values of a 96 x 48 matrix, uneven as a gradient's are, after 0 .. 5 quintics."""
    U, _, Vt = np.linalg.svd(np.random.default_rng(0).normal(size=(96, 48)), full_matrices=False)
    S, curves = np.geomspace(1, 1e-3, 48), {}
    for name, quintics, low in ("Jordan", JORDAN, 0.2), ("Polar Express", POLAR, 0.4):
        p = S / (1.02 * np.linalg.norm(S))
        curves[name] = [p, *(p := a * p + b * p**3 + c * p**5 for a, b, c in quintics)]
        print(f"{name}: after n quintics singular values, distance from U V^T of its size")
        X = jax.jit(orthogonalize, static_argnums=1)((U * S @ Vt).astype("f4"), quintics)
        for i, q in enumerate(curves[name]):
            print(f"{i} {q.min():10.4f} .. {q.max():.3f} {np.mean((q - 1) ** 2) ** 0.5:12.3f}")
        error, right = np.abs(X - U * p @ Vt).max(), low < p.min() < p.max() < 1.25
        check(f"X is U p(S) V^T to {error:.1e}; {low} < p(S) < 1.25", error < 3e-5 and right)
    return curves


def shard_a_stack() -> None:
    """The update of 16 matrices on 8 devices, each with two of them, or with 8 rows of all."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    given = jax.random.normal(jax.random.key(1), (2, 16, 64, 128))  # gradients, momentum
    one, _ = jax.jit(muon().update)(*given)
    for name, spec in dict(matrices=P("fsdp"), rows=P(None, "fsdp")).items():
        mine = jax.device_put([*given], NamedSharding(mesh, spec))
        program = jax.jit(muon().update, out_shardings=mine[0].sharding).lower(*mine).compile()
        error = np.abs(np.asarray(program(*mine)[0]) - one).max()
        n = len(re.findall(r" (all-|reduce-scatter|collective-).*\(", program.as_text()))
        right = error < 2e-5 and (n > 0) == (name == "rows")
        check(f"by {name}: {n} collectives, one device's update to {error:.1e}", right)


def loss_fn(params: dict[str, Array], rows: Array) -> Array:  # of each row's last byte
    norm = lambda x: x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)
    x = params["embed"][rows[:, :-1]].reshape(len(rows), D)
    for up, down in zip(params["up"], params["down"], strict=True):
        x = x + jnp.square(jax.nn.relu(norm(x) @ up.T)) @ down.T
    logits = norm(x) @ params["head"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, -1]).mean()


def train(rule: optax.GradientTransformation, rate: float, rest: float, seed: int = 0) -> float:
    """Loss on bytes held out, nats: the matrices trained by the rule, the two tables by Adam."""
    sys.path.append(str(Path(__file__).resolve().parent.parent / "data"))
    import shards
    import source_code as source

    source.make(source.FOLDER)
    tokens = (shards.tokens(source.FOLDER, split).astype("i4") for split in ("train", "val"))
    rows, held_out = (np.lib.stride_tricks.sliding_window_view(t, 9) for t in tokens)
    rng, rates = np.random.default_rng(seed), optax.schedules.warmup_cosine_decay_schedule
    rule = optax.chain(rule, optax.scale_by_learning_rate(rates(0, rate, 20, STEPS)))
    rules = dict(rule=rule, adam=optax.adam(rates(0, rest, 20, STEPS), 0.9, 0.99))
    optimizer = optax.partition(rules, dict(embed="adam", up="rule", down="rule", head="adam"))
    embed, up = rng.normal(size=(257, 8)), rng.normal(size=(2, 4 * D, D)) / D**0.5
    params = dict(embed=embed, up=up, down=np.zeros((2, D, 4 * D)), head=np.zeros((257, D)))
    state = optimizer.init(params := jax.tree.map(jnp.float32, params))
    update = jax.jit(lambda p, state, x: optimizer.update(jax.grad(loss_fn)(p, x), state, p))
    for _ in range(STEPS):
        updates, state = update(params, state, rows[rng.integers(len(rows), size=512)])
        params = optax.apply_updates(params, updates)
    return float(jax.jit(loss_fn)(params, held_out[::20]))


def draw(path: str, curves: dict[str, list[np.ndarray]]) -> None:
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.hashsalt": "jNanoGPT", "font.size": 9})
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
    cli.add_argument("--draw", metavar="FILE.svg")
    path, curves = cli.parse_args().draw, lift()
    shard_a_stack()
    adamw = optax.chain(optax.scale_by_adam(0.9, 0.95), optax.add_decayed_weights(0.1))
    # The best of 20 and of 16 pairs of rates, two seeds each, in
    # records/other/basics/muon_rates.txt. Over four seeds AdamW ends at 2.274 .. 2.284, Muon at
    # 2.102 .. 2.144.
    a, b = train(adamw, 0.012, 0.08), train(muon(), 0.04, 0.08)
    check(f"loss {a:.3f} by AdamW, {b:.3f} by Muon: lower by {a - b:.3f}, above 0.05", a - b > 0.05)
    if path:
        draw(path, curves)


if __name__ == "__main__":
    main()
