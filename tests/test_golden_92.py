"""Parts of the frozen file of record 92 compute the numbers of upstream's own functions: schedule,
rotation, quintics, anvil, candidates of the softmax and its gradients, averages, value tables, the
table of n-grams, and the head's mix. All of these tests are slow: a frozen file does not change.

Tolerances are relative norms of arrays: 1e-5 for quintics, anvil and gradients, 2e-6 for averages
and value tables, 1e-6 for the rest.
"""

import dataclasses
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from records.upstream92.golden_r92 import GOLDEN, META, normal, relative
from tests.record92 import FLOAT32, frozen

pytestmark = pytest.mark.slow
Layer = frozen.Layer


class Part(frozen.Config):
    """A Config with the sizes of a part in the golden file, which a whole model may not have."""

    def __post_init__(self):
        pass


def part(**changes) -> Part:
    """The preset with changes, and without its layers, its head's mix and its averages."""
    fields = {field.name: getattr(RECORD, field.name) for field in dataclasses.fields(RECORD)}
    less = dict(layers=(Layer(frozen.LONG),), mudd_head=(), mudd_groups=0, averages=())
    return Part(**fields | less | changes)


RECORD = dataclasses.replace(frozen.PRESETS["record92"], canonical="", **FLOAT32)
ROWS = frozen.schedule(RECORD)
N = RECORD.total_steps
STAGES = [RECORD.stages[RECORD.stage_at(step)] for step in range(N)]


# ---- Schedule ------------------------------------------------------------------------------------
def test_rates_and_momentum():
    lr = [row.adam_lr / RECORD.adam_lr for row in ROWS]
    assert relative(lr, GOLDEN["schedule/rate"][:N]) < 1e-6
    assert relative([row.muon_lr / RECORD.muon_lr for row in ROWS], lr) < 1e-6
    assert relative([row.momentum for row in ROWS], GOLDEN["schedule/beta"][:N]) < 1e-6
    assert [bool(row.engaged) for row in ROWS] == GOLDEN["schedule/engaged"][:N].tolist()
    last_tied = max(step for step in range(N) if ROWS[step].tied)
    assert last_tied == GOLDEN["schedule/split_step"]


def test_shapes_of_every_step():
    columns = {
        "tokens": [stage.tokens for stage in STAGES],
        "document": [stage.max_doc for stage in STAGES],
        "candidates": [stage.candidates for stage in STAGES],
        "window": [(stage.short / 128, stage.long / 128) for stage in STAGES],
    }
    for name, column in columns.items():
        np.testing.assert_array_equal(column, GOLDEN[f"schedule/{name}"][:N], err_msg=name)
    ends = np.searchsorted(GOLDEN["schedule/stage"], range(1, 5))
    np.testing.assert_array_equal(GOLDEN["schedule/boundaries"][:-1, 1], ends)


def test_weights_of_the_targets():
    for step, row in enumerate(ROWS):
        weights = dict.fromkeys(range(4), 0.0)
        weights |= dict(zip(frozen.target_weights(STAGES[step]), row.loss_weights, strict=True))
        assert weights[frozen.PREFIX] == pytest.approx(GOLDEN["schedule/prefix"][step], abs=1e-6)
        ahead = [weights[1], weights[2], weights[3]]
        np.testing.assert_allclose(ahead, GOLDEN["schedule/mtp"][step], atol=1e-6)


def test_what_each_step_updates():
    due = [RECORD.due(step) for step in range(N)]
    assert all(frozen.EVERY_STEP in cadences for cadences in due)
    adam = [frozen.WITH_ADAM in cadences for cadences in due]
    tables = [frozen.WITH_TABLES in cadences for cadences in due]
    np.testing.assert_array_equal(adam, GOLDEN["schedule/adam"][:N])
    np.testing.assert_array_equal(tables, GOLDEN["schedule/table_event"][:N])


