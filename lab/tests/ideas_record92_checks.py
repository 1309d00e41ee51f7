"""Checks of five patches in records/ideas/. Each takes the patched train_gpt.py as a module, and a
small config of its `record` in float32, and compares parts with numbers that upstream's functions
made (golden_r92.py), with the frozen file of record 92, or with a formula."""

import dataclasses
from types import SimpleNamespace
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from lab.tests.record92 import frozen
from records.upstream92.golden_r92 import GOLDEN, META, normal, relative
from tests.tools import make_mesh, noise, place_on, sequences

STEPS = 1194  # of record 92's run


def stages_of_record92(module) -> tuple:
    """Stages as long as record 92's, with its windows in each of the five."""
    firsts = [0, 1, 5, 7, 8]  # its rows in which they begin
    ends = [1, 5, 7, 8, 9]
    stages = []
    for first, end in zip(firsts, ends, strict=True):
        rows = frozen.RECORD92_STAGES[first:end]
        names = ("tokens", "short", "long", "max_doc", "lr")
        same = {name: getattr(rows[0], name) for name in names}
        stages.append(module.Stage(sum(row.steps for row in rows), **same))
    return tuple(stages)


def one_step(module, c) -> tuple:
    """The first state, the one after a step, and the step's row of the schedule."""
    mesh = make_mesh(1)
    program = module.compile_train_step(0, c.is_adam_step(0), c, mesh)
    first = module.make_state(c, mesh)
    before = jax.tree.map(np.asarray, first)
    row = module.schedule(c)[0]
    tokens = place_on(mesh, sequences(c, c.sequence_length(0)))
    state, _ = program(first, tokens, jax.device_put(row))
    return before, jax.tree.map(np.asarray, state), row


