"""The shelf: what every patch of records/ideas/ must be, and how ./run.sh idea makes copies."""

import ast
import dataclasses
import functools
import importlib.util
import itertools
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import idea
import jax
import numpy as np
import pytest
from fake_machine import ROOT, Machine
from jax.sharding import NamedSharding, PartitionSpec
from messages import Fault

import train_gpt
from tests.test_style import hard_to_read
from tests.tools import FLOAT32, make_mesh, place_on, sequences

PATCHES = idea.shelf()
README = (idea.SHELF / "README.md").read_text(encoding="utf-8")
MOST_LINES = 80  # added and removed
MOST_LINES_OF_KERNELS = 300
COLUMNS = 6  # of the table


# ---- The patches ---------------------------------------------------------------------------------
@functools.cache
def changed(name: str) -> bytes:
    """train_gpt.py with one patch."""
    return idea.apply(idea.TRAINER.read_bytes(), [PATCHES[name]])


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    """A function that imports train_gpt.py with a patch."""

    @functools.cache
    def load(name: str) -> ModuleType:
        path = tmp_path_factory.mktemp(name) / "train_gpt.py"
        path.write_bytes(changed(name))
        spec = importlib.util.spec_from_file_location(f"with_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_applies_is_short_and_says_what_it_is(name):
    ast.parse(changed(name))
    text = PATCHES[name].read_text(encoding="utf-8")
    lines = re.findall(r"^[+-](?!\+\+ |-- ).*", text, re.M)
    most = MOST_LINES_OF_KERNELS if idea.base_of(PATCHES[name]) else MOST_LINES
    assert len(lines) <= most, f"{name} changes {len(lines)} lines"
    assert max(map(len, lines)) <= 101, f"{name} has a line of more than 100 columns"
    comment = idea.description(PATCHES[name])
    assert 1 <= len(comment) <= 3 and comment[0], f"{name} has {len(comment)} lines of comment"
    assert name not in train_gpt.PRESETS and name.isidentifier()


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_leaves_the_file_easy_to_read(name, tmp_path):
    path = tmp_path / "train_gpt.py"
    path.write_bytes(changed(name))
    assert hard_to_read(path.read_text(encoding="utf-8")) == []
    settings = ["--no-cache", "--config", ROOT / "pyproject.toml", path]
    for command in (["check", *settings], ["format", "--diff", *settings]):
        done = subprocess.run([sys.executable, "-m", "ruff", *command], capture_output=True)
        assert not done.returncode, f"{name}: {done.stdout.decode()}"


def table_rows(title: str) -> dict[str, list[str]]:
    """The cells of the README's table below a title, by the first one."""
    _, _, section = README.partition(f"\n## {title}\n")
    rows = {}
    for line in section.partition("\n## ")[0].splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split(" | ")]
            rows[cells[0].split("`")[1]] = cells
    return rows


def test_every_patch_has_a_row_with_all_columns():
    rows = table_rows("The shelf")
    assert rows.keys() == PATCHES.keys()
    for name, cells in rows.items():
        assert len(cells) == COLUMNS and all(cells), f"{name}: {cells}"


def pairs_that_conflict() -> list[tuple[str, str]]:
    """The pairs of patches, in the order of the alphabet, of which only one can be applied."""
    conflicts = []
    base = idea.TRAINER.read_bytes()
    for first, second in itertools.combinations(PATCHES, 2):
        both = idea.merge(changed(first), base, changed(second))
        if both is None:
            conflicts.append((first, second))
        else:
            ast.parse(both)
    return conflicts


def test_the_page_states_which_pairs_combine():
    _, _, section = README.partition("\n## What combines\n")
    stated = re.findall(r"^- `(\w+)` and `(\w+)`", section.partition("\n## ")[0], re.M)
    assert sorted(stated) == sorted(pairs_that_conflict())


def functions(source: bytes) -> dict[str, str]:
    """The text of every function at the top level, by name."""
    text = source.decode()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = ast.get_source_segment(text, node)
    return found


