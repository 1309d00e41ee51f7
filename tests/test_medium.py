"""The preset medium: its numbers are those of modded-nanogpt's second track."""

import math

import pytest

import train_gpt

MEDIUM = train_gpt.PRESETS["medium"]
BLOCK = 128  # upstream counts windows in blocks of so many positions


def test_steps_tokens_and_windows_are_those_of_record_18():
    """Twelve equal parts of 4,700 steps, of which the last four have one length of windows, and 40
    steps more."""
    ends = [math.ceil(k * 4700 / 12) for k in range(1, 9)]
    assert MEDIUM.stage_ends.tolist() == [*ends, 4740, 4740]
    trained = [stage for stage in MEDIUM.stages if stage.steps]
    assert [stage.tokens for stage in trained] == [131072, 262144, 393216] + [524288] * 6
    assert sum(stage.steps * stage.tokens for stage in trained) == 2_176_974_848
    blocks = [stage.long // BLOCK for stage in MEDIUM.stages]
    assert blocks == [3, 7, 11, 13, 15, 17, 19, 21, 23, 27]
    shorts = [min(23, n) // 2 for n in blocks]
    assert [stage.short // BLOCK for stage in MEDIUM.stages] == shorts
    assert {stage.max_doc for stage in MEDIUM.stages} == {4096}
    targets = [[*train_gpt.target_weights(stage)] for stage in trained]
    assert targets == [[1, 2, 3], [1, 2]] + [[1]] * 7


def test_rates_and_momentum_are_those_of_record_18():
    rows = train_gpt.schedule(MEDIUM)
    plateau = {0: 1.0, 391: 1.0, 392: 1.52, 784: 1.73, 1175: 2.0, 1409: 2.0}
    for step, factor in plateau.items():
        assert rows[step].muon_lr == pytest.approx(0.015 * factor)
        assert rows[step].adam_lr == pytest.approx(0.004 * factor)
    halfway = 1410 + 3290 // 2
    assert rows[halfway].muon_lr == pytest.approx(0.015 * (2.0 + 0.1) / 2)
    assert rows[4700].muon_lr == rows[4739].muon_lr == pytest.approx(0.015 * 0.1)
    momentum = {0: 0.85, 150: 0.9, 300: 0.95, 4690: 0.95, 4715: 0.9}
    assert {step: rows[step].momentum for step in momentum} == pytest.approx(momentum)
    assert [step for step, row in enumerate(rows) if row.tied][-1] == 785