# ---- anvil ---------------------------------------------------------------------------------------
BANKS = {
    "qk": (META["nqk"], META["D"] // 3, META["D"]),
    "vo": (META["nvo"], META["D"], META["D"]),
    "mlp": (META["nmlp"], 11 * META["D"] // 3, META["D"]),
}


def check_anvil(module, c) -> None:
    """Quintics and ten updates are upstream's, and a step's update is that of the optimizer."""
    for bank, shape in BANKS.items():
        X = np.asarray(module.orthogonalize(jnp.asarray(normal(f"polar/{bank}", shape)), "float32"))
        assert relative(X[0], GOLDEN[f"polar/{bank}/out"]) < 1e-5
        singular_values = np.linalg.svd(X, compute_uv=False)
        assert relative(singular_values, GOLDEN[f"polar/{bank}/sv"]) < 1e-5
        check_ten_updates(module, c, bank, shape)
    run = dataclasses.replace(c, steps=0, stages=stages_of_record92(module))
    engaged = [bool(row.engaged) for row in module.schedule(run)]
    assert engaged == GOLDEN["schedule/engaged"][:STEPS].tolist()

    before, after, row = one_step(module, c)
    fast, slow, _ = after.opt_state["vo"]
    p = before.params["vo"]
    grad = slow / np.float32(0.02)
    assert relative(fast, (1 - row.momentum) * grad) < 1e-5
    optimizer = module.anvil(c)
    layers = module.param_table(c)["vo"].layers
    options = {"momentum": row.momentum, "engaged": row.engaged, "layers": layers}
    update, _ = optimizer.update(jnp.asarray(grad), optimizer.init(jnp.asarray(p)), **options)
    assert np.any((update * p > 0) != (slow * p > 0))  # or the gate made no difference
    decay = row.muon_lr * 2.25 * np.where(slow * p > 0, p, 0)
    assert relative(after.params["vo"] - p, -row.muon_lr * (update + decay)) < 1e-4


def check_ten_updates(module, c, bank: str, shape: tuple) -> None:
    """Updates with the settings of ten steps, across the one from which momenta are mixed."""
    optimizer = module.anvil(c)
    weight_decay = module.param_table(c)[bank].weight_decay
    p = normal(f"anvil/param/{bank}", shape, 0.3)
    mean = 0.5 * normal(f"anvil/mean/{bank}", shape).astype(np.float64)
    if bank == "qk":
        p[-1] = 0  # padding
    per_matrix = GOLDEN["anvil/mlp_per_matrix"] if bank == "mlp" else np.ones(shape[0])
    lr = per_matrix[:, None, None] * max(1, shape[1] / shape[2]) ** 0.5
    state = optimizer.init(jnp.asarray(p))
    for number, (eta, momentum, _, fast_share) in enumerate(GOLDEN["anvil/settings"]):
        grad = (mean + normal(f"anvil/grad/{bank}/{number}", shape)).astype(np.float32)
        if bank == "qk":
            grad[-1] = 0
        options = {"momentum": momentum, "engaged": fast_share < 1, "layers": range(len(p))}
        update, state = optimizer.update(jnp.asarray(grad), state, **options)
        fast, slow, squares = state
        rate = np.float32(0.023 * eta)
        p = module.apply_update(p, update, slow, rate, lr, weight_decay)
        sums = [np.linalg.norm(x) for x in (p, fast, slow)] + [squares.sum()]
        np.testing.assert_allclose(sums, GOLDEN[f"anvil/sums/{bank}"][number], rtol=1e-5)
    assert relative(p, GOLDEN[f"anvil/final/{bank}"]) < 1e-5
    assert relative(squares, GOLDEN[f"anvil/lane/{bank}"]) < 1e-5


# ---- tail_averages -------------------------------------------------------------------------------
NAMES = {"lm_head": "head", "embed": "embed", "qk_bank": "qk", "vo_bank": "vo", "mlp_bank": "mlp",
         "value_embeds": "value0"}  # fmt: skip
TAGS = ["tail-ema", "tail-avg", "value-embed-avg", "bank-blend", "bank-blend"]


def weights_after(step: int, name: str) -> np.ndarray:
    """A golden array as it is after a step. Adam moves tables only in some steps."""
    if name in ("lm_head", "embed") and step > 896:
        step -= (step - 897) % 2
    if name == "value_embeds":
        step -= (step - 947) % 4
    shape = GOLDEN[f"tail/last/{name}"].shape
    A, B, C = (normal(f"tail/{name}/{number}", shape).astype(np.float64) for number in range(3))
    return (A + 0.5 * np.sin(step / 40) * B + 0.3 * np.cos(step / 7) * C).astype(np.float32)


def check_tail_averages(module, c) -> None:
    """Averages and what is made of them are upstream's; a run validates and saves that; until they
    begin, averages equal their parameters."""
    run = dataclasses.replace(c, steps=0, stages=stages_of_record92(module))
    rows = module.schedule(run)
    averages = []
    for average in run.averages:
        names = [name for name in NAMES.values() if name.rstrip("0123456789") in average.params]
        averages.append(dict.fromkeys(names, 0.0))
    move = jax.jit(module.move_averages)
    for step in range(890, STEPS):
        params = {ours: weights_after(step, theirs) for theirs, ours in NAMES.items()}
        averages = move(averages, params, rows[step].average_rates)
    state = module.State(params, {}, {}, {}, averages, jnp.int32(0))
    weights = module.validated(state, run)
    for theirs, ours in NAMES.items():
        assert relative(weights[ours], GOLDEN[f"tail/shipped/{theirs}"]) < 2e-6, ours
        for tag, arrays in zip(TAGS, averages, strict=True):
            if ours in arrays:
                golden = GOLDEN[f"tail/average/{tag}/{theirs}"]
                assert relative(arrays[ours], golden) < 2e-6, (ours, tag)
    check_ticks(np.array([row.average_rates for row in rows]).T)

    used = []
    guard = SimpleNamespace(start=STEPS, seconds=0.0, wants=lambda step: False)
    log = SimpleNamespace(line=lambda text: None)

    def validate(weights, *_):
        used.append(weights)
        return 1.0, 0

    with patch.object(module, "validate", validate), patch.object(module, "train_batches"):
        ends = dataclasses.replace(run, save=0)
        saved, _ = module.train(state, ends, make_mesh(1), {}, {}, log, guard)
    for name, array in weights.items():
        np.testing.assert_array_equal(used[0][name], array)
        np.testing.assert_array_equal(saved[name], array)

    _, after, _ = one_step(module, c)  # of two steps: no average has begun
    assert [sorted(arrays) for arrays in after.averages] == [
        ["embed", "head"], ["mlp", "vo"], module_values(module, c), ["qk"], ["mlp", "vo"],
    ]  # fmt: skip
    for arrays in after.averages:
        for name, array in arrays.items():
            np.testing.assert_array_equal(array, after.params[name])


def module_values(module, c) -> list[str]:
    """Names of the value tables."""
    return [f"value{n}" for n in c.value_tables()]


def check_ticks(rates) -> None:
    """The steps of averages and their rates, [average, step]. Ours also move in steps in which a
    table does not: two moves of the head's are one of upstream's, and those of the value tables
    come two steps after upstream's."""
    for number in 1, 3, 4:
        steps = np.flatnonzero((rates[number] > 0) & (rates[number] < 1))
        assert steps.tolist() == GOLDEN[f"tail/ticks/{TAGS[number]}"][1:].tolist()
        golden = GOLDEN[f"tail/rates/{TAGS[number]}"][1:]
        np.testing.assert_allclose(rates[number][steps], golden, 1e-6)
    head, value = rates[0], rates[2]
    assert np.argmax(head < 1) - 1 == GOLDEN["tail/ticks/tail-ema"][0]
    assert abs(1 - (1 - head[-1]) ** 2 - GOLDEN["tail/rates/tail-ema"][1]) < 1e-7
    steps = np.flatnonzero((value > 0) & (value < 1))
    assert (steps - 2).tolist() == GOLDEN["tail/ticks/value-embed-avg"][1:].tolist()


# ---- layers_92 and narrow_heads ------------------------------------------------------------------
def frozen_config(c, narrow: bool):
    """The frozen file's config with the fields of c. Its layers also say which are narrow."""
    fields = {field.name for field in dataclasses.fields(frozen.Config)}
    shared = {name: value for name, value in vars(c).items() if name in fields}
    layers = []
    for layer in c.layers:
        is_narrow = narrow and layer.window == frozen.SHORT
        names = {"narrow_qk": is_narrow, "narrow_v": is_narrow and not layer.paired_heads}
        same = dataclasses.asdict(layer)
        names["bigram"] = same.pop("ngram")
        if layer.mudd:  # there, mudd adds n-grams anyway
            names |= {"bigram": False, "x0": True}
        layers.append(frozen.Layer(**same | names))
    stages = [frozen.Stage(**dataclasses.asdict(stage)) for stage in c.stages]
    shared |= {"layers": tuple(layers), "stages": tuple(stages), "bigrams": c.ngram_buckets}
    return frozen.Config(**shared | dict.fromkeys(("qkv_forward", "mlp_forward"), "float32"))


def check_against_frozen(module, c, narrow: bool) -> None:
    """The last stream of random weights, and its gradients, are those of the frozen file."""
    c = dataclasses.replace(c, pointer=0)
    theirs = frozen_config(c, narrow)
    assert repr(frozen.nets(theirs)).replace("bigram", "ngram") == repr(module.nets(c))
    weights = {}
    for name, param in module.param_table(c).items():
        array = jnp.asarray(0.2 * noise(name, param.model_shape))
        if param.kind == module.BANK:
            weights[name] = {layer: [] for layer in param.layers}
            for layer, matrix in zip(param.layers, array, strict=True):
                weights[name][layer].append(matrix)
        else:
            weights[name] = array + param.init(jax.random.key(0), array.shape)
    tokens = jnp.asarray(sequences(c, 32, count=1)[:, :-1])
    weights["ngram_rows"] = jnp.asarray(noise("rows", (1, 32 * len(c.ngrams), c.D)))
    dy = jnp.asarray(noise("dy", (1, 32, c.D)))

    def of(code, config):
        def loss(w):
            w = w | {"bigram_rows": w["ngram_rows"]}  # the frozen file's name
            return (dy * code.forward(w, tokens, config, 0)).sum()

        return jax.jit(jax.value_and_grad(loss))(weights)

    ours, golden = of(module, c), of(frozen, theirs)
    for (path, a), b in zip(jax.tree.leaves_with_path(ours), jax.tree.leaves(golden), strict=True):
        assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(b) + 1e-6, jax.tree_util.keystr(path)


def check_layers_92(module, c) -> None:
    """The layers are those of the frozen file's record92, which computes the same."""
    record = module.PRESETS["record"]
    frozen92 = frozen.PRESETS["record92"]
    plain = [
        dataclasses.replace(layer, narrow_qk=False, narrow_v=False) for layer in frozen92.layers
    ]
    assert frozen_config(record, narrow=False).layers == tuple(plain)
    ours, theirs = module.param_table(record), frozen.param_table(frozen92)
    for bank in "qk", "vo", "mlp":
        assert ours[bank].model_shape == theirs[bank].model_shape
        assert ours[bank].layers == theirs[bank].layers
    changes = {"layers": record.layers, "mudd_head": record.mudd_head}
    check_against_frozen(module, dataclasses.replace(c, **changes), narrow=False)


def check_narrow_heads(module, c) -> None:
    """Frequencies, scales and rotations are upstream's; all else is as in the frozen file."""
    record = dataclasses.replace(
        module.PRESETS["record"], stages=stages_of_record92(module), compute="float32"
    )
    for heads, window in ("narrow", module.SHORT), ("wide", module.LONG):
        for stage in range(5):
            frequencies, scale = module.rope_frequencies(record, stage, window)
            assert relative(frequencies, GOLDEN[f"yarn/{heads}/freq"][stage]) < 1e-6
            golden = GOLDEN[f"yarn/{heads}/scale"]
            first = {"narrow": 0.13, "wide": 0.1}[heads]  # wide heads begin as in record 89
            assert abs(scale / first - golden[stage] / golden[0]) < 1e-6
    check_rotation(module, record, "paired", (module.SHORT, True), 128, np.arange(64))
    check_rotation(module, record, "wide", (module.LONG, False), 128, np.arange(124))
    # Where v is narrow, codes take one channel of each of four pairs. The others are upstream's.
    fast = np.r_[0:28, 32:60]
    check_rotation(module, record, "narrow", (module.SHORT, False), 64, fast)
    layers = (
        module.Layer(module.SHORT, paired_heads=True, ngram=True),
        module.Layer(module.SHORT, xsa=True, head_gate=True, value_table=0),
        module.Layer(module.LONG, key_offset=True, attend_to=0, value_table=1),
    )
    check_against_frozen(module, dataclasses.replace(c, layers=layers), narrow=True)


def check_rotation(module, record, name: str, kind: tuple, width: int, compared) -> None:
    """The channels `compared` of rotated queries and keys; the last four are document codes."""
    T, H, _ = GOLDEN["rope/narrow/q"].shape
    K = GOLDEN[f"rope/{name}/q"].shape[-1]
    # Upstream rotates channels 2j and 2j + 1 of the first 64, we rotate j and j + 32.
    order = np.r_[0:64:2, 1:64:2, 64:K]
    x = jnp.asarray(normal(f"rope/{name}", (1, T, 2 * H, K)))[..., order]
    pos = module.positions(jnp.zeros((1, T), bool), record, 0)
    cos, sin, _ = pos.rope[kind]
    for array, heads, doc in ("q", x[:, :, :H], pos.doc_q), ("k", x[:, :, H:], pos.doc_k):
        y = module.norm_rotate(heads, cos, sin, jnp.tile(doc, width // 4))
        if array == "k" and kind[0] == module.LONG:
            y = module.offset_keys(y)
        golden = GOLDEN[f"rope/{name}/{array}"][..., order].reshape(T, H, K)
        assert y.shape == (1, T, H, width)
        assert relative(y[0][..., compared], golden[..., compared]) < 1e-6
        assert (y[..., -4:] == doc).all() and not y[..., K : width - 4].any()


# ---- symmetric_softcap ---------------------------------------------------------------------------
def check_symmetric_softcap(module, c) -> None:
    """To the softmax, the cap is 15 tanh(z / 15); loss and gradients are those of that formula."""
    c = dataclasses.replace(c, pointer=0)
    z = jnp.asarray(20 * noise("z", (4, 50)))
    p = jax.nn.softmax(module.softcap(z))
    np.testing.assert_allclose(p, jax.nn.softmax(15 * jnp.tanh(z / 15)), rtol=1e-4)
    V = module.padded_vocab(c)
    x, w = noise("x", (64, c.D)), 0.5 * noise("w", (V, c.D))
    targets = np.random.default_rng(0).integers(0, c.vocab, (64, 1))
    weights = jnp.ones(1)

    def formula(x, w):
        log_p = jax.nn.log_softmax(15 * jnp.tanh(x @ w.T / 15))
        return -jnp.take_along_axis(log_p, jnp.asarray(targets), axis=1).sum()

    def patched(x, w):
        return module.head_loss(x, w, jnp.asarray(targets), weights, None, c)

    want = jax.value_and_grad(formula, (0, 1))(jnp.asarray(x), jnp.asarray(w))
    got = jax.value_and_grad(patched, (0, 1))(jnp.asarray(x), jnp.asarray(w))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
