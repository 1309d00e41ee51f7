"""Our model, optimizers, schedule and stream against numbers of record #89's PyTorch modules.

All is float32, so that formulas are compared and not rounding. The tolerances are the differences
between two correct float32 programs (head_small.md). tests/golden.py maps parameters and names.
differences.md lists what is not upstream's on purpose.
"""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train_gpt
from tests.golden import (
    GOLDEN,
    RECORD,
    C,
    T,
    checksum,
    errors,
    normal,
    on_one_device,
    ours,
    parameters,
    patch_fixture,
    random_of,
    relative,
    theirs,
    unstacked,
    weights,
)
from tests.tools import FLOAT32, whole_loss
from train_gpt import BANK, EXCHANGED, LOOKUP, REPLICATED, Param, Stage

TOKENS = GOLDEN["tokens"]
# Of each stage, the loss weights by target: n is the n-th token ahead, 0 the prefix of the next.
SHARES = [
    {k: share for k, share in zip((1, 2, 3, 0), (*mtp, prefix), strict=True) if share}
    for mtp, prefix in zip(GOLDEN["loss/train_mtp"], GOLDEN["loss/train_prefix"], strict=True)
]


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    patch_fixture(monkeypatch)
    with jax.default_matmul_precision("highest"):
        yield


# ---- Parameters ----------------------------------------------------------------------------------
def test_the_parameters_are_the_fixtures_and_every_one_has_a_place():
    for name, array in parameters().items():
        np.testing.assert_allclose(checksum(array, 2), GOLDEN[f"param_sum/{name}"], rtol=1e-6)
    zero = {name: np.zeros_like(array) for name, array in parameters().items()}
    there_and_back = theirs(ours(parameters()), zero)
    # The shares that the original stores and never uses: they come back as zeros.
    unused = {
        "ve_gate_bank": 1 / 5, "mlp_bank": 1 / 12, "mudd_w2": 9 / 28, "mudd_b2": 9 / 28,
        "mudd_gate_w2": 15 / 82, "mudd_gate_b2": 15 / 82,
    }  # fmt: skip
    for name, array in parameters().items():
        got = there_and_back[name]
        assert ((got == array) | (got == 0)).all()
        assert (got == 0).mean() == pytest.approx(unused.get(name, 0), abs=1e-4), name


# ---- Losses and gradients ------------------------------------------------------------------------
@functools.cache
def stage_1() -> tuple:
    """For the first sequence in stage 1: the losses of training and of validation, and the
    gradients of the former. All are of one program, because it takes long to compile, and of one
    pass through the layers."""

    forward = train_gpt.forward
    passes = []

    def once(*arguments):
        if not passes:
            passes.append(forward(*arguments))
        return passes[0]

    def losses(w, tokens):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_gpt, "forward", once)
            train = whole_loss(w, tokens[None], SHARES[0], C, 0)
            return train, whole_loss(w, tokens[None], {1: 1 / T}, C, 0)

    program = jax.jit(jax.value_and_grad(losses, has_aux=True))
    (train, val), grads = program(weights(), TOKENS[0])
    return train, val, grads


def test_the_losses_of_stage_1():
    train, val, _ = stage_1()
    assert float(train) == pytest.approx(GOLDEN["loss/train/tied"][0][0], rel=1e-6)
    assert float(val) == pytest.approx(GOLDEN["loss/eval/tied"][0][0], rel=1e-6)


def test_every_gradient():
    """By autodiff. Upstream's kernel has another gradient, for it counts targets past the end."""
    zero = {name: np.zeros_like(array) for name, array in parameters().items()}
    grads = theirs(unstacked(stage_1()[2]), zero)
    grads["tied_head"] = grads["lm_head.weight"] + grads["embed.weight"].T
    found = errors("grad/stage1/autodiff", grads)
    assert len(found) >= len(parameters())
    worst = max(found, key=found.get)
    assert found[worst] < 1e-4, (worst, found[worst])


