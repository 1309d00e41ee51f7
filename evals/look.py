"""Draws pictures of a run: losses; how far back heads look (reach); scalars and gates; what is
added up in the last layer and for the head (streams); singular values. WEIGHTS may also be a log,
logs/<run>.txt; of a log without weights there are losses only."""

from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from weights import ROOT, Weights, open_weights, parser, refuse, runner, val_shard

# isort: split
import runs
from plot import STYLE, plot_log, plt, save


def text(w: Weights, place: Path) -> np.ndarray:
    """The first four sequences of the validation shard, (4, T + 1)."""
    T = min(1024, w.c.val_T)
    shard = val_shard(w, place, T)
    if len(shard) <= 4 * T:
        refuse(f"{shard.filename} has {len(shard)} tokens, not {4 * T + 1}: name a longer --data")
    return next(w.code.read_batches([shard], [(4, T, 0)], w.c))


BLOCKS = "block", "mudd_block"
RECORDED = "attend", "attention", "mlp", "run_net", "weighted_sum", *BLOCKS


class Call(NamedTuple):
    """A call of one of the RECORDED functions of train_gpt.py, while the model is traced."""

    name: str
    caller: str  # the recorded function that called it; "": forward() did
    layer: int  # the layer that ran, or the next one; after the last layer their number
    arguments: tuple
    result: Any


def record_calls(code: ModuleType, calls: list[Call]) -> Any:
    """A context in which the RECORDED functions do as always, and add to calls. A function's call
    is added when it ends, after those that it made."""
    stack = [""]

    def recorded(name):
        function = getattr(code, name)

        def run(*arguments, **options):
            layer = sum(call.name in BLOCKS for call in calls)  # blocks that have ended
            stack.append(name)
            result = function(*arguments, **options)
            stack.pop()
            seen = dict(result) if isinstance(result, dict) else result  # forward() adds to gates
            calls.append(Call(name, stack[-1], layer, arguments, seen))
            return result

        return run

    return mock.patch.multiple(code, **{name: recorded(name) for name in RECORDED})


def observe(w: Weights, tokens: np.ndarray) -> tuple[dict, dict, list]:
    """Runs the model on tokens (B, T + 1), and returns what the pictures show:

    heads   by layer: q and k, (B, n T, H / n, K), the window in positions, the scale of scores
    gates   by name and layer: (B, T, n) outputs of nets, and gates of the value tables
    sums    (place, names of the terms, share of each term); see term_shares()
    """
    labels = []  # what is Python and no array, written while the model is traced

    def arrays(*_):
        heads = {}
        gates = {}
        for call in calls:
            if call.name == "attend":
                q, k, _, window, scale, _ = call.arguments
                heads[call.layer] = q, k, jnp.array([window]), jnp.array([scale])
            if call.name == "run_net":
                for output, x in call.result.items():
                    gates[gate_place(call.arguments[0], output, len(w.c.layers) - 1)] = x
        gates |= value_gates(w, calls)
        sums = last_sums(w, calls)
        labels.extend([list(gates), [(place, names) for place, names, _ in sums]])
        return heads, list(gates.values()), [shares[None] for *_, shares in sums]

    calls = []
    with record_calls(w.code, calls):
        found = runner(w, arrays, 1)(tokens)
    heads, gates, shares = jax.tree.map(np.asarray, found)
    gate_names, sum_names = labels
    gates = dict(zip(gate_names, gates, strict=True))
    sums = [(*names, x[0]) for names, x in zip(sum_names, shares, strict=True)]
    return heads, gates, sums


def sums_of(calls: list[Call]) -> list[Call]:
    """The sums of residual streams and of v: those of several terms, each (B, T, D)."""
    sums = [call for call in calls if call.name == "weighted_sum"]
    return [call for call in sums if call.result.ndim == 3 and len(call.arguments) > 1]


