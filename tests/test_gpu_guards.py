"""What a GPU run refuses before it starts, and what it says when memory is short."""

import dataclasses
import os
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

import train_gpt
from tests.tools import MINI

C = dataclasses.replace(train_gpt.Config(), attention="xla", seed=1)  # the record's own heads
real = jax.nn.dot_product_attention


class Facts:
    """Where a log would write."""

    def __init__(self):
        self.told = {}

    def facts(self, **facts):
        self.told |= facts


# ---- The attention kernel, checked at the start of a run on GPUs ---------------------------------
@pytest.mark.parametrize("c", [C, dataclasses.replace(MINI, D=64)], ids=["record", "small"])
def test_the_kernel_of_this_machine_passes_with_a_margin(c):
    log = Facts()
    train_gpt.check_attention(c, log)
    errors = log.told["attention"]
    assert list(errors) == ["y", "dq", "dk", "dv"]
    assert 0 < min(errors.values()) and max(errors.values()) < 0.03


def no_window(q, k, v, **options):
    return real(q, k, v, **options | {"local_window_size": None})


def window_off_by(n):
    def attend(q, k, v, **options):
        left, right = options["local_window_size"]
        return real(q, k, v, **options | {"local_window_size": (left + n, right)})

    return attend


def sees_the_future(q, k, v, **options):
    left, _ = options["local_window_size"]
    return real(q, k, v, **options | {"is_causal": False, "local_window_size": (left, 1)})


def no_documents(q, k, v, **options):
    return real(q.at[..., -4:].set(0), k, v, **options)


def other_scale(q, k, v, **options):
    return real(q, k, v, **options | {"scale": 0.125})


def wrong_gradient(which):
    """A kernel right forward, and off by 5 % in one gradient: as a fault of a backward kernel."""

    def attend(q, k, v, **options):
        @jax.custom_vjp
        def inner(q, k, v):
            return real(q, k, v, **options)

        def backward(pull, g):
            return [1.05 * d if i == which else d for i, d in enumerate(pull(g))]

        inner.defvjp(lambda *qkv: jax.vjp(lambda *a: real(*a, **options), *qkv), backward)
        return inner(q, k, v)

    return attend


def one_wrong_token(q, k, v, **options):
    y = real(q, k, v, **options)
    return y.at[0, 300, 1].set(y[0, 299, 1])


def not_a_number(q, k, v, **options):
    y = real(q, k, v, **options)  # its gradient is right
    return y + jax.lax.stop_gradient(jnp.zeros_like(y).at[0, 300].set(jnp.nan))


FAULTS = dict(
    no_window=no_window, one_key_less=window_off_by(-1), one_key_more=window_off_by(1),
    sees_the_future=sees_the_future, one_wrong_token=one_wrong_token,
    no_documents=no_documents, other_scale=other_scale, not_a_number=not_a_number,
    wrong_dq=wrong_gradient(0), wrong_dk=wrong_gradient(1), wrong_dv=wrong_gradient(2),
)  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_refused(fault, monkeypatch, capsys):
    monkeypatch.setattr(jax.nn, "dot_product_attention", FAULTS[fault])
    log = Facts()
    with pytest.raises(SystemExit) as stopped:
        train_gpt.check_attention(C, log)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and log.told["attention"].keys() == {"y", "dq", "dk", "dv"}
    assert re.fullmatch(r"train_gpt\.py: attention by xla is wrong on this machine.*\n", said)


# ---- A run ---------------------------------------------------------------------------------------
@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """A run whose compiling and training are replaced; returns (exit code, stderr, log)."""

    def start(prepare, train=lambda *_: pytest.fail("trained"), kernel="xla", argv=()):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(train_gpt, "find_data", lambda *_: [])
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
    monkeypatch.setattr(train_gpt, "attention_errors", lambda c: errors)
    done = run(stop, kernel="cudnn")
    assert done.code == 7
    assert 'attention {"y": 0.001, "dq": 0.002, "dk": 0.002, "dv": 0.002}' in done.log.splitlines()


def test_a_refused_kernel_leaves_its_errors_in_the_log(run, monkeypatch):
    errors = dict(y=0.3, dq=0.002, dk=0.002, dv=0.002)
    monkeypatch.setattr(train_gpt, "attention_errors", lambda c: errors)
    done = run(lambda *_: pytest.fail("compiled"), kernel="cudnn")
    assert done.code == 2 and 'attention {"y": 0.3, ' in done.log


