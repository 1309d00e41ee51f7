"""Pictures of a run: losses; how far back heads look (reach); scalars and gates; what is added up
in the last layer and for the head (streams); singular values. A log alone has losses only.
WEIGHTS may be a log, logs/<run>.txt, too."""

import functools
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
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


def listen(w: Weights, tokens: np.ndarray) -> tuple[dict, dict, list]:
    """What the model's functions are given and make: by layer q, k, window and scale; by name and
    layer gates (B, T, n); of the sums in the last layer and for the head where it is, names of the
    terms, and what each adds along the sum: together 1."""
    calls, inside, sums, last = [], [""], [], len(w.c.layers) - 1

    def call(name, function, *given, **options):
        inside.append(name)
        made = function(*given, **options)
        inside.pop()
        made = dict(made) if isinstance(made, dict) else made  # forward() adds to what it is given
        calls.append((name, inside[-1], given, made))
        return made

    def read(*_):  # while the forward pass is traced: arrays are known by identity
        saved = next(given[4] for name, _, given, _ in calls if name in BLOCKS)
        known = [*saved.items()]
        known += [(name, made) for name, _, _, made in calls if name in ("attention", "mlp")]
        n, heads, gates, shares = 0, {}, {}, []  # n: the layer that runs
        for name, where, given, made in calls:
            if name == "attend":
                heads[n] = *given[:2], jnp.array([given[3]]), jnp.array([given[4]])
            elif name == "run_net":
                gates |= {gate_place(given[0], output, last): x for output, x in made.items()}
            elif name == "weighted_sum" and made.ndim == 3 and len(given) > 1:
                if where == "attention" and w.c.layers[n].value_table is not None:
                    if not w.c.layers[n].mudd:
                        gates["value_gates", n] = given[1][0][..., :: w.c.D // w.c.H]
                if n > last or n == last and where in ("attention", *BLOCKS):
                    new = "v" if where == "attention" else "stream"
                    names = [next((k for k, y in known if y is x), f"own {new}") for _, x in given]
                    sums.append(("head" if n > last else f"layer {n}, {new}", names))
                    total = made.astype("float32") / jnp.square(made.astype("float32")).sum()
                    shares.append(jnp.stack([(a * x * total).sum() for a, x in given]))
            n += name in BLOCKS
        return heads, list(gates.values()), [x[None] for x in shares], list(gates)

    places = []

    def arrays(*given):
        heads, gates, shares, names = read(*given)
        places.extend(names)
        return heads, gates, shares

    names = "attend", "attention", "mlp", "run_net", "weighted_sum", *BLOCKS
    hooks = {name: functools.partial(call, name, getattr(w.code, name)) for name in names}
    with mock.patch.multiple(w.code, **hooks):
        heads, gates, shares = jax.tree.map(np.asarray, runner(w, arrays, 1)(tokens))
    gates = dict(zip(places, gates, strict=True))
    return heads, gates, [(*names, x[0]) for names, x in zip(sums, shares, strict=True)]


BLOCKS = "block", "mudd_block"


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
    """(heads, T): of each head's attention the share that lies so many tokens back, of the queries
    in far (B, T). q, k: (B, n T, heads / n, K), where n heads share keys; window in positions."""
    (B, P, H, _), T = q.shape, far.shape[1]
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
    t, words = np.arange(tokens.shape[1] - 1), [describe(layer) for layer in w.c.layers]
    history = t - np.maximum.accumulate(np.where(tokens[:, :-1] == w.c.eot, t, 0), axis=1)
    least, rows = int(np.quantile(history, 0.75)), []  # where a document starts, nothing is far
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


def draw_gates(out: Path, w: Weights, said: dict) -> None:
    """A dot for each number: the mean of tokens; a line: from 10 to 90 % of them."""
    lambdas = [name for name in w.arrays if name.endswith("_lambdas")]
    found = dict(said)
    for name in lambdas:
        found |= {(name, n): np.ravel(x)[None] for n, x in enumerate(w.arrays[name])}
    found |= {(k, -1): w.arrays[k] for k in ("gate_scale", "smear_gate", "smear_lambda")}
    names, layers = sorted({name for name, _ in found}), len(w.c.layers)
    rows = -(-len(names) // 4)
    figure, axes = plt.subplots(rows, 4, figsize=(13, 2.2 * rows), layout="constrained")
    for (name, n), x in found.items():
        x, ax = np.float32(x).reshape(-1, x.shape[-1]), axes.flat[names.index(name)]
        at = n - 0.4 + (np.arange(x.shape[1]) + 0.5) / x.shape[1] * 0.8
        ax.vlines(at, *np.quantile(x, (0.1, 0.9), axis=0), alpha=0.4, lw=3)
        ax.plot(at, x.mean(axis=0), ".", color="black")
        ax.set(title=name, xlim=(-1.5, layers + 0.5), xticks=range(-1, layers + 1))
        ax.axhline(0, color="black", lw=0.5)
    _ = [ax.remove() for ax in axes.flat[len(names) :]]
    figure.supxlabel("layer (-1: before them; the head's is last), its numbers from left to right")
    save(figure, out / "gates")


def draw_streams(out: Path, sums: list[tuple]) -> None:
    names = [f"{where}:  {name}" for where, names, _ in sums for name in names]
    shares, at = np.concatenate([shares for *_, shares in sums]), -np.arange(len(names))
    figure, ax = plt.subplots(figsize=(8, 1 + 0.25 * len(names)), layout="constrained")
    colors = [f"C{i}" for i, (_, names, _) in enumerate(sums) for _ in names]  # one for each sum
    ax.bar_label(ax.barh(at, shares, color=colors), [f" {share:+.1%}" for share in shares])
    ax.set_yticks(at, names)
    ax.set(xlim=(-0.3, 1.3), xlabel="what the term adds along the sum: together 1")
    save(figure, out / "streams")


def draw_singular(out: Path, w: Weights) -> None:
    figure, axes = plt.subplots(2, 3, figsize=(11, 6), layout="constrained")
    panels, L = dict(zip("q k v o fc proj".split(), axes.T.flat, strict=True)), len(w.c.layers)
    table = w.code.param_table(w.c)
    for n in range(L):
        own = {}
        for name in ("qk", "vo", "mlp"):
            pairs = zip(table[name].layers, w.arrays[name], strict=True)
            own[name] = [matrix for owner, matrix in pairs if owner == n]
        qk = np.split(np.concatenate(own["qk"]), 2) if own["qk"] else []
        for names, matrices in ("qk", qk), ("vo", own["vo"]), (("fc", "proj"), own["mlp"]):
            for name, x in zip(names, matrices, strict=False):
                values = np.linalg.svd(x, compute_uv=False)
                panels[name].plot(values / values[0], color=plt.cm.viridis(n / L), label=n)
                panels[name].set(title=name, yscale="log", ylim=(1e-3, 1.2))
    figure.legend(*panels["fc"].get_legend_handles_labels(), loc="outside right", title="layer")
    figure.supxlabel("rank")
    figure.supylabel("singular value / the largest")
    save(figure, out / "singular")


def main() -> None:
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
        heads, said, sums = listen(w, tokens)
        draw_reach(out, w, tokens, heads)
        draw_gates(out, w, said)
        draw_streams(out, sums)
        draw_singular(out, w)
    print(f"pictures are in {out}")


if __name__ == "__main__":
    main()
