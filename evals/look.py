"""Draws pictures of a run: its losses; how far back the heads look (reach); lambdas and gates; the
terms of the sums in the last layer and for the head (streams); singular values of the matrices. And
it writes a page to open in a browser, page.html: a text in which every token shows what the model
expected there. It prints a line for each of these files. WEIGHTS may also be a log, logs/<run>.txt.
From a log without weights it draws the losses only."""

import dataclasses
import math
import sys
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for PYTHONSAFEPATH=1
import page
from calls import BLOCKS, Call, attention, record_calls
from weights import ROOT, Weights, open_weights, parser, refuse, runner, shards, val_shard

# isort: split
import runs
from plot import STYLE, check_place, plot_log, plt, save


def text(w: Weights, place: Path) -> np.ndarray:
    """Tokens of the first four sequences of the validation shard, (4, T + 1)."""
    T = longest(w)
    shard = val_shard(w, place, T)
    if len(shard) <= 4 * T:
        refuse(f"{shard.filename} has {len(shard)} tokens, not {4 * T + 1}: name a longer --data")
    return next(w.code.read_batches([shard], [(4, T, 0)], w.c))


def longest(w: Weights) -> int:
    """Tokens in a sequence of the pictures."""
    return min(1024, w.c.val_T)


SHOWS = {  # what main() prints of each file
    "loss": "the training and validation losses, by step",
    "reach": "how many tokens back each attention head looks, and the window that it has",
    "gates": "by how much each layer scales what it adds up: learned factors, and gates by token",
    "streams": "how much each term contributes to the sums of the last layer and of the head",
    "singular": "the singular values of every matrix: a curve that falls early has a low rank",
    "page": "open it in a browser: the curve, a sample, and what the model expected in a text",
}
# Titles of the panels of draw_gates(), by the names of parameters and of nets' outputs.
TITLES = {
    "attn_lambdas": "attention sublayer: factors",
    "mlp_lambdas": "MLP sublayer: factors",
    "vo_lambdas": "attention: factors of two matrices",
    "skip_lambdas": "skip: weight before the sigmoid",
    "smear_lambda": "share of the previous embedding",
    "gate_scale": "factor of all gates from nets",
    "value_gates": "heads: weight of the value table",
    "gate_x0": "weight of the embedding x0",
    "gate_bigram": "weight of the n-grams' embedding",
    "gate_skip": "skip: gate of the earlier layer",
    "gate_xsa": "heads: removal of their own value",
    "gate_head": "heads: gate of the output",
    "gate_dc_in": "composed attention: weight of a head",
    "gate_dc_out": "composed attention: gate of a head",
    "mudd_v": "MUDD: streams mixed into values",
    "mudd_x": "MUDD: streams mixed into x",
    "mudd_value": "MUDD: weight of the value table",
    "mudd_attn": "MUDD, attention sublayer: weights",
    "mudd_mlp": "MUDD, MLP sublayer: weights",
    "mudd_head": "MUDD: streams mixed for the head",
}


def observe(w: Weights, tokens: np.ndarray) -> tuple[dict, dict, list]:
    """Runs the model on tokens (B, T + 1), and returns what the pictures show:

    heads   {layer: (q, k, window, scale)}: q and k are (B, n T, H / n, K), if n heads are paired;
            the window is in positions; scores are multiplied by the scale
    gates   {(name, layer): array}: (B, T, n) outputs of nets, and gates of the value tables
    sums    [(place, names of the terms, share of each term)]; see term_shares()
    """
    # A traced function returns arrays only. It appends the names that go with them to this list.
    labels = []

    def arrays(*_):
        heads = {}
        gates = {}
        for call in calls:
            if call.name == "attend":
                q, k, _, window, scale, _ = call.arguments
                heads[call.layer] = (q, k, jnp.array([window]), jnp.array([scale]))
            if call.name == "run_net":
                for output, x in call.result.items():
                    gates[gate_place(call.arguments[0], output, len(w.c.layers) - 1)] = x
        gates |= value_gates(w, calls)
        sums = last_sums(w, calls)
        labels.append(list(gates))
        labels.append([(place, names) for place, names, _ in sums])
        # runner() expects a first axis of rows.
        return heads, list(gates.values()), [shares[None] for _, _, shares in sums]

    calls = []
    with record_calls(w.code, calls):
        outputs = runner(w, arrays, 1)(tokens)
    heads, gates, shares = jax.tree.map(np.asarray, outputs)
    gate_names, sum_labels = labels
    gates = dict(zip(gate_names, gates, strict=True))
    sums = []
    for (place, names), x in zip(sum_labels, shares, strict=True):
        sums.append((place, names, x[0]))
    return heads, gates, sums