def test_no_check_is_made_elsewhere(run, monkeypatch):
    monkeypatch.setattr(train_gpt, "check_attention", lambda *_: pytest.fail("checked"))
    assert run(stop, kernel="xla").code == 7


OUT = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 21474836480 bytes.\nmore"


def out_of_memory(*_):
    raise jax.errors.JaxRuntimeError(OUT)


def test_a_library_without_memory_says_it_in_its_own_words(run):
    def cudnn(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: CUDNN_STATUS_ALLOC_FAILED in ...")

    assert "not enough memory" in run(cudnn).err


@pytest.mark.parametrize("phase", ["compiling", "training"])
def test_too_little_memory_names_a_knob_and_a_value(run, phase):
    phases = (out_of_memory,) if phase == "compiling" else (lambda *_: {}, out_of_memory)
    done = run(*phases)
    assert done.code == 2
    assert done.err == "train_gpt.py: not enough memory on cpu: add --in_flight 4 to what you ran\n"
    assert done.log.splitlines()[-1] == f"OUT OF MEMORY: {OUT.splitlines()[0]}"
    assert "RESULT" not in done.log


def test_other_errors_of_the_runtime_stay_what_they_are(run):
    def other(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: no luck")

    with pytest.raises(jax.errors.JaxRuntimeError, match="no luck"):
        run(other)


def advice(c: train_gpt.Config, devices: int = 1) -> list[str]:
    """What is tried by someone who does as told until there is nothing left to say."""
    tried = []
    while (told := train_gpt.smaller(c, devices)) != "more devices":
        tried.append(told)
        words, rows = told.split(), c.sequences // devices
        flags = {name[2:]: int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
        less = dataclasses.replace(c, **flags)
        assert list(train_gpt.faults(less)) == []
        assert less.T * less.sequences == c.T * c.sequences  # the same tokens in a step
        before = (train_gpt.at_once(c.in_flight, rows) * c.T, c.head_chunk)
        after = (
            train_gpt.at_once(less.in_flight, less.sequences // devices) * less.T,
            less.head_chunk,
        )
        assert all(a <= b for a, b in zip(after, before, strict=True)) and after != before
        c = less
    return tried


@pytest.mark.parametrize("devices", [1, 8])
def test_advice_for_the_record_ends_where_validation_takes_more(devices):
    assert advice(train_gpt.Config(), devices) == [
        "--head_chunk 2048", "--T 24576 --sequences 16", "--T 12288 --sequences 32",
        "--T 6144 --sequences 64",
    ]  # fmt: skip


@pytest.mark.parametrize("devices, first", [
    (1, ["--in_flight 12", "--in_flight 6", "--in_flight 3", "--in_flight 1", "--T 1024"]),
    (8, ["--in_flight 12", "--in_flight 6", "--in_flight 3", "--in_flight 1", "--T 1024"]),
])  # fmt: skip
def test_advice_halves_the_sequences_in_flight_first(devices, first):
    c = dataclasses.replace(
        train_gpt.Config(), T=2048, val_T=2048, sequences=192, in_flight=24, head_chunk=2048
    )
    told = advice(c, devices)
    assert [a == b[: len(a)] for a, b in zip(first, told, strict=False)] == [True] * 5


def test_advice_does_not_lower_what_changes_nothing():
    """On 8 devices each of the 8 sequences has a device of its own."""
    assert (
        train_gpt.smaller(dataclasses.replace(train_gpt.Config(), in_flight=8), 8)
        == "--head_chunk 2048"
    )
    c = dataclasses.replace(train_gpt.Config(), in_flight=8, sequences=24)
    assert train_gpt.smaller(c, 8) == "--in_flight 1"  # 3 sequences each, so 3 or 1 at once


@pytest.mark.parametrize("most, rows, expected", [
    (1, 8, 1), (8, 1, 1), (8, 3, 3), (2, 3, 1), (8, 6, 6), (5, 6, 3), (100, 24, 24), (16, 24, 12),
])  # fmt: skip
def test_turns_are_equal(most, rows, expected):
    assert train_gpt.at_once(most, rows) == expected


NAMES = "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize("users", [{}, {NAMES[0]: "0.5"}, {NAMES[1]: "0.5"}])
def test_a_gpu_may_use_most_of_its_memory_unless_the_user_says_otherwise(run, monkeypatch, users):
    others = {name: value for name, value in os.environ.items() if name not in NAMES}
    monkeypatch.setattr(os, "environ", {**others, **users})
    run(stop)
    found = {name: os.environ[name] for name in NAMES if name in os.environ}
    assert found == (users or {NAMES[1]: "0.92"})