def value_gates(w: Weights, calls: list[Call]) -> dict[tuple[str, int], Array]:
    """The gate of every head for its layer's value table, (B, T, H), by name and layer. It is the
    weight of the second term of v. MUDD layers have none: there a net computes it."""
    gates = {}
    for call in sums_of(calls):
        if call.caller == "attention":
            layer = w.c.layers[call.layer]
            if layer.value_table is not None and not layer.mudd:
                _, (weight, _) = call.arguments
                gates["value_gates", call.layer] = weight[..., :: w.c.D // w.c.H]
    return gates


def last_sums(w: Weights, calls: list[Call]) -> list[tuple[str, list[str], Array]]:
    """Place, names of the terms and their shares, of the sums in the last layer and for the head.
    A term is known by being the same array as a saved stream or an output; any other is x or v."""
    saved = next(call.arguments[4] for call in calls if call.name in BLOCKS)
    known = {id(x): name for name, x in saved.items()}
    for call in calls:
        if call.name in ("attention", "mlp"):
            known[id(call.result)] = call.name
    last = len(w.c.layers) - 1
    found = []
    for call in sums_of(calls):
        in_last = call.layer == last and call.caller in ("attention", *BLOCKS)
        if in_last or call.layer > last:
            kind = "v" if call.caller == "attention" else "stream"
            place = f"layer {last}, {kind}" if in_last else "head"
            names = [known.get(id(x), f"own {kind}") for _, x in call.arguments]
            found.append((place, names, term_shares(call)))
    return found


def term_shares(call: Call) -> Array:
    """What each term of a sum adds along the sum: (term . sum) / (sum . sum), together 1."""
    total = call.result.astype("float32")
    direction = total / jnp.square(total).sum()
    return jnp.stack([(weight * x * direction).sum() for weight, x in call.arguments])


def gate_place(net: str, output: str, last: int) -> tuple[str, int]:
    """Under which name and layer an output of a net is drawn: -1 before all layers, and the head's
    after the last."""
    if net == "mudd_head":
        return "mudd_head", last + 1
    if net.startswith("mudd"):
        return f"mudd_{output}", int(net.removeprefix("mudd"))
    layer, name = output.split(".")
    return f"gate_{name}", -1 if layer == "input" else int(layer.removeprefix("layer"))


def attended(q, k, window: int, scale: float, far: np.ndarray) -> np.ndarray:
    """(heads, T): the share of each head's attention that lies t tokens back, averaged over the
    queries that `far`, (B, T), marks. q and k are (B, n T, heads / n, K), where n heads share keys;
    the window is in positions."""
    B, P, H, _ = q.shape
    T = far.shape[1]
    back = np.arange(P)[:, None] - np.arange(P)
    scores = scale * np.einsum("BPHK,BSHK->BHPS", np.float32(q), np.float32(k))
    mass = jax.nn.softmax(np.where((0 <= back) & (back <= window), scores, -np.inf))
    mass = np.asarray(mass).reshape(B, H, T, P // T, T, P // T).sum(axis=-1)
    mass = np.einsum("BHTNS,BT->NHTS", mass, far / far.sum()).reshape(-1, T, T)
    return np.array([[x.trace(-distance) for distance in range(T)] for x in mass])


def describe(layer: object) -> str:
    """A layer in a few lines of text: its window, and the fields that are set."""
    words = [layer.window or "no attention"]
    for name, value in vars(layer).items():
        if name != "window" and value not in (False, None, ()):
            words.append(name if value is True or name == "mudd" else f"{name}={value}")
    return "\n".join(words)


def draw_reach(out: Path, w: Weights, tokens: np.ndarray, heads: dict) -> None:
    """Draws how far back the heads of every layer look, from queries with a long history."""
    t = np.arange(tokens.shape[1] - 1)
    words = [describe(layer) for layer in w.c.layers]
    history = t - np.maximum.accumulate(np.where(tokens[:, :-1] == w.c.eot, t, 0), axis=1)
    least = int(np.quantile(history, 0.75))  # where a document starts, nothing is far
    rows = []
    for n, (*qk, window, scale) in heads.items():
        p = attended(*qk, window, scale, history >= least)
        within = [(p.cumsum(axis=1) < part).sum(axis=1) for part in (0.5, 0.9)]
        rows.append((n + np.linspace(-0.3, 0.3, len(p)), p @ t, *within))
    x, *far = np.concatenate(rows, axis=1)
    figure, ax = plt.subplots(figsize=(3 + 0.9 * len(words), 4.8), layout="constrained")
    windows = [int(window[0]) * len(t) // q.shape[1] for q, _, window, _ in heads.values()]
    ax.bar([*heads], windows, alpha=0.2, label="window")
    ax.axhline(least, color="tab:red", ls=":", label="text before each of the queries, at least")
    for y, mark, name in zip(far, "o_^", ("mean", "half within", "90 % within"), strict=True):
        ax.plot(x, y, mark, color="black", label=f"attention of a head: {name}")
    ax.set(xlabel="layer, its heads from left to right", ylabel="tokens back", yscale="symlog")
    ax.set_xticks(range(len(words)), [f"{n}\n{word}" for n, word in enumerate(words)])
    figure.legend(loc="outside lower center", ncols=3)
    save(figure, out / "reach")


def draw_gates(out: Path, w: Weights, gates: dict) -> None:
    """A dot for each number: the mean of tokens; a line: from 10 to 90 % of them."""
    lambdas = [name for name in w.arrays if name.endswith("_lambdas")]
    found = dict(gates)
    for name in lambdas:
        found |= {(name, n): np.ravel(x)[None] for n, x in enumerate(w.arrays[name])}
    found |= {(k, -1): w.arrays[k] for k in ("gate_scale", "smear_gate", "smear_lambda")}
    names = sorted({name for name, _ in found})
    layers = len(w.c.layers)
    rows = -(-len(names) // 4)
    figure, axes = plt.subplots(rows, 4, figsize=(13, 2.2 * rows), layout="constrained")
    for (name, n), x in found.items():
        x = np.float32(x).reshape(-1, x.shape[-1])
        ax = axes.flat[names.index(name)]
        at = n - 0.4 + (np.arange(x.shape[1]) + 0.5) / x.shape[1] * 0.8
        ax.vlines(at, *np.quantile(x, (0.1, 0.9), axis=0), alpha=0.4, lw=3)
        ax.plot(at, x.mean(axis=0), ".", color="black")
        ax.set(title=name, xlim=(-1.5, layers + 0.5), xticks=range(-1, layers + 1))
        ax.axhline(0, color="black", lw=0.5)
    for ax in axes.flat[len(names) :]:
        ax.remove()
    figure.supxlabel("layer (-1: before them; the head's is last), its numbers from left to right")
    save(figure, out / "gates")


def draw_streams(out: Path, sums: list[tuple]) -> None:
    """Draws a bar for each term of the last sums."""
    names = [f"{place}:  {name}" for place, names, _ in sums for name in names]
    shares = np.concatenate([shares for *_, shares in sums])
    at = -np.arange(len(names))
    figure, ax = plt.subplots(figsize=(8, 1 + 0.25 * len(names)), layout="constrained")
    colors = [f"C{i}" for i, (_, names, _) in enumerate(sums) for _ in names]  # one for each sum
    ax.bar_label(ax.barh(at, shares, color=colors), [f" {share:+.1%}" for share in shares])
    ax.set_yticks(at, names)
    ax.set(xlim=(-0.3, 1.3), xlabel="what the term adds along the sum: together 1")
    save(figure, out / "streams")


def draw_singular(out: Path, w: Weights) -> None:
    """Draws the singular values of every layer's matrices, divided by the largest."""
    figure, axes = plt.subplots(2, 3, figsize=(11, 6), layout="constrained")
    panels = dict(zip("q k v o fc proj".split(), axes.T.flat, strict=True))
    L = len(w.c.layers)
    table = w.code.param_table(w.c)
    for n in range(L):
        banks = {}
        for name in ("qk", "vo", "mlp"):
            pairs = zip(table[name].layers, w.arrays[name], strict=True)
            banks[name] = [matrix for layer, matrix in pairs if layer == n]
        qk = np.split(np.concatenate(banks["qk"]), 2) if banks["qk"] else []
        for names, matrices in ("qk", qk), ("vo", banks["vo"]), (("fc", "proj"), banks["mlp"]):
            for name, x in zip(names, matrices, strict=False):
                values = np.linalg.svd(x, compute_uv=False)
                panels[name].plot(values / values[0], color=plt.cm.viridis(n / L), label=n)
                panels[name].set(title=name, yscale="log", ylim=(1e-3, 1.2))
    figure.legend(*panels["fc"].get_legend_handles_labels(), loc="outside right", title="layer")
    figure.supxlabel("rank")
    figure.supylabel("singular value / the largest")
    save(figure, out / "singular")


def main() -> None:
    """Draws what the command line names."""
    cli = parser(__doc__)
    cli.add_argument("--out", type=Path, help="folder of the pictures; default: <run>_look")
    cli.add_argument("--data", type=Path, help="folder of the text; default: that of the run")
    args = cli.parse_args()
    if not args.weights.is_file():
        refuse(f"there is no file {args.weights}")
    path = args.weights.with_suffix(".npz")
    log = path.with_suffix(".txt") if args.weights == path else args.weights
    out = args.out or path.with_name(f"{path.stem}_look")
    plt.rcParams.update(STYLE)
    try:
        run = runs.read(log) if log == args.weights or log.exists() else None
        out.mkdir(parents=True, exist_ok=True)
    except (OSError, runs.Unreadable) as error:
        refuse(str(error) if isinstance(error, OSError) else f"{log} is no log of a run: {error}")
    if run:
        plot_log(run, out / "loss")
    if path.exists() or args.weights == path:
        w = open_weights(path, args.script)
        tokens = text(w, args.data or ROOT / w.config["data"])
        heads, gates, sums = observe(w, tokens)
        draw_reach(out, w, tokens, heads)
        draw_gates(out, w, gates)
        draw_streams(out, sums)
        draw_singular(out, w)
    print(f"pictures are in {out}")


if __name__ == "__main__":
    main()
