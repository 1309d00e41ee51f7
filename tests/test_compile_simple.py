"""compile_simple.py: 124m is upstream's benchmark, and what the tool lowers is what a chip runs."""

import math

import compile_simple
import pytest


@pytest.fixture(scope="module")
def simple():
    """train_gpt_simple.py with Muon."""
    return compile_simple.load("muon")


def test_124m_is_upstreams_model_batch_and_validation(simple):
    size = simple.SIZES["124m"]
    assert (size.goal, size.T, size.batch * size.T) == (3.28, 1024, 524_288)
    assert size.val_tokens == 10_485_760 == 20 * 524_288
    matrices = 12 * 768**2  # of a block: q, k, v, proj, and an MLP of 8
    biases = 4 * 768 + 3072 + 768
    block = matrices + biases + 2 * 768  # and gains
    embedding = head = 50_304 * 768
    parameters = embedding + head + 50_304 + 768 + 768 + 12 * block
    shapes = simple.parameter_shapes(size)
    assert sum(map(math.prod, shapes.values())) == parameters == 162_354_816
    assert parameters - head - 50_304 == 123_671_040  # what gives the model its name


def test_a_missing_compiler_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(compile_simple.compile_8xh100, "cudnn_version", lambda: None)
    with pytest.raises(SystemExit):
        compile_simple.main(["muon", "--chip", "h100-8"])
    assert compile_simple.compile_8xh100.MISSING in capsys.readouterr().err