# ---- Rotation ------------------------------------------------------------------------------------
# Our stages in which upstream's five begin.
FIRST = [0, 1, 5, 7, 8]
NARROW = Layer(frozen.SHORT, narrow_qk=True)
PAIRED = Layer(frozen.SHORT, narrow_qk=True, paired_heads=True)
# Positions, and heads of q; there are as many of k.
T, H, _ = GOLDEN["rope/narrow/q"].shape
WIDE = Layer(frozen.LONG, key_offset=True)
NARROWEST = Layer(frozen.SHORT, narrow_qk=True, narrow_v=True)


@pytest.mark.parametrize("heads", ["narrow", "wide"])
def test_frequencies_and_scales(heads):
    scales = []
    for stage, frequencies in zip(FIRST, GOLDEN[f"yarn/{heads}/freq"], strict=True):
        found, scale = frozen.rope_frequencies(RECORD, stage, narrow=heads == "narrow")
        assert relative(found, frequencies) < 1e-6
        scales.append(scale)
    assert relative(scales, GOLDEN[f"yarn/{heads}/scale"]) < 1e-6


def test_the_last_validation_changes_no_rotation():
    last = len(RECORD.stages) - 1
    for narrow in False, True:
        frequencies, scale = frozen.rope_frequencies(RECORD, last, narrow)
        before, scale_before = frozen.rope_frequencies(RECORD, last - 1, narrow)
        np.testing.assert_array_equal(frequencies, before)
        assert scale == scale_before


def rotated(name: str, layer: Layer, width: int) -> tuple:
    """q and k of the golden file's heads as this layer rotates them in the first stage, and those
    of the golden file, in our order; (T, H, width) and (T, H, channels)."""
    golden = [GOLDEN[f"rope/{name}/{array}"] for array in "qk"]
    K = golden[0].shape[-1]
    # Upstream rotates channels 2j and 2j + 1 of the first 64, we rotate j and j + 32.
    order = np.r_[0:64:2, 1:64:2, 64:K]
    x = jnp.asarray(normal(f"rope/{name}", (1, T, 2 * H, K)))[..., order]
    c = dataclasses.replace(RECORD, layers=(layer,), mudd_head=())
    pos = frozen.positions(jnp.zeros((1, T), bool), c, 0)
    cos, sin, _ = pos.rope[frozen.rope_kind(layer)]
    q = frozen.norm_rotate(x[:, :, :H], cos, sin, pos.doc_q, False, width)
    k = frozen.norm_rotate(x[:, :, H:], cos, sin, pos.doc_k, layer.key_offset, width)
    assert (q[..., -4:] == pos.doc_q).all() and (k[..., -4:] == pos.doc_k).all()
    return [y[0] for y in (q, k)], [array[..., order].reshape(T, H, K) for array in golden]


@pytest.mark.parametrize("name, layer, compared", [
    ("narrow", NARROW, 64),
    ("paired", PAIRED, 64),
    ("wide", WIDE, 124),  # the other four channels are codes of documents
])  # fmt: skip
def test_rotated_queries_and_keys(name, layer, compared):
    """Those with 64 channels are followed by zeros and the codes, as where v is wide."""
    ours, golden = rotated(name, layer, 128)
    for y, expected in zip(ours, golden, strict=True):
        assert relative(y[..., :compared], expected[..., :compared]) < 1e-6
        assert not y[..., expected.shape[-1] : 124].any()


def test_rotated_queries_and_keys_where_codes_take_their_channels():
    """Where v is narrow as well, codes overwrite half of the slowest four pairs, of 32. The other
    half is not rotated, and the faster pairs are upstream's."""
    ours, golden = rotated("narrow", NARROWEST, 64)
    fast = np.r_[0:28, 32:60]
    for y, expected in zip(ours, golden, strict=True):
        assert relative(y[..., fast], expected[..., fast]) < 1e-6
    x = normal("rope/narrow", (T, 2 * H, 64))
    slow = np.asarray(frozen.norm(jnp.asarray(x)))[..., 56::2]
    for y, expected in zip(ours, np.split(slow, 2, axis=1), strict=True):
        assert relative(y[..., 28:32], expected) < 1e-6