# ---- Components ----------------------------------------------------------------------------------
@pytest.mark.parametrize("size", ["full", "config"])
def test_rotation(size):
    """The frequencies and the scale of each stage, and cos and sin at the fixture's positions. The
    fixture has them as y = factor1 x + factor2 swap_pairs(x), of interleaved pairs."""
    c = C if size == "config" else dataclasses.replace(RECORD, **FLOAT32)
    for table in ("normal", "paired"):
        get = lambda name, table=table: GOLDEN[f"rope/{size}/{table}/{name}"]
        for stage in range(4):
            frequency, scale = train_gpt.rope_frequencies(c, stage)
            np.testing.assert_allclose(frequency, get("freq")[stage], rtol=1e-6)
            assert scale == pytest.approx(get("attn_scale")[stage], rel=1e-6)
        at = get("positions")
        for name, stage in ("stage1", 0), ("ext", 3):
            starts = jnp.zeros((1, int(at.max()) + 1), bool)
            pos = train_gpt.positions(starts, c, stage)
            cos, sin = pos.rope[table == "paired"]
            assert pos.score_scale == pytest.approx(get("attn_scale")[stage], rel=1e-6)
            cos = np.repeat(np.asarray(cos)[at][:, :2], 2, axis=-1)
            sin = np.repeat(np.asarray(sin)[at][:, :2], 2, axis=-1)
            half = c.D // c.H // 2  # of a head's channels; the other half does not rotate
            factor1 = get(f"{name}/factor1").reshape(len(at), -1, 2 * half)
            factor2 = get(f"{name}/factor2").reshape(len(at), -1, 2 * half)
            sign = np.tile([1, -1], half // 2)
            # An error of one ulp in a frequency grows with the position.
            slack = 1e-6 + 2e-7 * (2 * at[:, None, None] + 1)
            assert (np.abs(factor1[..., :half] - cos) < slack).all()
            assert (np.abs(factor2[..., :half] - sign * sin) < slack).all()
            assert (factor1[..., half:] == 1).all()
            assert not factor2[..., half:].any()


def test_norm_and_hash():
    x = GOLDEN["comp/rms/x"]
    y = GOLDEN["comp/rms/y"]
    np.testing.assert_allclose(train_gpt.norm(jnp.asarray(x)), y, rtol=1e-6)
    tokens = jnp.asarray(GOLDEN["comp/bigram/tokens"])[None]
    ((rows, numbers),) = train_gpt.hash_ngrams(tokens, RECORD)
    np.testing.assert_array_equal(rows[0], GOLDEN["comp/bigram/hash"])
    np.testing.assert_array_equal(numbers[0], GOLDEN["comp/bigram/sign_row"])


# ---- Prefixes and stream -------------------------------------------------------------------------
def test_the_prefixes_of_gpt2():
    get = lambda k: GOLDEN[f"prefix_gpt2/{k}"]
    found = np.fromfile(Path(train_gpt.__file__).parent / RECORD.prefixes, "<i4")
    rows = np.pad(found, (0, int(get("size")) - len(found)), constant_values=-1)
    assert hashlib.sha256(rows.tobytes()).hexdigest() == str(get("sha256_int32_le"))
    np.testing.assert_array_equal(rows[get("ids")], get("prefix"))


def test_the_stream_is_that_of_eight_ranks():
    plan = GOLDEN["loader/plan"].tolist()
    stages = tuple(Stage(1, tokens, 16, 48, max_doc, 1.0) for tokens, max_doc in plan)
    sizes = {"batch": 8, "stages": stages, "head_chunk": 1}
    c = dataclasses.replace(C, eot=50256, vocab=50257, **sizes)
    shards = [GOLDEN[f"loader/shard{i}"] for i in range(3)]
    steps = list(train_gpt.read_batches(shards, train_gpt.batch_shapes("train", c), c))
    assert len(steps) == len(plan)
    for rank in range(8):
        get = lambda name, rank=rank: GOLDEN[f"loader/world8/rank{rank}/{name}"]
        inputs = [step[rank][:-1] for step in steps]
        sha = hashlib.sha256(np.concatenate(inputs).astype("<i4").tobytes()).hexdigest()
        assert sha == str(get("inputs_sha256"))
        assert [int((tokens == c.eot).sum()) for tokens in inputs] == get("n_docs").tolist()


def test_validation_is_unaligned_slices():
    inputs = GOLDEN["loader/val/inputs"]
    last = GOLDEN["loader/val/last_target"]
    n, length = inputs.shape
    c = dataclasses.replace(C, eot=50256, val_T=length, val_tokens=n * length, head_chunk=1)
    shapes = train_gpt.batch_shapes("val", c)
    steps = np.concatenate([*train_gpt.read_batches([GOLDEN["loader/shard0"]], shapes, c)])
    np.testing.assert_array_equal(steps[:, :-1], inputs)
    np.testing.assert_array_equal(steps[:, -1], last)


# ---- Schedule and optimizers ---------------------------------------------------------------------
def test_the_schedule():
    c = RECORD
    columns = str(GOLDEN["schedule/columns"]).split()
    rows = train_gpt.schedule(c)
    ends = GOLDEN["schedule/boundaries"][:, 1]
    assert c.total_steps == GOLDEN["schedule/total_steps"] == len(rows)
    assert list(c.stage_ends[:4]) == ends.tolist()
    final = c.stages[c.stage_at(c.total_steps)]
    assert [final.short, final.long] == GOLDEN["schedule/final_windows_tokens"].tolist()
    assert sum(row.tied for row in rows) - 1 == GOLDEN["schedule/split_step"]
    for line in GOLDEN["schedule/table"]:
        want = dict(zip(columns, line, strict=True))
        step = int(want["step"])
        if step == c.total_steps:  # the training has ended
            continue
        stage = c.stages[c.stage_at(step)]
        row = rows[step]
        targets = dict(zip(train_gpt.target_weights(stage), row.loss_weights, strict=True))
        scale = train_gpt.rope_frequencies(c, c.stage_at(step))[1]
        got = dict(
            step=step, lr_multiplier=row.adam_lr / c.adam_lr, muon_momentum=row.momentum,
            mtp0=targets.get(1, 0), mtp1=targets.get(2, 0), mtp2=targets.get(3, 0),
            prefix=targets.get(0, 0), ws_short=stage.short // 128, ws_long=stage.long // 128,
            tokens_per_step=stage.tokens, max_doc=stage.max_doc, adam=step % 2, attn_scale=scale,
            attn_scale_paired=scale,
        )  # fmt: skip
        assert row.muon_lr == pytest.approx(c.muon_lr * want["lr_multiplier"], rel=1e-6)
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=1e-6, abs=1e-9), (step, name)