def sums_of(calls: list[Call]) -> list[Call]:
    """The calls of weighted_sum() that add several terms to a stream, (B, T, D), or to v,
    (B, T, H, K), which is the first sum in attention()."""
    sums = []
    with_v = set()  # layers
    for call in calls:
        if call.name != "weighted_sum" or (call.caller == "attention" and call.layer in with_v):
            continue
        if call.caller == "attention":
            with_v.add(call.layer)
        if len(call.arguments) > 1:
            sums.append(call)
    return sums


def value_gates(w: Weights, calls: list[Call]) -> dict[tuple[str, int], Array]:
    """The gates (B, T, H) of layers with a value table, by name and layer: the weight of the second
    term of v. In MUDD layers a net computes it."""
    gates = {}
    for call in sums_of(calls):
        if call.caller == "attention":
            layer = w.c.layers[call.layer]
            if layer.value_table is not None and not layer.mudd:
                _, (weight_BTH1, _) = call.arguments  # two terms: (weight, array)
                gates["value_gates", call.layer] = weight_BTH1[..., 0]
    return gates


def last_sums(w: Weights, calls: list[Call]) -> list[tuple[str, list[str], Array]]:
    """(place, names of the terms, shares of the terms) for the sums in the last layer and for the
    head. A term that is the same object as a saved stream, or as an output of attention or MLP, has
    its name. Any other term is x, also between attention and MLP. The terms of v are its product
    with x, and those that attention() got."""
    blocks = [call for call in calls if call.name in BLOCKS]
    saved = blocks[0].arguments[4]  # forward() passes the same dict to every block
    names_by_id = {id(x): name for name, x in saved.items()}
    for call in calls:
        if call.name in ("attention", "mlp"):
            names_by_id[id(call.result)] = call.name
    v_names = {}  # by layer
    for call in calls:
        if call.name == "in_heads":
            names_by_id[id(call.result)] = names_by_id.get(id(call.arguments[0]), "x")
        if call.name == "attention":
            _, v_terms, *_ = call.arguments
            v_names[call.layer] = ["w_v x", *(names_by_id[id(x)] for _, x in v_terms)]
    last = len(w.c.layers) - 1
    sums = []
    for call in sums_of(calls):
        is_v = call.caller == "attention"
        if call.layer > last:
            place = "head"
        elif call.layer == last and (is_v or call.caller in BLOCKS):
            place = f"layer {last}, v" if is_v else f"layer {last}, stream"
        else:
            continue
        names = [names_by_id.get(id(x), "x") for _, x in call.arguments]
        names = v_names[last] if is_v else names
        sums.append((place, names, term_shares(call)))
    return sums


def term_shares(call: Call) -> Array:
    """What each term adds in the direction of the sum, (term . sum) / (sum . sum): the shares add
    up to 1."""
    total = call.result.astype("float32")
    direction = total / jnp.square(total).sum()
    return jnp.stack([(weight * x * direction).sum() for weight, x in call.arguments])


def gate_place(net: str, output: str, last: int) -> tuple[str, int]:
    """The panel's name and the layer at which a net's output is drawn: -1 before all layers, the
    head after the last."""
    if net == "mudd_head":
        return "mudd_head", last + 1
    if net.startswith("mudd"):
        return f"mudd_{output}", int(net.removeprefix("mudd"))
    layer, name = output.split(".")
    if layer == "input":
        return f"gate_{name}", -1
    return f"gate_{name}", int(layer.removeprefix("layer"))


def attended(q, k, window: int, scale: float, far: np.ndarray) -> np.ndarray:
    """(heads, T): the share of each head's attention that is t tokens back, averaged over the
    queries that `far`, (B, T) of bool, selects. About q, k, window and scale, see attention()."""
    T = far.shape[1]
    attention_BHTNS = attention(q, k, window, scale, T)
    mean_NHTS = np.einsum("BHTNS,BT->NHTS", attention_BHTNS, far / far.sum())
    heads = mean_NHTS.reshape(-1, T, T)
    # Keys that are t tokens back are on one diagonal.
    return np.array([[head.trace(-t) for t in range(T)] for head in heads])