# ---- Matrices ------------------------------------------------------------------------------------
BANKS = {
    "qk": (META["nqk"], META["D"] // 3, META["D"]),
    "vo": (META["nvo"], META["D"], META["D"]),
    "mlp": (META["nmlp"], 11 * META["D"] // 3, META["D"]),
}


def orthogonalized(G):
    return frozen.orthogonalize(G, "float32", frozen.ANVIL_QUINTICS, 1.05)


@pytest.mark.parametrize("bank", BANKS)
def test_the_six_quintics(bank):
    X = np.asarray(orthogonalized(jnp.asarray(normal(f"polar/{bank}", BANKS[bank]))))
    assert relative(X[0], GOLDEN[f"polar/{bank}/out"]) < 1e-5
    singular_values = np.linalg.svd(X, compute_uv=False)
    assert relative(singular_values, GOLDEN[f"polar/{bank}/sv"]) < 1e-5


def test_the_six_quintics_on_numbers():
    x = GOLDEN["polar/scalar_in"].astype(np.float64)
    for c1, c3, c5 in frozen.ANVIL_QUINTICS:
        x = c1 * x + c3 * x**3 + c5 * x**5
    assert relative(x, GOLDEN["polar/scalar_out"]) < 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matrices_of_rank_1_do_not_diverge(dtype):
    """Their only singular value is at the edge, above which the quintics diverge. In bfloat16,
    rounding adds other singular values, which become about 1 as well."""
    rng = np.random.default_rng(0)
    rows, cols = frozen.param_table(RECORD)["qk"].model_shape[1:]
    G = jnp.asarray(rng.normal(size=(20, rows, 1)) * rng.normal(size=(20, 1, cols)), "float32")
    X = frozen.orthogonalize(G, dtype, frozen.ANVIL_QUINTICS, 1.05)
    largest = jnp.linalg.norm(X, axis=(1, 2))
    assert jnp.all((largest > 0.99) & (largest < 2)), largest


@pytest.mark.parametrize("bank", BANKS)
def test_anvil(bank):
    """Ten updates, across the engagement of the slow rail."""
    shape = BANKS[bank]
    optimizer = frozen.anvil(RECORD)
    decay = frozen.param_table(RECORD)[bank].weight_decay
    p = normal(f"anvil/param/{bank}", shape, 0.3)
    mean = 0.5 * normal(f"anvil/mean/{bank}", shape).astype(np.float64)
    if bank == "qk":
        p[-1] = 0  # padding
    per_matrix = GOLDEN["anvil/mlp_per_matrix"] if bank == "mlp" else np.ones(shape[0])
    rates = per_matrix[:, None, None] * max(1, shape[1] / shape[2]) ** 0.5
    state = optimizer.init(jnp.asarray(p))
    for number, step in enumerate(GOLDEN["anvil/steps"]):
        grad = (mean + normal(f"anvil/grad/{bank}/{number}", shape)).astype(np.float32)
        if bank == "qk":
            grad[-1] = 0
        row = ROWS[step]
        update, state = optimizer.update(
            jnp.asarray(grad), state, momentum=row.momentum, engaged=row.engaged
        )
        p = frozen.apply_update(p, update, state.slow, row.muon_lr, rates, decay)
        if f"anvil/after{number}/{bank}" in GOLDEN:
            after = GOLDEN[f"anvil/after{number}/{bank}"]
            assert relative(p[: len(after)], after) < 1e-5
        sums = [np.linalg.norm(x) for x in (p, state.fast, state.slow)] + [state.squares.sum()]
        np.testing.assert_allclose(sums, GOLDEN[f"anvil/sums/{bank}"][number], rtol=1e-5)
    assert relative(p, GOLDEN[f"anvil/final/{bank}"]) < 1e-5
    assert relative(state.squares, GOLDEN[f"anvil/lane/{bank}"]) < 1e-5
    slow = GOLDEN[f"anvil/slow/{bank}"]
    assert relative(state.slow[: len(slow)], slow) < 1e-5


# ---- Sampled softmax -----------------------------------------------------------------------------
V = META["V"]
# The loss in two chunks. Its x is given: the tests replace the forward pass.
STAGE = frozen.Stage(1, 8 * META["N"], short=8, long=8, max_doc=0, lr=1.0, candidates=META["P"])
SS = part(stages=(STAGE,), D=META["Dh"], vocab=V, head_chunk=META["N"] // 2, val_T=META["N"])
FULL = SS.for_validation()
ALL = dataclasses.replace(SS, stages=(dataclasses.replace(STAGE, candidates=V),))


def test_the_candidates_of_three_calls_in_a_row():
    for rank in 0, 5:
        first = GOLDEN[f"ss/rank{rank}/offset0"]
        assert first == V * rank // 8
        for call in range(3):
            key = f"ss/rank{rank}/call{call}/"
            targets = GOLDEN[key + "targets"]
            tokens, place = frozen.candidate_tokens(jnp.asarray(targets), first, META["P"], SS)
            np.testing.assert_array_equal(tokens, GOLDEN[key + "candidates"])
            np.testing.assert_array_equal(place[targets], GOLDEN[key + "target_pos"])
            prefix = GOLDEN["ss/prefix_table"][targets]
            places = np.where(prefix < 0, -1, np.asarray(place)[prefix])
            np.testing.assert_array_equal(places, GOLDEN[key + "prefix_pos"])
            first = GOLDEN[key + "offset_after"]


def test_the_candidates_at_full_size():
    targets = jnp.asarray(GOLDEN["ss/gpt2/targets_distinct"])
    P = RECORD.stages[0].candidates
    tokens, _ = frozen.candidate_tokens(targets, jnp.int32(0), P, RECORD)
    np.testing.assert_array_equal(tokens[:64], GOLDEN["ss/gpt2/first64"])
    sha256 = hashlib.sha256(np.asarray(tokens).astype("<i4").tobytes()).digest()
    assert sha256 == GOLDEN["ss/gpt2/candidates_sha256"].tobytes()


def loss_of(name: str, monkeypatch, c: frozen.Config = SS):
    """loss_fn of the golden x and head, and its arguments: weights by target, and the tokens."""
    *ahead, prefix = (float(weight) for weight in GOLDEN[f"ss/{name}/weights"])
    weights = dict(enumerate([prefix, *ahead]))
    weights = {k: weight for k, weight in weights.items() if weight}
    targets = GOLDEN["ss/rank0/call0/targets"]
    tokens = jnp.asarray(np.concatenate(([0], targets)))[None]
    monkeypatch.setattr(frozen, "forward", lambda w, *_: w["x"][None])
    monkeypatch.setattr(frozen, "norm", lambda x: x)
    monkeypatch.setattr(frozen, "prefix_table", lambda c: GOLDEN["ss/prefix_table"])

    def loss(x, head):
        sweep = jnp.int32(GOLDEN["ss/rank0/offset0"])
        return frozen.loss_fn({"x": x, "head": head}, tokens, weights, c, 0, sweep)

    return loss


@pytest.mark.parametrize("name", ["one", "three"])
def test_the_loss_over_candidates_and_its_gradients(name, monkeypatch):
    x, head = normal("ss/x", (META["N"], META["Dh"])), normal("ss/w", (V, META["Dh"]))
    loss = jax.jit(jax.value_and_grad(loss_of(name, monkeypatch), argnums=(0, 1)))
    total, (dx, dhead) = loss(jnp.asarray(x), jnp.asarray(head))
    candidates = GOLDEN["ss/rank0/call0/candidates"]
    assert float(total) == pytest.approx(float(GOLDEN[f"ss/{name}/loss_sum"]), rel=1e-6)
    assert relative(dx, GOLDEN[f"ss/{name}/dx_true"]) < 1e-5
    assert relative(dhead[candidates], GOLDEN[f"ss/{name}/dw_true"]) < 1e-5
    assert not np.delete(dhead, candidates, axis=0).any()


@pytest.mark.parametrize("c", [FULL, ALL], ids=["no candidates", "all are candidates"])
def test_the_loss_over_all_tokens(c, monkeypatch):
    x, head = normal("ss/x", (META["N"], META["Dh"])), normal("ss/w", (V, META["Dh"]))
    loss = jax.jit(jax.value_and_grad(loss_of("three", monkeypatch, c)))
    total, dx = loss(jnp.asarray(x), jnp.asarray(head))
    assert float(total) == pytest.approx(float(GOLDEN["ss/full/loss"].sum()), rel=1e-6)
    assert relative(dx, GOLDEN["ss/full/dx_true"]) < 1e-5


# ---- Averages ------------------------------------------------------------------------------------
NAMES = {"lm_head": "head", "embed": "embed", "qk_bank": "qk", "vo_bank": "vo", "mlp_bank": "mlp",
         "value_embeds": "value0"}  # fmt: skip


def weights_after(step: int, name: str) -> np.ndarray:
    """A golden array as it is after a step. Adam moves tables only in some steps."""
    if name in ("lm_head", "embed") and step > 896:
        step = max(s for s in range(896, step + 1) if frozen.WITH_ADAM in RECORD.due(s) or s == 896)
    if name == "value_embeds":
        step = max(s for s in range(step + 1) if frozen.WITH_TABLES in RECORD.due(s))
    shape = GOLDEN[f"tail/last/{name}"].shape
    A, B, C = (normal(f"tail/{name}/{number}", shape).astype(np.float64) for number in range(3))
    return (A + 0.5 * np.sin(step / 40) * B + 0.3 * np.cos(step / 7) * C).astype(np.float32)


def validated(params: dict, averages: list[dict]) -> dict:
    """frozen.validated() of these."""
    return frozen.validated(frozen.State(params, {}, {}, {}, averages, 0), ONE_TABLE)


# The preset with one value table, as the golden file has it.
ONE_TABLE = dataclasses.replace(RECORD, averages=tuple(
    dataclasses.replace(average, params=tuple(n for n in average.params if n in NAMES.values()))
    for average in RECORD.averages
))  # fmt: skip
TAGS = ["tail-ema", "tail-avg", "value-embed-avg", "bank-blend", "bank-blend"]


def test_the_averages_and_what_is_validated():
    params = {ours: weights_after(890, theirs) for theirs, ours in NAMES.items()}
    averages = [
        {name: jnp.zeros_like(params[name]) for name in row.params} for row in ONE_TABLE.averages
    ]
    move = jax.jit(frozen.move_averages)
    for step in range(890, N):
        params = {ours: weights_after(step, theirs) for theirs, ours in NAMES.items()}
        averages = move(averages, params, ROWS[step].average_rates)
        if step == 892:
            for name, weights in validated(params, averages).items():
                assert relative(weights, params[name]) < 1e-6  # until an average begins
    weights = validated(params, averages)
    moved = {}
    for tag, arrays in zip(TAGS, averages, strict=True):
        moved |= {(tag, name): array for name, array in arrays.items()}
    for theirs, ours in NAMES.items():
        if ours != "value0":  # of which nothing but the average is validated
            assert relative(params[ours], GOLDEN[f"tail/last/{theirs}"]) < 1e-6
        for tag in {tag for tag, name in moved if name == ours}:
            golden = GOLDEN[f"tail/average/{tag}/{theirs}"]
            assert relative(moved[tag, ours], golden) < 2e-6, (ours, tag)
        assert relative(weights[ours], GOLDEN[f"tail/shipped/{theirs}"]) < 2e-6, ours


def rates(number: int) -> np.ndarray:
    """The rates of an average in all steps of the run."""
    return frozen.rates_of_average(RECORD.averages[number], np.arange(N) / N)


@pytest.mark.parametrize("number", [1, 3, 4])
def test_the_steps_of_the_matrices_averages(number):
    steps = np.flatnonzero((rates(number) > 0) & (rates(number) < 1))
    golden = GOLDEN[f"tail/ticks/{TAGS[number]}"]
    assert steps.tolist() == golden[1:].tolist()
    np.testing.assert_allclose(rates(number)[steps], GOLDEN[f"tail/rates/{TAGS[number]}"][1:], 1e-6)


def test_the_steps_of_the_tables_averages():
    """Ours also move in steps in which the table does not. So two moves of the head's are one of
    upstream's, and those of the value tables come two steps after upstream's."""
    head, value = rates(0), rates(2)
    assert np.argmax(head < 1) - 1 == GOLDEN["tail/ticks/tail-ema"][0]
    assert head[-1] == pytest.approx(GOLDEN["tail/rates/tail-ema"][-1], rel=1e-6)
    assert 1 - (1 - head[-1]) ** 2 == pytest.approx(GOLDEN["tail/rates/tail-ema"][1], rel=1e-6)
    steps = np.flatnonzero((value > 0) & (value < 1))
    assert (steps - 2).tolist() == GOLDEN["tail/ticks/value-embed-avg"][1:].tolist()
    np.testing.assert_allclose(value[steps], GOLDEN["tail/rates/value-embed-avg"][1:], 1e-6)


def test_an_average_of_a_shorter_run_remembers_as_large_a_part():
    average = RECORD.averages[1]
    for steps in 100, 300, 1194:
        found = frozen.rates_of_average(average, np.arange(steps) / steps)
        first_copy = np.prod(1 - found[np.argmax(found < 1) :])  # what is left of it
        assert first_copy < 0.02, (steps, first_copy)


def test_value_tables():
    """Adam of the value tables over the events around the first cycle of four steps. optax adds
    epsilon elsewhere: where a gradient is below 1e-5, this matters, and a little above, the tables
    differ by up to 1.1e-6."""
    param = frozen.param_table(RECORD)["value0"]
    p = GOLDEN["value/start"]
    hit = GOLDEN["table/hit"]
    state = param.optimizer.init(jnp.asarray(p))
    tiny = np.zeros(p.shape, bool)
    for event, step in enumerate(GOLDEN["table/events"]):
        cycle = ROWS[step].table_cycle
        noise = normal(f"value/grad/{event}", (*hit[event].shape, p.shape[1]), 1e-2)
        grad = (noise * hit[event][..., None]).sum(axis=0) / len(hit[event])
        tiny |= (grad != 0) & (np.abs(grad) < 1e-5)
        update, state = param.optimizer.update(jnp.asarray(grad), state, cycle=cycle)
        decay = cycle * param.weight_decay
        p = frozen.apply_update(p, update, update, ROWS[step].adam_lr, param.lr, decay)
    assert tiny.mean() < 0.05
    assert relative(p[~tiny], GOLDEN["value/final"][~tiny]) < 2e-6
    assert relative(state.mu, GOLDEN["value/m"]) < 1e-6
    assert relative(state.nu, GOLDEN["value/v"]) < 1e-6


# ---- The table of n-grams ------------------------------------------------------------------------
# A table of as many rows as the golden one, in eighths: row r is at [r // 8, r % 8].
TABLE = part(D=META["Dt"], F=META["Dt"], bigrams=META["R"])


def rows_of_event(event: int, R: int) -> frozen.RowGradients:
    """The gradients of an event: of every row as many as there are ranks that hit it. Where a rank
    does not hit a row, there is row R, past the end."""
    hit = GOLDEN["table/hit"][event]
    ranks, rows = hit.shape
    gradients = normal(f"table/grad/{event}", (*hit.shape, TABLE.D), 1e-2) / ranks  # of a mean
    shape = ranks, rows // 8, 8
    numbers = np.where(hit.reshape(shape), np.arange(rows // 8)[:, None], R)
    by_eighth = np.moveaxis(numbers, 2, 0).reshape(8, -1)
    gradients = np.moveaxis(gradients.reshape(*shape, -1), 2, 0).reshape(8, -1, TABLE.D)
    return frozen.RowGradients(jnp.asarray(by_eighth), jnp.asarray(gradients))


def test_row_adam(monkeypatch):
    """update_parameters() of the table over the events around the first cycle of four steps."""
    table = {"bigram": frozen.param_table(TABLE)["bigram"]}
    monkeypatch.setattr(frozen, "param_table", lambda c: table)
    start = GOLDEN["table/start"]
    R = table["bigram"].shape[0]
    params = np.zeros((R * 8, TABLE.D), np.float32)
    params[: len(start)] = start  # the rest is padding
    params = {"bigram": jnp.asarray(params.reshape(R, 8, -1))}
    opt_state = {"bigram": table["bigram"].optimizer.init(params["bigram"])}
    state = frozen.State(params, opt_state, {}, {}, [], 0)

    @jax.jit
    def update(state, gradients, row):
        once = frozen.sum_equal_rows(gradients, R)
        updates = frozen.Updates(frozen.CADENCES, ())
        return frozen.update_parameters(state, {"bigram": once}, row, TABLE, updates)

    for event, step in enumerate(GOLDEN["table/events"]):
        row = ROWS[step]._replace(average_rates=())
        state = update(state, rows_of_event(event, R), row)
        rows = np.asarray(state.params["bigram"]).reshape(R * 8, -1)
        squares = np.asarray(state.opt_state["bigram"].squares).reshape(-1)
        assert relative(squares[: len(start)], GOLDEN["table/second_moment"][event]) < 1e-6
        if f"table/after{event}" in GOLDEN:
            assert relative(rows[: len(start)], GOLDEN[f"table/after{event}"]) < 1e-6
        assert not rows[len(start) :].any() and not squares[len(start) :].any()
    assert relative(rows[: len(start)], GOLDEN["table/final"]) < 1e-6
    moved = rows[: len(start)] - start
    assert relative(moved, GOLDEN["table/final"] - start) < 1e-6
    assert state.opt_state["bigram"].count == len(GOLDEN["table/events"])


# ---- The head's mix of streams -------------------------------------------------------------------
def test_the_mix_of_ten_sources_in_twelve_groups():
    _, T, sources, groups = GOLDEN["mudd/deltas"].shape
    D = GOLDEN["mudd/out"].shape[-1]
    R = 16  # of the net that made the golden numbers
    names = [f"layer{number}" for number in range(sources)]
    mixed = tuple((name, 0.0) for name in names)
    layers = (Layer(frozen.LONG),) * sources
    c = part(layers=layers, D=D, R=R, mudd_groups=groups, mudd_head=mixed)
    w = {
        "mudd_head.w1": normal("mudd/w1", (R, D)) / np.float32(D**0.5),
        "mudd_head.w2": normal("mudd/w2", (sources, R), 0.3),
        "mudd_head.b2": normal("mudd/b2", (sources,)),
        "mudd_head.groups": normal("mudd/w2g", (sources, groups, R), 0.3),
    }
    table = frozen.param_table(c)
    assert all(array.shape == table[name].shape for name, array in w.items())
    x = jnp.asarray(normal("mudd/x", (1, T, D)))
    mix = frozen.run_net("mudd_head", x, w, c)
    assert relative(mix["x"], GOLDEN["mudd/coefficients"]) < 1e-6
    assert relative(mix["groups"], GOLDEN["mudd/deltas"]) < 1e-6
    saved = {}
    for number, name in enumerate(names):
        saved[name] = jnp.asarray(normal(f"mudd/source/{number}", (1, T, D)))
    terms = frozen.mudd_head_terms(x, saved, w, c)
    out = frozen.weighted_sum((1.0, x), *terms)
    assert relative(out, GOLDEN["mudd/out"]) < 1e-6
