"""compile_tpu.py: a step has the record's tokens, and the script names what is missing."""

import compile_tpu
import pytest


@pytest.mark.parametrize("chip", compile_tpu.CHIPS)
def test_a_step_has_the_tokens_of_the_record(chip):
    _, microbatch = compile_tpu.CHIPS[chip]
    c = compile_tpu.tpu_config(microbatch)
    assert (c.stages[0].tokens, c.sequence_length(0)) == (393_216, 2048)
    assert c.batch // 8 % microbatch == 0


def test_without_a_compiler_the_script_names_it(monkeypatch, capsys):
    monkeypatch.setattr(compile_tpu, "distributions", lambda name: [])
    assert compile_tpu.main() == 2 and compile_tpu.MISSING in capsys.readouterr().err
