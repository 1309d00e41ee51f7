"""Newton-Schulz, Muon, the routing of parameters to rules and rates, the schedules."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

import train_gpt
from tests.tools import MINI, MINI32, make_mesh, place_on, sequences

SCALARS = dict(skip_weights=1.0, resid_lambdas=1.0, x0_lambdas=0.0, v_lambdas=0.5, ve_lambdas=0.5)
SHAPES = dict(square=(64, 64), wide=(32, 128), tall=(128, 32))


def matrix(shape, rank=None, seed=0):
    rng = np.random.default_rng(seed)
    G = rng.normal(size=shape)
    if rank:
        G = rng.normal(size=(shape[0], rank)) @ rng.normal(size=(rank, shape[1]))
    return G.astype(np.float32)


def quintic(s):
    """What five steps make of singular values: the polynomial of the record, in float64."""
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return s


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("rank", [None, 5])
def test_newton_schulz_applies_its_polynomial_to_the_singular_values(shape, rank):
    G = matrix(shape, rank)
    U, s, Vt = np.linalg.svd(G.astype(np.float64), full_matrices=False)
    expected = U * quintic(s / np.linalg.norm(s)) @ Vt
    got = np.asarray(train_gpt.orthogonalize(G[None], "float32")[0])
    np.testing.assert_allclose(got, expected, atol=2e-4)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_newton_schulz_in_bfloat16_brings_singular_values_near_one(shape):
    G = matrix(shape)
    got = np.asarray(train_gpt.orthogonalize(G[None], "bfloat16")[0])
    s = np.linalg.svd(got, compute_uv=False)
    assert 0.5 < s.min() and s.max() < 1.25
    U, _, Vt = np.linalg.svd(G, full_matrices=False)
    assert np.trace(U.T @ got @ Vt.T) > 0.97 * s.sum()  # and the directions are G's own


def test_newton_schulz_of_nothing_is_nothing_and_of_a_batch_is_of_each():
    batch = np.stack(
        [matrix((16, 48), seed=i) for i in range(3)] + [np.zeros((16, 48), np.float32)]
    )
    for dtype in ("float32", "bfloat16"):
        got = np.asarray(train_gpt.orthogonalize(batch.reshape(2, 2, 16, 48), dtype))
        assert not got[1, 1].any()
        one = np.asarray(train_gpt.orthogonalize(batch[1:2], dtype)[0])
        np.testing.assert_allclose(got[0, 1], one, atol=1e-2 if dtype == "bfloat16" else 1e-5)


def test_muon_is_optax_muon_where_both_define_the_same():
    """optax corrects the bias of the momentum, which fades with the steps (and so does the memory
    of our momentum's warm-up); after 400 the two are the same function of the same gradients."""
    c = dataclasses.replace(MINI32, momentum_steps=0)
    ours = train_gpt.scale_by_muon(c)
    theirs = optax.contrib.scale_by_muon(
        beta=0.95, eps=1e-7, weight_dimension_numbers={"w": optax.contrib.MuonDimensionNumbers()}
    )
    grads = jax.random.normal(jax.random.key(0), (400, 16, 8))

    def step(both, g):
        mine, a = ours.update({"w": g[None, None]}, both[0])
        his, b = theirs.update({"w": g}, both[1])
        return (a, b), (mine["w"][0, 0], his["w"])

    state = (ours.init({"w": grads[:1, None]}), theirs.init({"w": grads[0]}))
    _, (mine, his) = jax.lax.scan(step, state, grads)
    np.testing.assert_allclose(mine[-5:], his[-5:], atol=2e-4)
    assert np.abs(np.asarray(mine[-1] - mine[-2])).max() > 0.01  # it is not all one direction


def test_momentum_is_the_spec():
    """B += (1 - mu)(G - B), then G + mu (B - G), with mu from 0.85 to 0.95 over 300 steps."""
    seen = []
    rule = train_gpt.scale_by_muon(dataclasses.replace(MINI32, momentum_steps=300))
    rng = np.random.default_rng(1)
    state, B = rule.init({"w": jnp.zeros((1, 1, 2, 3))}), np.zeros((2, 3))
    for step in (0, 1, 2, 150, 299, 300, 1000):
        state, G = (jnp.int32(step), state[1]), rng.normal(size=(2, 3)).astype(np.float32)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_gpt, "orthogonalize", lambda u, dtype: seen.append(u) or u)
            _, state = rule.update({"w": jnp.asarray(G)[None, None]}, state)
        mu = 0.85 + 0.10 * min(step / 300, 1)
        B = B + (1 - mu) * (G - B)
        np.testing.assert_allclose(seen[-1][0, 0], G + mu * (B - G), atol=1e-6)


@pytest.mark.parametrize("steps, cooldown", [(1770, 0.4), (20, 0.4), (33, 0.7), (7, 1.0)])
def test_schedule_is_the_spec(steps, cooldown):
    """Full rate until 1 - cooldown of the run, then linearly to a tenth, as a torch LambdaLR."""
    c = dataclasses.replace(MINI32, steps=steps, cooldown=cooldown)
    rule, params = train_gpt.optimizer(c), {"v_lambdas": jnp.zeros(4)}
    rows = {k: row for k, row in train_gpt.param_table(c).items() if k in params}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt, "param_table", lambda c: rows)
        rule = train_gpt.optimizer(c)
    update = jax.jit(rule.update)
    state = rule.init(params)
    for s in range(steps):
        updates, state = update({"v_lambdas": jnp.ones(4)}, state)  # Adam of a constant: the rate
        u = (1 - s / steps) / cooldown
        expected = c.scalar_lr * (1.0 if u >= 1 else u + 0.1 * (1 - u))
        np.testing.assert_allclose(updates["v_lambdas"], -expected, rtol=1e-4)