def test_the_patch_of_record_92_has_the_kernels_of_the_attempts():
    folder = ROOT / "records/upstream92"
    frozen = (folder / "train_gpt.py").read_bytes()
    with_kernels = functions(idea.apply(frozen, [folder / "kernels.patch"], "the frozen file"))
    attempts = [PATCHES[name] for name in ("fused_mlp", "fused_head", "fused_qkv")]
    ours = functions(idea.apply(idea.TRAINER.read_bytes(), attempts))
    new = with_kernels.keys() - functions(frozen).keys()
    # Record 92 has no pointer, which these know of.
    differ = {name for name in new if with_kernels[name] != ours[name]}
    assert differ == {"gradient_of_logits", "sum_of_exp"} and "multiply_tiles" in new


# ---- What a patch computes -----------------------------------------------------------------------
LAYERS = (
    "(Layer(SHORT, paired_heads=True, value_table=0),"
    " Layer(LONG, key_offset=True, head_gate=True, bigram=True, attend_to=0, new_gates=True))"
)
STAGES = "(Stage(3, 512, short=8, long=24, max_doc=0, lr=1.0, targets=(1.0, (0.5, 0.0))),)"
SMALL = FLOAT32 | dict(D=32, H=2, F=64, R=8, vocab=257, eot=256, bigrams=512, batch=8)
SMALL |= dict(microbatch=8, head_chunk=32, dc_window=12, val_T=64, val_tokens=512, prefixes="")
SMALL |= dict(ngram_capacity=1.0, attention="band", seed=5, adam_every=1)


def small(module: ModuleType, **changes):
    """A module's preset record, small and in float32. The layers are a patch's, if it has others
    than the record."""
    layers = eval(LAYERS, vars(module))
    mudd_head = (("input", 0.0), ("layer0", -0.5))
    if repr(module.RECORD_LAYERS) != repr(train_gpt.RECORD_LAYERS):
        layers = module.RECORD_LAYERS
        mudd_head = module.PRESETS["record"].mudd_head
    own = dict(layers=layers, mudd_head=mudd_head, stages=eval(STAGES, vars(module)))
    c = dataclasses.replace(module.PRESETS["record"], **SMALL | own | changes)
    return module.fit_kernels(jax.devices()[0], c)


def three_steps(module: ModuleType, c, devices: int) -> list[float]:
    """The losses of three steps."""
    mesh = make_mesh(devices)
    keys = [(c.stage_at(step), c.is_adam_step(step)) for step in range(3)]
    programs = {key: module.compile_train_step(*key, c, mesh) for key in dict.fromkeys(keys)}
    state = module.make_state(c, mesh)
    losses = []
    for step, row in enumerate(module.schedule(c)):
        tokens = sequences(c, c.sequence_length(c.stage_at(step)))  # the same in every step
        row = jax.device_put(row, NamedSharding(mesh, PartitionSpec()))
        state, loss = programs[keys[step]](state, place_on(mesh, tokens), row)
        losses.append(float(loss))
    return losses


@pytest.mark.slow  # test_devices.py checks it for the model without a patch
@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_trains_alike_on_1_and_8_devices(name, load):
    module = load(name)
    c = small(module, adam_every=module.PRESETS["record"].adam_every)
    losses = three_steps(module, c, 1)
    assert losses[2] < losses[0], losses
    np.testing.assert_allclose(three_steps(module, c, 8), losses, rtol=1e-5)


def checks() -> dict:
    """The functions check_NAME(module, c) of the files ideas*_checks.py, by NAME."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("ideas*_checks.py")):
        module = importlib.import_module(f"tests.{path.stem}")
        for name, function in vars(module).items():
            if name.startswith("check_"):
                found[name.removeprefix("check_")] = function
    return found


CHECKS = checks()
LONG = "layers_92 anvil narrow_heads".split()  # five seconds each


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=pytest.mark.slow) if x in LONG else x for x in PATCHES]
)
def test_a_patch_does_what_it_claims(name, load):
    assert name in CHECKS, f"no check_{name}() in tests/ideas*_checks.py"
    module = load(name)
    CHECKS[name](module, small(module))


# ---- Copies --------------------------------------------------------------------------------------
def function(name: str) -> str:
    """A function of ten lines."""
    return f"def {name}():\n" + "".join(f"    {name}{i} = 1\n" for i in range(9)) + "\n\n"


BASE = function("a") + function("b") + function("c")
BASE += 'PRESETS = {"record": 1, "tiny": 2}\n'


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A folder with run.sh, fake Pythons, a train_gpt.py and a shelf of four ideas. Of these, two
    change the same line, and one was made for another file."""
    machine = Machine(tmp_path)
    machine.python(12)
    (machine.bin / "git").symlink_to(shutil.which("git"))
    (machine.root / "train_gpt.py").write_text(BASE)
    shelf = machine.root / "records/ideas"
    shelf.mkdir(parents=True)
    lines = {"first": "a4 = 2", "second": "c4 = 2", "third": "c4 = 3", "old": "d4 = 2"}
    for name, line in lines.items():
        base = BASE if name != "old" else function("d")
        text = idea.difference(base.encode(), base.replace(f"{line[:2]} = 1", line).encode())
        (shelf / f"{name}.patch").write_text(f"# The {name} idea.\n{text}")
    monkeypatch.setattr(idea, "SHELF", shelf)
    monkeypatch.setattr(idea, "TRAINER", machine.root / "train_gpt.py")
    yield machine
    for process in machine.started:
        process.kill()