PLACES = dict(  # of our parameters, the rows in the fixture's table of rates
    head="lm_head", embed="embed", ngram="bigram_embed", vo_lambdas="scalars",
    skip_lambdas="scalars", smear_lambda="scalars", smear_gate="smear_gate",
    value_gates="ve_gate_bank", gate_scale="_mudd_gate_scale",
    **{f"value{i}": "value_embeds" for i in range(5)},
)  # fmt: skip


def adam_betas(optimizer) -> list[float]:
    """Both betas, from the moments after a first gradient of 1."""
    _, state = optimizer.update(jnp.ones(1), optimizer.init(jnp.zeros(1)))
    return [1 - float(state.mu[0]), 1 - float(state.nu[0])]


def test_rates_and_decays_of_every_parameter():
    wanted = json.loads(str(GOLDEN["schedule/param_table"]))
    for name, param in train_gpt.param_table(RECORD).items():
        if param.kind == BANK:
            assert param.every_step and (param.base_lr, RECORD.muon_lr) == ("muon_lr", 0.023)
            factors = {"qk": [1], "vo": [1], "mlp": [2, 4]}[name]
            real = param.lr.reshape(-1)[: len(param.layers)]
            np.testing.assert_allclose(real, np.resize(factors, len(real)), rtol=1e-6)
            assert param.weight_decay == pytest.approx(1.2)
            continue
        assert (param.base_lr, RECORD.adam_lr) == ("adam_lr", 0.008)
        assert not param.every_step and RECORD.adam_every == 2
        places = [(PLACES.get(name), param.lr)]
        if name in ("attn_lambdas", "mlp_lambdas"):
            places = [("resid_lambdas", param.lr[0]), ("post_lambdas", param.lr[1])]
        elif "." in name:
            net, array = name.split(".")
            kind = "mudd_gate" if net.startswith("gates") else "mudd"
            places = [(f"{kind}_{array}", param.lr)]
        for place, lr in places:
            want = wanted[place]
            lr_mul = want.get("lr_mul", 1)
            wd_mul = want.get("wd_mul", 1)
            assert lr == pytest.approx(lr_mul, rel=1e-6), name
            decay = np.max(param.weight_decay)
            assert decay == pytest.approx(0.005 * lr_mul * wd_mul, rel=1e-6), name
            assert adam_betas(param.optimizer) == pytest.approx(want["adam_betas"], abs=1e-6), name


# Our names of the fixture's tensors in the test of the optimizers, where they differ.
OURS = dict(lm_head="head", bigram_embed="ngram")
THEIRS = dict(head="lm_head", ngram="bigram_embed")