def describe(layer: Any) -> str:
    """A layer in a few lines of words: its window, and the fields that do not have their default
    values."""
    lines = [layer.window or "no attention"]
    for field in dataclasses.fields(layer):
        value = getattr(layer, field.name)
        if field.name == "window" or value == field.default:
            continue
        words = field.name.replace("_", " ")
        if field.name == "attend_to":
            lines.append(f"attends to layer {value}")
        elif field.name == "skip_from":
            lines.append(f"adds layer {value}")
        elif value is False:
            lines.append(f"no {words}")
        elif value is True or field.name == "mudd":
            lines.append(words)
        else:
            lines.append(f"{words} {value}")
    return "\n".join(lines)


def draw_reach(out: Path, w: Weights, tokens: np.ndarray, heads: dict) -> None:
    """Draws how far back the heads of every layer look. It measures only the quarter of the queries
    with most tokens of their document before them: elsewhere, heads cannot look far."""
    t = np.arange(tokens.shape[1] - 1)
    document_start = np.maximum.accumulate(np.where(tokens[:, :-1] == w.c.eot, t, 0), axis=1)
    history = t - document_start
    least = int(np.quantile(history, 0.75))
    windows = []  # in tokens, by layer
    x = []  # where the heads are drawn
    mean = []  # of the distance, by head
    half = []  # the distance within which a half of the attention is
    most = []  # the distance within which 90 % are
    for layer, (q, k, window, scale) in heads.items():
        windows.append(int(window[0]) * len(t) // q.shape[1])
        p = attended(q, k, window, scale, history >= least)
        x.extend(layer + np.linspace(-0.3, 0.3, len(p)))
        mean.extend(p @ t)
        half.extend((p.cumsum(axis=1) < 0.5).sum(axis=1))
        most.extend((p.cumsum(axis=1) < 0.9).sum(axis=1))
    layers = [describe(layer) for layer in w.c.layers]
    figure, ax = plt.subplots(figsize=(3 + 0.9 * len(layers), 4.8), layout="constrained")
    ax.bar([*heads], windows, alpha=0.2, label="window of the layer")
    ax.axhline(
        least,
        color="tab:red",
        ls=":",
        label="least number of tokens before a measured query",
    )
    ax.plot(x, mean, "o", color="black", label="mean distance of a head's attention")
    ax.plot(x, half, "_", color="black", label="half of the attention is nearer")
    ax.plot(x, most, "^", color="black", label="90 % of the attention is nearer")
    ax.set(xlabel="layer, its heads from left to right", yscale="symlog")
    ax.set_ylabel("distance, tokens back, logarithmic scale")
    ax.yaxis.set(major_formatter="{x:g}")
    ax.set_xticks(range(len(layers)), [f"{n}\n{layer}" for n, layer in enumerate(layers)])
    figure.legend(loc="outside lower center", ncols=3)
    save(figure, out / "reach")


def used_lambdas(w: Weights) -> dict[tuple[str, int], np.ndarray]:
    """The learned factors by name and layer, (1, n) each, of the layers that use them. Layer -1 is
    before all layers. A layer without attention uses only the factor of x there, the first one."""
    counts = {}  # of the numbers that are used
    for n, layer in enumerate(w.c.layers):
        if layer.window:
            counts["vo_lambdas", n] = 2
        if layer.skip_from is not None:
            counts["skip_lambdas", n] = 1
        if layer.mudd:  # its own net weighs the sums
            continue
        if layer.window or layer.x0 or layer.bigram:
            counts["attn_lambdas", n] = 2 if layer.window else 1
        counts["mlp_lambdas", n] = 2
    found = {}
    for (name, layer), count in counts.items():
        found[name, layer] = w.arrays[name][layer].reshape(1, -1)[:, :count]
    for name in ("gate_scale", "smear_lambda"):
        found[name, -1] = w.arrays[name].reshape(1, -1)
    return found


def term_names(w: Weights, name: str, layer: int) -> list[str] | None:
    """What the numbers of a gate or lambda belong to, in their order, also where only the first of
    them are used; None: to the heads, or there is only one."""
    if name == "mudd_head":
        return [stream for stream, _ in w.c.mudd_head]
    if name in ("mudd_v", "mudd_x"):
        return [*w.c.layers[layer].mudd, "x"]
    return {
        "attn_lambdas": ["x", "attention"],
        "mlp_lambdas": ["x", "MLP"],
        "vo_lambdas": ["value matrix", "output matrix"],
        "mudd_value": ["first half of the heads", "second half"],
        "mudd_attn": ["x", "attention", "input", "bigram"],
        "mudd_mlp": ["x", "MLP"],
    }.get(name)


def draw_gates(out: Path, w: Weights, gates: dict) -> None:
    """Draws a panel for every kind of gate and lambda: a dot is a number's mean over tokens, a line
    goes from the 10th to the 90th percentile. A kind that has only one number, which is the same
    for all tokens, gets no panel but a line of text."""
    panels = {}  # by name: {layer: (tokens, numbers)}
    for (name, layer), x in (used_lambdas(w) | gates).items():
        panels.setdefault(name, {})[layer] = np.float32(x).reshape(-1, x.shape[-1])
    single = []
    for name, by_layer in sorted(panels.items()):
        (layer, x), *more = by_layer.items()
        if not more and x.shape[1] == 1 and np.ptp(x) < 1e-6:
            place = "before the layers" if layer < 0 else f"layer {layer}"
            single.append(f"{TITLES.get(name, name)} ({name}, {place}): {x[0, 0]:.3g}")
            del panels[name]
    names = [name for name in TITLES if name in panels]
    names += sorted(panels.keys() - TITLES.keys())  # of a script with gates of its own
    rows = math.ceil(len(names) / 3)
    figure, axes = plt.subplots(rows, 3, figsize=(13, 2.7 * rows), layout="constrained",
                                squeeze=False)  # fmt: skip
    for ax, name in zip(axes.flat, names, strict=False):
        draw_panel(ax, w, name, panels[name])
    for ax in axes.flat[len(names) :]:
        ax.remove()
    lines = [
        "layer (in: before the first layer; head: after the last). "
        "Dot: mean over tokens; bar: from the 10th to the 90th percentile.",
        "In a panel without a legend, the dots of a layer are its heads from left to right.",
    ]
    if single:
        lines += ["Not drawn, because each is one number for all tokens:", *single]
    figure.supxlabel("\n".join(lines), fontsize=9)
    save(figure, out / "gates")


def draw_panel(ax, w: Weights, name: str, by_layer: dict[int, np.ndarray]) -> None:
    """Draws a panel of draw_gates(): numbers are (tokens, numbers) by layer."""
    colors = {}  # by term
    for layer, x in by_layer.items():
        n = x.shape[1]
        low, high = np.quantile(x, (0.1, 0.9), axis=0)
        terms = term_names(w, name, layer) or [None] * n
        for i, term in enumerate(terms[:n]):
            gate_x = layer - 0.4 + (i + 0.5) / n * 0.8
            label = term if term not in colors else None
            color = colors.setdefault(term, f"C{len(colors)}")
            ax.vlines(gate_x, low[i], high[i], color=color, alpha=0.4, lw=3)
            ax.plot(gate_x, x[:, i].mean(), ".", color=color, label=label)
    layers = len(w.c.layers)
    ax.set_title(f"{TITLES.get(name, name)} ({name})", fontsize=9)
    ax.set(xlim=(-1.5, layers + 0.5))
    ax.set_xticks(range(-1, layers + 1), ["in", *range(layers), "head"], fontsize=8)
    ax.axhline(0, color="black", lw=0.5)
    if None not in colors:
        low, high = ax.get_ylim()
        ax.set_ylim(low, high + 0.35 * (high - low))  # room for the legend
        ax.legend(fontsize=8, loc="upper left", ncols=3, columnspacing=1, handletextpad=0)


def draw_streams(out: Path, sums: list[tuple]) -> None:
    """Draws a bar for the share of every term in the sums of the last layer and of the head."""
    labels = []
    shares = []
    colors = []  # one for each sum
    for i, (place, names, shares_of_sum) in enumerate(sums):
        labels += [f"{place}:  {name}" for name in names]
        shares += [*shares_of_sum]
        colors += [f"C{i}"] * len(names)
    y = -np.arange(len(labels))
    figure, ax = plt.subplots(figsize=(8, 1 + 0.25 * len(labels)), layout="constrained")
    bars = ax.barh(y, shares, color=colors)
    ax.bar_label(bars, [f" {share:+.1%}" for share in shares])
    ax.set_yticks(y, labels)
    ax.set(xlim=(-0.3, 1.3), title="What the last layer and the head add up")
    ax.set_xlabel(
        "share of the term in the direction of its sum (the terms of one color add up to 1)"
    )
    save(figure, out / "streams")


def used_matrices(w: Weights, n: int) -> list[tuple[str, np.ndarray]]:
    """The matrices of layer n, with names. A layer may have no attention."""
    table = w.code.param_table(w.c)
    banks = {}
    for name in ("qk", "vo", "mlp"):
        pairs = zip(table[name].layers, w.arrays[name], strict=True)
        banks[name] = [matrix for owner, matrix in pairs if owner == n]
    found = []
    if banks["qk"]:
        found += zip("qk", np.split(np.concatenate(banks["qk"]), 2), strict=True)
        found += zip("vo", banks["vo"], strict=True)
    found += zip(("fc", "proj"), banks["mlp"], strict=True)
    return found


def draw_singular(out: Path, w: Weights) -> None:
    """Draws the singular values of every layer's matrices, each curve divided by its largest."""
    titles = {
        "q": "queries",
        "k": "keys",
        "v": "values",
        "o": "output of attention",
        "fc": "first matrix of the MLP",
        "proj": "second matrix of the MLP",
    }
    figure, axes = plt.subplots(2, 3, figsize=(12, 7), layout="constrained")
    panels = dict(zip(titles, axes.T.flat, strict=True))
    L = len(w.c.layers)
    lines = {}  # one for each layer that has matrices
    for n in range(L):
        for name, x in used_matrices(w, n):
            values = np.linalg.svd(x, compute_uv=False)
            # Every layer has its color and its marker, which it draws at ranks of its own.
            every = max(1, len(values) // 6)
            (lines[n],) = panels[name].plot(
                values / values[0], color=f"C{n % 10}", lw=1, marker="os^vDPX*<>hd"[n % 12],
                markersize=4, markevery=(every * n // L, every),
            )  # fmt: skip
            panels[name].set(title=f"{titles[name]} ({name})", yscale="log", ylim=(1e-3, 1.2))
    figure.legend(lines.values(), lines.keys(), loc="outside right", title="layer")
    figure.supxlabel("rank: the largest singular value is number 0")
    figure.supylabel("singular value, divided by the largest of its matrix")
    save(figure, out / "singular")


def main() -> None:
    """Draws the pictures, and writes the page, of the file on the command line."""
    cli = parser(__doc__)
    folder = shards.folder_name
    cli.add_argument("--out", type=folder, help="folder for the files; default: <run>_look")
    cli.add_argument("--data", type=folder, help="folder with shards; default: that of the run")
    cli.add_argument("--text", type=Path, help="a text file to read in the place of shards")
    args = cli.parse_args()
    path = args.weights
    if path.is_dir():
        refuse(f"{path} is a folder: name a run's weights in it, *.npz, or its log")
    if not path.is_file():
        refuse(f"there is no file {path}")
    if args.data and args.text:
        refuse("give --data or --text, not both: either is the text that the model reads")
    log = path.with_suffix(".txt")
    if path.suffix not in (".npz", ".state") and not zipfile.is_zipfile(path):
        log = path
        path = path.with_suffix(".npz")
    out = args.out or path.with_name(f"{path.stem}_look")
    plt.rcParams.update(STYLE)
    try:
        run = runs.read(log) if log.exists() else None
    except runs.Unreadable as error:
        refuse(f"{log} is no log of a run: {error}")
    has_weights = path.exists()
    if args.text and not has_weights:
        refuse(f"{log} has no weights {path} beside it, so no model can read {args.text}")
    if has_weights:  # they are checked before the first picture is drawn
        w = open_weights(path, args.script)
        if args.text:
            tokens, source = page.own_text(w, args.text, longest(w))
        else:
            tokens = text(w, args.data or ROOT / w.config["data"])
            source = "the validation text"
    out.mkdir(parents=True, exist_ok=True)
    check_place(out / "loss")

    def report(name: str, file: str) -> None:
        print(f"{out / file}: {SHOWS[name]}", flush=True)

    if run:
        plot_log(run, out / "loss")
        report("loss", "loss.svg")
    if has_weights:
        heads, gates, sums = observe(w, tokens)
        draw_reach(out, w, tokens, heads)
        report("reach", "reach.svg")
        draw_gates(out, w, gates)
        report("gates", "gates.svg")
        draw_streams(out, sums)
        report("streams", "streams.svg")
        draw_singular(out, w)
        report("singular", "singular.svg")
        page.write(out / "page.html", w, run, tokens[:2], source)
        report("page", "page.html")


if __name__ == "__main__":
    with shards.one_line("look.py", status=2):
        main()
