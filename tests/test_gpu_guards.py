"""What a GPU run refuses before it starts, and what it says when memory is short."""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import train_gpt
from tests.tools import MINI

C = dataclasses.replace(MINI, D=64, H=2)
real = jax.nn.dot_product_attention


# ---- The attention kernel, checked at the start of a run on GPUs ---------------------------------
def test_the_kernel_of_this_machine_passes():
    errors = train_gpt.check_attention(C)
    assert list(errors) == ["y", "dq", "dk", "dv"]
    assert 0 < min(errors.values()) and max(errors.values()) < 0.005


def no_window(q, k, v, **options):
    return real(q, k, v, **options | {"local_window_size": None})


def window_off_by_one(q, k, v, **options):
    left, right = options["local_window_size"]
    return real(q, k, v, **options | {"local_window_size": (left - 1, right)})


def sees_the_future(q, k, v, **options):
    left, _ = options["local_window_size"]
    return real(q, k, v, **options | {"is_causal": False, "local_window_size": (left, 1)})


def no_documents(q, k, v, **options):
    return real(q.at[..., -4:].set(0), k, v, **options)


def other_scale(q, k, v, **options):
    return real(q, k, v, **options | {"scale": 0.125})


def wrong_gradient(which):
    """A kernel right forward, and off by 3 % in one gradient: as a fault of a backward kernel."""

    def attend(q, k, v, **options):
        @jax.custom_vjp
        def inner(q, k, v):
            return real(q, k, v, **options)

        def backward(pull, g):
            return [1.03 * d if i == which else d for i, d in enumerate(pull(g))]

        inner.defvjp(lambda *qkv: jax.vjp(lambda *a: real(*a, **options), *qkv), backward)
        return inner(q, k, v)

    return attend


def not_a_number(q, k, v, **options):
    return real(q, k, v, **options).at[0, 300].set(jnp.nan)


FAULTS = dict(
    no_window=no_window, window_off_by_one=window_off_by_one, sees_the_future=sees_the_future,
    no_documents=no_documents, other_scale=other_scale, not_a_number=not_a_number,
    wrong_dq=wrong_gradient(0), wrong_dk=wrong_gradient(1), wrong_dv=wrong_gradient(2),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_refused(fault, monkeypatch, capsys):
    monkeypatch.setattr(jax.nn, "dot_product_attention", FAULTS[fault])
    with pytest.raises(SystemExit) as stopped:
        train_gpt.check_attention(C)
    said = capsys.readouterr().err
    assert stopped.value.code == 2
    assert re.fullmatch(r"train_gpt\.py: attention by xla is wrong on this machine.*\n", said)


# ---- A run ---------------------------------------------------------------------------------------
@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A run whose compiling and training are replaced; returns (exit code, stderr, log)."""

    def start(prepare, train=lambda *_: pytest.fail("trained"), kernel="xla", argv=()):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(train_gpt, "check_data", lambda *_: [])
        monkeypatch.setattr(train_gpt, "prepare", prepare)
        monkeypatch.setattr(train_gpt, "train", train)
        one = jax.devices()[:1]
        fit = lambda preset, c: (one, dataclasses.replace(c, attention=kernel))  # noqa: E731
        monkeypatch.setattr(train_gpt, "fit_devices", fit)
        with pytest.raises(SystemExit) as stopped:
            train_gpt.main(["tiny", "--seed", "1", *argv])
        (log,) = (tmp_path / "logs").glob("*.txt")
        tail = log.read_text().split("=" * 100 + "\n")[-1]
        return SimpleNamespace(code=stopped.value.code, err=capsys.readouterr().err, log=tail)

    return start


def stop(*_):
    raise SystemExit(7)


def test_the_check_is_made_and_logged_where_the_kernel_is_cudnn(run, monkeypatch):
    errors = dict(y=0.001, dq=0.002, dk=0.002, dv=0.002)
    monkeypatch.setattr(train_gpt, "check_attention", lambda c: errors)
    done = run(stop, kernel="cudnn")
    assert done.code == 7
    assert 'attention {"y": 0.001, "dq": 0.002, "dk": 0.002, "dv": 0.002}' in done.log.splitlines()


def test_no_check_is_made_elsewhere(run, monkeypatch):
    monkeypatch.setattr(train_gpt, "check_attention", lambda c: pytest.fail("checked"))
    assert run(stop, kernel="xla").code == 7


OUT = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 21474836480 bytes.\nmore"


def out_of_memory(*_):
    raise jax.errors.JaxRuntimeError(OUT)


@pytest.mark.parametrize("phase", ["compiling", "training"])
def test_too_little_memory_names_a_knob_and_a_value(run, phase):
    phases = (out_of_memory,) if phase == "compiling" else (lambda *_: {}, out_of_memory)
    done = run(*phases)
    assert done.code == 2
    assert done.err == "train_gpt.py: not enough memory on cpu: try --in_flight 4\n"
    assert done.log.splitlines()[-1] == f"OUT OF MEMORY: {OUT.splitlines()[0]}"
    assert "RESULT" not in done.log


def test_other_errors_of_the_runtime_stay_what_they_are(run):
    def other(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: no luck")

    with pytest.raises(jax.errors.JaxRuntimeError, match="no luck"):
        run(other)


def advice(c: train_gpt.Config) -> list[str]:
    """What is tried by someone who does as told until nothing is left to say."""
    tried = []
    while c.T > 1024:
        words = train_gpt.smaller(c).split()
        tried.append(" ".join(words))
        flags = {name[2:]: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
        c = dataclasses.replace(c, **flags)
        assert list(train_gpt.faults(c)) == []
        assert c.T * c.sequences == 8 * 49152  # the same tokens in a step
    return tried


def test_advice_for_the_record_is_accepted_and_keeps_the_step():
    assert advice(train_gpt.Config())[:3] == [
        "--head_chunk 2048", "--T 24576 --sequences 16", "--T 12288 --sequences 32",
    ]  # fmt: skip


def test_advice_halves_the_sequences_in_flight_first():
    c = dataclasses.replace(
        train_gpt.Config(), T=2048, sequences=192, in_flight=24, head_chunk=2048
    )
    assert advice(c)[:4] == [f"--in_flight {n}" for n in (12, 6, 3, 1)]


def test_a_gpu_may_use_most_of_its_memory(run, monkeypatch):
    import os

    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    run(stop)
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