def test_run_sh_makes_a_copy_and_trains_it(machine):
    *_, last = machine.run("idea", "second", "first", "tiny", "--steps", "3", "--data", "x y")
    copy = machine.root / "idea_second_first.py"
    assert last.endswith(f"run/launch.py {copy.name} tiny --steps 3 --data x y")
    expected = BASE.replace("a4 = 1", "a4 = 2").replace("c4 = 1", "c4 = 2")
    text, _, mark = copy.read_text().partition("# Made by ./run.sh idea second first; crc32 of ")
    assert text == expected and mark and idea.is_as_made(copy)
    *_, last = machine.run(copy.name, "tiny")
    assert last.endswith(f"run/launch.py {copy.name} tiny")


def test_run_sh_lists_the_shelf(machine):
    assert machine.run("idea") == [] and machine.done.returncode == 0
    assert "\nfirst              The first idea.\n" in machine.done.stdout
    assert machine.run("idea", "--help") == [] and "idea NAME" in machine.done.stdout


@pytest.mark.parametrize("words, message", [
    ("frist tiny", "there is no idea 'frist': did you mean first?"),
    ("first tinny", "there is no idea 'tinny': did you mean tiny?"),
    ("tiny", "name an idea first, then the preset"),
    ("second first third", "second and third do not combine: both change the same lines in c, or"),
    ("old tiny", "old.patch does not apply to train_gpt.py: error: patch failed"),
])  # fmt: skip
def test_what_cannot_be_made_is_refused_in_a_line(machine, words, message):
    assert machine.run("idea", *words.split()) == [] and machine.done.returncode == 2
    assert message in machine.done.stderr and not [*machine.root.glob("idea_*")]
    assert machine.done.stderr.count("\n") == 1


def test_without_git_a_line_says_so(machine):
    (machine.bin / "git").unlink()
    machine.run("idea", "first", "tiny")
    assert machine.done.stderr == f"run.sh idea: {idea.NO_GIT}\n" and machine.done.returncode == 2


def test_patches_are_refreshed_when_the_file_changes(machine, capsys):
    new = "# new\n" + BASE.replace("a2 = 1", "a2 = 9").replace("c4 = 1", "c4 = 9")
    idea.TRAINER.write_text(new)
    (idea.SHELF / "old.patch").unlink()
    with pytest.raises(Fault, match="first.patch does not apply"):
        idea.copy_of(["first"])
    idea.refresh(BASE.encode())
    assert idea.copy_of(["first"]).decode().startswith(new.replace("a4 = 1", "a4 = 2"))
    assert idea.description(idea.SHELF / "first.patch") == ["The first idea."]
    shown = capsys.readouterr().out.splitlines()
    assert shown == [f"{name} conflicts in c, or after it" for name in ("second", "third")]


def test_an_edited_copy_stays_and_an_old_one_is_made_anew(machine):
    copy = machine.root / "idea_first.py"
    idea.write_copy(["first"], machine.root)
    machine.root.joinpath("train_gpt.py").write_text(BASE + "# new\n")
    idea.write_copy(["first"], machine.root)
    assert "# new\n" in copy.read_text() and idea.is_as_made(copy)
    edited = copy.read_text().replace("a4 = 2", "a4 = 4")
    copy.write_text(edited)
    with pytest.raises(Fault, match="idea_first.py is there, and was edited: to train it as it is"):
        idea.write_copy(["first"], machine.root)
    assert copy.read_text() == edited and not [*machine.root.glob("*.part")]
