"""Orthogonalization, NorMuon, Adam, decay, who gets which rule and rate, the schedules."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import train_gpt
from tests.tools import MINI, MINI32, make_mesh, unoptimized

RECORD, TINY = train_gpt.PRESETS["record"], train_gpt.PRESETS["tiny"]
SHAPES = dict(square=(64, 64), wide=(32, 128), tall=(128, 32))


def matrix(shape, rank=None, seed=0):
    rng = np.random.default_rng(seed)
    G = rng.normal(size=shape)
    if rank:
        G = rng.normal(size=(shape[0], rank)) @ rng.normal(size=(rank, shape[1]))
    return G.astype(np.float32)


def quintics(s):
    """What five steps make of singular values, in float64; the numbers are those of ladder 3.6."""
    for a, b, c in (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ):
        s = a * s + b * s**3 + c * s**5
    return s


def polar(G):
    U, s, Vt = np.linalg.svd(G.astype(np.float64), full_matrices=False)
    return U * quintics(s / (1.02 * np.linalg.norm(s) + 1e-6)) @ Vt


# ---- Matrices ------------------------------------------------------------------------------------
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rank", [None, 5])
def test_the_quintics_are_applied_to_the_singular_values(shape, rank):
    G = matrix(shape, rank)
    got = np.asarray(train_gpt.orthogonalize(G[None], "float32")[0])
    np.testing.assert_allclose(got, polar(G), atol=2e-4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_in_bfloat16_they_bring_singular_values_near_one(shape):
    G = matrix(shape)
    got = np.asarray(train_gpt.orthogonalize(G[None], "bfloat16")[0])
    s = np.linalg.svd(got, compute_uv=False)
    assert 0.5 < s.min() and s.max() < 1.25
    U, _, Vt = np.linalg.svd(G, full_matrices=False)
    assert np.trace(U.T @ got @ Vt.T) > 0.97 * s.sum()  # and the directions are G's own


def test_of_nothing_they_make_nothing_and_of_a_batch_what_they_make_of_each():
    batch = np.stack([*(matrix((16, 48), seed=i) for i in range(3)), np.zeros((16, 48), "f4")])
    for dtype in ("float32", "bfloat16"):
        got = np.asarray(train_gpt.orthogonalize(batch.reshape(2, 2, 16, 48), dtype))
        assert not got[1, 1].any()
        one = np.asarray(train_gpt.orthogonalize(batch[1:2], dtype)[0])
        np.testing.assert_allclose(got[0, 1], one, atol=1e-2 if dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_normuon_is_the_spec(shape):
    """Five steps with moving momentum. Rows are evened out, but of wide matrices columns; what is
    zero stays zero."""
    rng, axis = np.random.default_rng(1), 1 if shape[0] >= shape[1] else 0
    state = train_gpt.normuon(MINI32).init({"w": jnp.zeros((1, 2, *shape))})
    B, v = np.zeros(shape), 0.0
    for mu in (0.85, 0.88, 0.91, 0.95, 0.85):
        G = rng.normal(size=shape) * np.exp(rng.normal(size=(shape[0], 1)))
        grads = {"w": jnp.float32(np.stack([G, np.zeros(shape)]))[None]}
        updates, state = train_gpt.normuon(MINI32, mu).update(grads, state)
        B = B + (1 - mu) * (G - B)
        X = polar(G + mu * (B - G))
        v = v + 0.1 * ((X**2).mean(axis=axis, keepdims=True) - v)
        Y = X / np.sqrt(np.maximum(v, 1e-10))
        expected = Y * np.linalg.norm(X) / np.linalg.norm(Y)
        np.testing.assert_allclose(updates["w"][0, 0], expected, atol=2e-4 * np.abs(Y).max())
        assert not np.any(updates["w"][0, 1])
    buffer, squares = state
    np.testing.assert_allclose(buffer["w"][0, 0], B, atol=1e-5)
    np.testing.assert_allclose(squares["w"][0, 0], v, rtol=1e-3)


# ---- By element ----------------------------------------------------------------------------------
def test_adam_is_the_spec():
    """lr sqrt(1 - b2^t) / (1 - b1^t) m / (sqrt(v) + 1e-10); the table's lr and the rate come later.
    Where gradients are not tiny: there optax adds its epsilon after it corrects the bias."""
    rows, rng = train_gpt.param_table(MINI), np.random.default_rng(2)
    names = ["embed", "bigram", "vo_lambdas", "attn_lambdas"]
    betas = [(0.5, 0.95), (0.75, 0.95), (0.9, 0.99), (0.9, 0.95)]
    params = {name: jnp.zeros(row.stored_shape) for name, row in rows.items()}
    rule = train_gpt.optimizer(MINI, 0.9)
    state, m, v = rule.init(params), dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "orthogonalize", lambda u, dtype: u)
        update = jax.jit(rule.update)
        for t in range(1, 4):
            draws = {name: rng.normal(size=params[name].shape) for name in names}
            updates, state = update(params | {k: jnp.float32(g) for k, g in draws.items()}, state)
            for name, (b1, b2) in zip(names, betas, strict=True):
                m[name] = b1 * m[name] + (1 - b1) * draws[name]
                v[name] = b2 * v[name] + (1 - b2) * draws[name] ** 2
                expected = np.sqrt(1 - b2**t) / (1 - b1**t) * m[name] / (np.sqrt(v[name]) + 1e-10)
                np.testing.assert_allclose(updates[name], expected, atol=1e-4, err_msg=name)


# A small model in which all kinds of parameters are.
SMALL = dataclasses.replace(MINI, plan="Spbxv0 Lkgnxdmv1@0<0", untie=13)
NAMES = [*train_gpt.param_table(SMALL)]


@functools.cache
def step_of_made_up_gradients(odd: bool):
    """State after, and what the optimizer was given: of gradients that are 1, 2, 3 .. by name."""
    seen, real = {}, train_gpt.optimizer

    def spy(c, momentum):
        rule = real(c, momentum)
        update = lambda grads, state: seen.update(grads) or rule.update(grads, state)
        return rule._replace(update=update)

    def one(state):
        made = {k: jnp.full_like(p, 1.0 + NAMES.index(k)) for k, p in state.params.items()}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_gpt, "gather", lambda params, c: dict(params))
            patch.setattr(train_gpt.lax, "pcast", lambda x, *_, **__: x)
            every = jnp.arange(SMALL.bigrams)[None]  # row of the table of pairs, once
            patch.setattr(train_gpt, "hash_pairs", lambda tokens, c: (every, None))
            loss = lambda w, *_, **__: sum(jnp.vdot(w[k], made[k]) for k in made)
            patch.setattr(train_gpt, "loss_fn", loss)
            patch.setattr(train_gpt, "orthogonalize", lambda u, dtype: u)
            patch.setattr(train_gpt, "optimizer", spy)
            state, _ = train_gpt.train_step(state, jnp.zeros((1, 1, 2), "int32"), SMALL, 0, odd)
        return state, {name: g.ravel()[0] for name, g in seen.items()}

    with unoptimized():
        on_one = jax.shard_map(one, mesh=make_mesh(1), in_specs=P(), out_specs=P(), check_vma=False)
        return jax.jit(on_one).lower(state_at(0)).compile()


@functools.cache
def state_at(step: int) -> train_gpt.State:
    """Where 100 times those gradients are held."""
    state = train_gpt.make_state(SMALL, make_mesh(1))
    held = {k: jnp.full_like(p, 100.0 * (1 + NAMES.index(k))) for k, p in state.held.items()}
    return jax.device_get(state._replace(step=jnp.int32(step), held=held))


def test_even_steps_leave_all_but_the_matrices_and_keep_their_gradients():
    before = state_at(12)
    after, _ = step_of_made_up_gradients(False)(before)
    for name, row in train_gpt.param_table(SMALL).items():
        same = np.array_equal(before.params[name], after.params[name])
        assert same == (row.optimizer != "muon"), name
    for name, g in after.held.items():  # not added to what an earlier step held
        assert np.all(np.asarray(g) == 1 + NAMES.index(name)), name
    jax.tree.map(np.testing.assert_array_equal, before.tables, after.tables)
    for rule, state in before.optimizer.inner_states.items():
        if rule != "muon":
            new = after.optimizer.inner_states[rule]
            jax.tree.map(np.testing.assert_array_equal, state, new)
    assert int(after.step) == 13


@pytest.mark.parametrize("step, tied", [(13, True), (15, False)])
def test_odd_steps_take_the_sum_of_two_gradients(step, tied):
    """And head and embedding the sum of theirs, until untie (13)."""
    before = state_at(step)
    after, given = step_of_made_up_gradients(True)(before)
    for name, g in given.items():
        held = 101 if name in before.held else 1
        mine = held * (1 + NAMES.index(name))
        twins = held * sum(1 + NAMES.index(twin) for twin in ("embed", "head"))
        assert g == (twins if tied and name in ("embed", "head") else mine), name
        assert not np.array_equal(before.params[name], after.params[name]), name
    for name, table in after.tables.items():
        np.testing.assert_array_equal(table, after.params[name].astype(SMALL.compute))


# ---- The table -----------------------------------------------------------------------------------
def test_every_parameter_is_in_exactly_one_group():
    rows, shapes = train_gpt.param_table(RECORD), train_gpt.state_shapes(RECORD, make_mesh(8))
    assert set(rows) == set(shapes.params)
    held = {name: [] for name in rows}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes.optimizer):
        names = [key.key for key in path if getattr(key, "key", None) in rows]
        for name in names:
            held[name].append(leaf)
        assert names or leaf.shape == ()  # the rest are counts
    for name, row in rows.items():
        state = held[name]
        assert len(state) == 2
        if row.optimizer == "muon":
            *_, R, C = row.stored_shape
            assert state.pop().shape == (*row.stored_shape[:2], *((R, 1) if R >= C else (1, C)))
        else:
            state.append(shapes.held[name])
        for leaf in (*state, shapes.params[name]):
            assert leaf.shape == row.stored_shape and leaf.sharding.spec == row.spec
            assert leaf.dtype == jnp.float32
    assert set(shapes.held) == {name for name, row in rows.items() if row.optimizer != "muon"}
    assert set(shapes.tables) == {name for name, row in rows.items() if row.spec == P("fsdp")}
    for leaf in shapes.tables.values():
        assert leaf.dtype == jnp.bfloat16 and leaf.sharding.is_fully_replicated


def test_the_table_has_the_numbers_of_the_record():
    """Of ladder 3.6: betas, rates and decay of Adam are multiples of 0.008 and 0.005."""
    rows, a, small = train_gpt.param_table(RECORD), 0.008, "adam 0.9 0.99"
    head, table, slow = ("adam 0.5 0.95", 1, 150), ("adam 0.75 0.95", 75, 5), "adam 0.9 0.95"
    expected = {
        "embed": head, "head": head, "bigram": table, **{f"values{i}": table for i in range(5)},
        "vo_lambdas": (small, 5, 0), "skip_lambdas": (small, 5, 0), "smear_lambda": (small, 5, 0),
        "attn_lambdas": (slow, (5, 1), 0), "mlp_lambdas": (slow, (5, 1), 0),
        "value_gates": (small, 1, 1), "smear_gate": (small, 0.01, 0),
        "gate_in": (small, 0.1, 1), "gate_scale": (small, 0.1, 0), "mudd_in": (small, 0.25, 1),
    }  # fmt: skip
    E = RECORD.E
    for name in rows:
        if name.startswith(("gate_", "mudd_")) and name not in expected:  # a bias does not decay
            expected[name] = (small, 0.1 if name[0] == "g" else 0.25, [*[1] * E, 0])
    assert set(expected) == set(rows) - {"qk", "vo", "mlp"}
    for name, (rule, lr, decay) in expected.items():
        assert rows[name].optimizer == rule, name
        np.testing.assert_allclose(rows[name].lr, a * np.array(lr), rtol=1e-6, err_msg=name)
        # p loses lr² 0.005 wd p, of which the step multiplies one lr
        multiple = 0.005 * a * np.array(lr) * np.array(decay)
        np.testing.assert_allclose(rows[name].decay, multiple, rtol=1e-6, err_msg=name)
    for name, lrs in dict(qk=[0.023] * 60, vo=[0.023] * 20, mlp=[0.046, 0.092] * 11).items():
        assert rows[name].optimizer == "muon" and rows[name].decay == pytest.approx(1.2 * 0.023)
        padding = [0] * (-len(lrs) % 8)
        np.testing.assert_allclose(rows[name].lr.ravel(), lrs + padding, rtol=1e-6)
        assert rows[name].shape == (
            len(lrs),
            *dict(qk=(256, 768), vo=(768, 768), mlp=(3072, 768))[name],
        )


def test_initial_weights_are_the_spec():
    c = dataclasses.replace(RECORD, D=64, H=2, F=256, vocab=2000, eot=1999, bigrams=256)
    params = train_gpt.unpad(train_gpt.initial_state(np.uint32(1), c).params, c)
    bound = 0.5 * (3 / c.D) ** 0.5
    uniform = [*params["qk"], *params["vo"], *params["mlp"][::2]]
    for w, edge in [(w, bound) for w in uniform] + [
        (params[n], 1 / 8) for n in ("gate_in", "mudd_in")
    ]:
        assert 0.98 * edge < np.abs(w).max() <= edge and abs(w.mean()) < 0.03 * edge
        assert w.std() == pytest.approx(edge / 3**0.5, rel=0.05)
    assert not params["mlp"][1::2].any() and not params["bigram"].any()
    for name, std in dict(head=0.005, **{f"values{i}": 0.01 for i in range(5)}).items():
        assert params[name].std() == pytest.approx(std, rel=0.02)
    np.testing.assert_array_equal(params["embed"], params["head"])
    first = dict(  # of ladder 3.1 and 3.4; those of a net are 0.1 times its biases
        vo_lambdas=[0.5, 1], attn_lambdas=[1.1**0.5, 1], mlp_lambdas=[1.1**0.5, 1],
        skip_lambdas=-1.5, value_gates=0, smear_gate=0, smear_lambda=0, gate_scale=0.1,
    )  # fmt: skip
    for name, value in first.items():
        np.testing.assert_allclose(params[name], np.broadcast_to(value, params[name].shape))
    said = dict(
        gate_start=0.05, gate_x0=0, gate_bigram=0.05, gate_skip=0.5, gate_xsa=0, gate_heads=0.25,
        gate_dc_from=1, gate_dc_to=0, mudd_v=0, mudd_x=0, mudd_values=2,
        mudd_attn=[1.1**0.5, 1, 0, 0.05], mudd_mlp=[1.1**0.5, 1], mudd_head=[0, -0.5, 0, 0, 0],
    )  # fmt: skip
    for name, value in said.items():
        bias = 0.1 * params[name][..., -1]
        assert not params[name][..., :-1].any()
        np.testing.assert_allclose(
            bias, np.broadcast_to(value, bias.shape), atol=1e-7, err_msg=name
        )
    drawn = {"qk", "vo", "mlp", "embed", "head", "bigram", "gate_in", "mudd_in"}
    assert set(params) == drawn | {*first, *said, *(f"values{i}" for i in range(5))}


def test_marked_keys_begin_as_queries_and_no_others_do():
    for heads in 4, 1:  # one matrix holds two heads, or a whole layer's
        c = dataclasses.replace(MINI, plan="S Lkq - Sq@0 L", H=heads)
        weights = train_gpt.unpad(train_gpt.initial_state(np.uint32(1), c).params, c)
        qk = [np.reshape(w.qk, (-1, c.D, c.D)) for w in train_gpt.deal(weights, c)]
        assert [i for i, w in enumerate(qk) if len(w) and np.array_equal(*w)] == [1, 3]
        assert len(np.unique(weights["qk"])) > 5.9 * c.D**2  # of 8: nothing else is a copy


def test_a_row_taken_out_does_not_reseed_the_others(monkeypatch):
    before, table = train_gpt.initial_state(np.uint32(1), MINI).params, train_gpt.param_table
    less = lambda c: {name: row for name, row in table(c).items() if name != "values0"}
    monkeypatch.setattr(train_gpt, "param_table", less)
    after = train_gpt.initial_state(np.uint32(1), MINI).params
    assert after.keys() == before.keys() - {"values0"}
    for name, array in after.items():
        np.testing.assert_array_equal(array, before[name])
    drawn = [
        np.asarray(after[name]).ravel()[:100] for name in ("head", "values1", "qk", "vo", "mlp")
    ]
    assert len({tuple(np.sign(numbers)) for numbers in drawn}) == 5  # and no two share their draw


# ---- The schedule --------------------------------------------------------------------------------
def check_moment(c, got: dict, s: int, stage: int, now: float) -> None:
    """Of step s, at that moment of the stages as they are written."""
    t = min(1, max(0, (now - c.flat) / (c.fallen - c.flat)))
    assert got["rate"][s] == pytest.approx(c.rows[stage].rate * (1 - t) + 0.15 * t)
    up = min(now / c.momentum_steps, 1)
    down = max(0, now - (sum(row.steps for row in c.rows) - c.momentum_fall)) / c.momentum_fall
    assert got["momentum"][s] == pytest.approx(0.85 + 0.1 * up - 0.1 * down)
    assert got["tied"][s] == (now <= c.untie)


def test_the_schedule_is_that_of_the_record():
    """Ladder 3.7, step by step; and 3.6 of the momentum."""
    got = train_gpt.schedule(RECORD)
    assert all(len(numbers) == 1285 for numbers in got.values())
    sizes, firsts = (423, 424, 423, 15), (0, 423, 847, 1270)
    assert [row.rate for row in RECORD.rows] == [1, 1.52, 1.73, 1.73, 1.73]
    assert (RECORD.flat, RECORD.fallen, RECORD.untie) == (508, 1270, 847)
    assert (RECORD.momentum_steps, RECORD.momentum_fall) == (300, 50)
    for s in range(1285):
        stage = RECORD.stage_at(s)
        assert stage == sum(s >= first for first in firsts[1:])
        check_moment(RECORD, got, s, stage, s)
        assert got["way"][s] == pytest.approx((s - firsts[stage]) / sizes[stage])
    assert got["rate"][1284] == pytest.approx(0.15) and got["momentum"][1284] < 0.853
    windows = [(row.S, row.L) for row in RECORD.rows]  # the last is that of the last validation
    blocks = (1, 3), (3, 7), (5, 11), (6, 13), (6, 20)
    assert windows == [(128 * short, 128 * long) for short, long in blocks]
    assert RECORD.stage_at(1285) == 4
    assert (
        sum(B * T for B, T, _ in RECORD.fills("train"))
        == 423 * 131072 + 424 * 262144 + 438 * 393216
    )


@pytest.mark.parametrize("c", [RECORD, TINY, MINI], ids=["record", "tiny", "mini"])
@pytest.mark.parametrize("share", [0.05, 0.5, 3])
def test_the_schedule_of_another_length_is_the_same_one_stretched(c, share):
    written = [row.steps for row in c.rows]
    other = dataclasses.replace(c, steps=max(int(share * sum(written)), 4))
    got, stages = train_gpt.schedule(other), [other.stage_at(s) for s in range(other.steps)]
    assert [*dict.fromkeys(stages)] == [i for i, steps in enumerate(written) if steps]
    assert stages == sorted(stages) and other.stage_at(other.steps) == len(c.rows) - 1
    for s, stage in enumerate(stages):
        size, first = stages.count(stage), stages.index(stage)
        assert abs(size - written[stage] * other.steps / sum(written)) < len(written)
        assert got["way"][s] == pytest.approx((s - first) / size)
        check_moment(c, got, s, stage, sum(written[:stage]) + got["way"][s] * written[stage])