def test_every_parameter_is_in_exactly_one_group():
    c = train_gpt.Config()
    rows, shapes = train_gpt.param_table(c), train_gpt.state_shapes(c, make_mesh(8))
    assert set(rows) == set(shapes.params)
    held = {name: [] for name in rows}
    for path, leaf in jax.tree_util.tree_leaves_with_path(shapes.optimizer):
        names = [key.key for key in path if getattr(key, "key", None) in rows]
        for name in names:
            held[name].append(leaf)
        assert names or leaf.shape == ()  # the rest are counts
    for name, row in rows.items():
        slots = dict(adam=2, muon=1)[row.optimizer]
        assert len(held[name]) == slots
        for leaf in (*held[name], shapes.params[name]):
            assert leaf.shape == row.stored_shape and leaf.sharding.spec == row.spec
            assert leaf.dtype == jnp.float32


def test_the_table_has_the_numbers_of_the_record():
    rows, m = train_gpt.param_table(train_gpt.Config()), np.float32(0.05)
    assert sum(int(np.prod(row.shape)) for row in rows.values()) == 275_598_383
    attn, mlp = rows["attn"].lr.reshape(-1), rows["mlp"].lr.reshape(-1)
    np.testing.assert_array_equal(attn, [m] * 44 + [0] * 4)
    np.testing.assert_allclose(mlp, [0.10, 0.05] * 12, rtol=1e-6)
    rates = dict(embed=0.6, values=0.6, head=0.008) | dict.fromkeys(SCALARS, 0.04)
    assert {name: row.lr for name, row in rows.items() if row.optimizer == "adam"} == rates


def test_initial_weights_are_the_spec():
    c = dataclasses.replace(MINI, D=64, F=256)
    params = train_gpt.unpad(train_gpt.initial_state(np.uint32(1), c).params, c)
    bound = 0.5 * (3 / c.D) ** 0.5
    for name, zero, drawn in (("attn", (3,), (0, 1, 2)), ("mlp", (1,), (0,))):
        each = len(zero) + len(drawn)
        for i, w in enumerate(params[name]):
            if i % each in zero:
                assert not w.any()
            else:
                assert 0.98 * bound < np.abs(w).max() <= bound and abs(w.mean()) < 0.02 * bound
                assert w.std() == pytest.approx(bound / 3**0.5, rel=0.05)
    for name in ("embed", "values"):
        assert params[name].std() == pytest.approx(1, rel=0.02)
    assert not params["head"].any()
    for name, value in SCALARS.items():
        np.testing.assert_array_equal(params[name], np.broadcast_to(value, params[name].shape))


def test_after_three_steps_all_of_the_model_has_moved_and_none_of_its_padding():
    mesh = make_mesh(4)
    before = train_gpt.make_state(MINI, mesh)
    start = {name: np.asarray(p) for name, p in before.params.items()}
    step = train_gpt.compile_stage("train", 48, MINI, mesh)
    state = before
    for i in range(3):
        state, _ = step(state, place_on(mesh, sequences(MINI, MINI.T, seed=i)))
    for name, row in train_gpt.param_table(MINI).items():
        moved = np.asarray(state.params[name]) != start[name]
        lead = len(row.stored_shape) - len(row.shape) + 1
        moved = moved.reshape(-1, *row.stored_shape[lead:])
        real = np.zeros(moved.shape, bool)
        real[tuple(map(slice, row.shape))] = True
        assert not (moved & ~real).any(), f"padding of {name}"
        if row.optimizer == "muon":
            assert moved[: row.shape[0]].any(axis=(1, 2)).all(), name
        else:
            assert moved[real].mean() > 0.9 if name not in ("embed", "values") else moved.any(), (
                name
            )


def test_a_row_taken_out_does_not_reseed_the_others(monkeypatch):
    before, table = train_gpt.initial_state(np.uint32(1), MINI).params, train_gpt.param_table
    less = lambda c: {name: row for name, row in table(c).items() if name != "values"}
    monkeypatch.setattr(train_gpt, "param_table", less)
    after = train_gpt.initial_state(np.uint32(1), MINI).params
    assert after.keys() == before.keys() - {"values"}
    for name, array in after.items():
        np.testing.assert_array_equal(array, before[name])
    drawn = [np.asarray(after[name]).ravel()[:100] for name in ("embed", "attn", "mlp")]
    assert len({tuple(np.sign(numbers)) for numbers in drawn}) == 3  # and no two share their draw


def test_muon_is_refused_for_a_row_that_is_split_within_its_matrices(monkeypatch, capsys):
    """Eight devices would orthogonalize eight parts, and train something else in silence."""
    rows = train_gpt.param_table(MINI)
    rows["head"] = rows["head"]._replace(optimizer="muon")
    monkeypatch.setattr(train_gpt, "param_table", lambda c: rows)
    with pytest.raises(SystemExit):
        train_gpt.optimizer(MINI)
    assert "['head'] are no banks" in capsys.readouterr().err