def optimizer_table() -> tuple[dict[str, Param], dict[str, np.ndarray]]:
    """A parameter table of the fixture's small tensors, and their first values."""
    rows = {}
    starts = {}
    for name, about in json.loads(str(GOLDEN["schedule/param_table"])).items():
        key = OURS.get(name, name)
        shape = GOLDEN[f"optim/after8/{name}"].shape
        start = np.float32(0.3 * normal(f"opt/param/{name}", shape))
        if name == "embed":
            start = np.float32(0.3 * normal("opt/param/lm_head", shape[::-1])).T
        if name == "lm_head":
            start = start.T
        lr_mul = about.get("lr_mul", 1)
        wd_mul = about.get("wd_mul", 1)
        if about["optim"] == "normuon":
            R, C_ = shape[-2:]
            n = int(np.prod(shape[:-2]))
            lr = np.full((1, n, 1, 1), max(1, R / C_) ** 0.5, np.float32)
            if name == "mlp_bank":
                lr[:, 1::2] *= 2
            start = start.reshape(1, n, R, C_)
            layers = tuple(range(n))
            muon = train_gpt.normuon(C)
            rows[key] = Param(start.shape, None, lr, 1.2, muon, BANK, True, "muon_lr", layers)
        else:
            kind = REPLICATED
            if name in ("lm_head", "embed", "value_embeds"):
                kind = LOOKUP
            if name == "bigram_embed":
                kind = EXCHANGED
            adam = train_gpt.adam(*about["adam_betas"])
            decay = 0.005 * lr_mul * wd_mul
            rows[key] = Param(start.shape, None, lr_mul, decay, adam, kind)
        starts[key] = start
    return rows, starts


def optimizer_gradient(name: str, step: int, shape: tuple) -> np.ndarray:
    """A step's gradient of one of our parameters."""
    key = THEIRS.get(name, name)
    key_shape = GOLDEN[f"optim/after8/{key}"].shape
    g = normal(f"opt/grad/{key}/{step}", key_shape)
    if key in ("value_embeds", "bigram_embed", "embed"):
        used = random_of(f"opt/hit/{key}/{step}").random(key_shape[0]) < 0.4
        g = np.where(used[:, None], g, 0)
    if key == "resid_lambdas":
        g = g * 2e-10
    g = np.float32(g)
    if name == "head":
        g = g.T
    return g.reshape(shape)


def test_eight_steps_of_the_optimizers(monkeypatch):
    """update_parameters(), with the fixture's gradients."""
    rows, starts = optimizer_table()
    monkeypatch.setattr(train_gpt, "param_table", lambda c: rows)
    params = {name: jnp.asarray(start) for name, start in starts.items()}
    waits = [name for name in params if not rows[name].every_step]
    state = train_gpt.State(
        params,
        {name: rows[name].optimizer.init(p) for name, p in params.items()},
        {name: jnp.zeros_like(params[name]) for name in waits},
        {name: p for name, p in params.items() if rows[name].kind == LOOKUP},
        jnp.zeros((), jnp.int32),
    )
    programs = []
    for adam_step in (False, True):
        update = functools.partial(train_gpt.update_parameters, c=C, adam_step=adam_step)
        programs.append(on_one_device(update))
    history = []
    for step in range(8):
        lr = GOLDEN["optim/lr_multiplier"][step]
        tied = step <= int(GOLDEN["optim/split_step"])
        row = train_gpt.schedule(C)[0]._replace(
            adam_lr=np.float32(C.adam_lr * lr), muon_lr=np.float32(C.muon_lr * lr),
            momentum=np.float32(GOLDEN["optim/muon_momentum"][step]), tied=np.bool_(tied),
        )  # fmt: skip
        gradients = {name: optimizer_gradient(name, step, p.shape) for name, p in params.items()}
        state = programs[step % 2](state, gradients, row)
        history.append({name: np.asarray(array) for name, array in state.params.items()})
        for name, table in state.lookups.items():
            if step % 2:
                np.testing.assert_array_equal(table, state.params[name])
    # optax adds Adam's epsilon after the bias correction, #89 before it. That shows only in
    # gradients of its size, 1e-10. The fixture has them for resid_lambdas, which are left out.
    for name in rows.keys() - {"resid_lambdas"}:
        key = THEIRS.get(name, name)
        start = starts[name]
        for after in (2, 8):
            whole = f"optim/after{after}/{key}"
            if whole in GOLDEN:
                want = GOLDEN[whole].T if name == "head" else GOLDEN[whole].reshape(start.shape)
                moved = history[after - 1][name] - start
                assert relative(moved, want - start) < 1e-4, (name, after)
        for step, want in enumerate(GOLDEN[f"optim/each_step/{key}"]):
            got = history[step][name].T if name == "head" else history[step][name]
            assert np.abs(checksum(got, 2) - want).max() < 1e-4 * want[0], name
    adam = state.opt_state["embed"]
    np.testing.assert_allclose(adam.mu, GOLDEN["optim/state/embed/exp_avg"], atol=1e-6)
    np.testing.assert_allclose(adam.nu, GOLDEN["optim/state/embed/exp_avg_sq"], atol=1e-6)
    assert adam.count == GOLDEN["optim/state/embed/step"]
    buffer, average = state.opt_state["qk_bank"]
    get = lambda name: GOLDEN[f"optim/state/qk_bank/{name}"]
    assert relative(buffer[0], get("momentum_buffer")) < 1e-5
    assert relative(average[0], get("second_momentum_buffer")) < 1e-4
