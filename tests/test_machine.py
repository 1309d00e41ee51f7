"""run/machine.py: what it finds, decides and prints, what is pinned, and its page."""

import math
import os
import re
import shutil
import subprocess
import sys

import fake_machine
import fits
import jax
import machine
import numpy as np
import plan
import pytest
from fake_machine import BASH, GVNIC, KINDS, ROOT, V5E, Gpu, Kind, Machine

import train_gpt
from tests.record92 import PATH, frozen

SET_BY_USERS = (
    "CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER JAX_PLATFORMS "
    "XLA_CLIENT_MEM_FRACTION XLA_PYTHON_CLIENT_MEM_FRACTION"
).split() + [*machine.PROCESSES, *machine.PROCESSES.values()]


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A fake machine that this process finds, without the variables that a user may have set."""
    fake = Machine(tmp_path)
    monkeypatch.setenv("PATH", str(fake.bin))
    monkeypatch.setenv("JNANO_PCI", str(fake.pci))
    for name in SET_BY_USERS:
        monkeypatch.delenv(name, raising=False)
    return fake


def decide(fake, kind):
    """What is decided on a machine of this kind."""
    fake.become(kind)
    return machine.decide(machine.find_machine())


# ---- Decisions -----------------------------------------------------------------------------------
@pytest.mark.parametrize("driver, capability, wheels", [
    ("525.1", "9.0", "cuda12"), ("579.9", "7.5", "cuda12"), ("580.1", "7.5", "cuda13"),
    ("1000.1", "12.0", "cuda13"), ("580.1", "7.0", "cuda12-volta"),
    ("525.1", "5.2", "cuda12-volta"), ("525.1", "5.0", "cpu"),
])  # fmt: skip
def test_wheels_are_those_for_driver_and_compute_capability(fake, driver, capability, wheels):
    decision = decide(fake, Kind((Gpu("K", capability),), driver))
    assert decision.wheels.name == wheels
    if wheels == "cpu":
        assert (decision.preset, decision.environment, decision.flags) == ("tiny", {}, None)
        assert decision.why == "K has compute capability 5.0, and jax needs 5.2"


@pytest.mark.parametrize("capability, preset", [("7.5", "tiny"), ("8.0", "record")])
def test_the_record_is_for_ampere_and_later(fake, capability, preset):
    assert decide(fake, Kind((Gpu(capability=capability),))).preset == preset


@pytest.mark.parametrize("mib, fraction", [("44999", "0.92"), ("45000", None), ("[N/A]", None)])
def test_gpus_of_less_than_45000_mib_give_jax_more_of_it(fake, mib, fraction):
    decision = decide(fake, Kind((Gpu(mib=mib),)))
    assert decision.environment.get("XLA_CLIENT_MEM_FRACTION") == fraction
    assert decision.preset == "record"
    assert (decision.memory is None) == (mib == "[N/A]")


def test_memory_is_what_jax_has_of_the_smallest_gpu(fake):
    gpus = Gpu(mib="81920"), Gpu(mib="40960")
    assert decide(fake, Kind(gpus)).memory == pytest.approx(0.98 * 0.92 * 40 * 1.073741824)
    assert decide(fake, Kind(gpus[:1])).memory == pytest.approx(0.98 * 0.75 * 80 * 1.073741824)
    assert decide(fake, Kind(pci=(V5E,))).memory == pytest.approx(0.98 * 16 * 1.073741824)


def test_what_the_user_has_set_stays(fake, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "")  # which JAX reads as unset
    assert decide(fake, KINDS["1×H100"]).environment == {"JAX_PLATFORMS": "cuda,cpu"}
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    assert decide(fake, Kind(pci=(V5E,))).environment == {}
    decision = decide(fake, KINDS["RTX 4090"])
    assert decision.environment == {}
    assert decision.memory == pytest.approx(0.98 * 0.5 * 24564 * 2**20 / 1e9)


def test_the_old_name_of_the_fraction_counts_because_jax_refuses_both(fake, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert decide(fake, KINDS["RTX 4090"]).environment == {"JAX_PLATFORMS": "cuda,cpu"}


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_a_fraction_that_is_no_number_is_refused(fake, monkeypatch, name):
    monkeypatch.setenv(name, "abc")
    with pytest.raises(SystemExit, match=f"run.sh: {name}=abc is no number: set it to a fraction"):
        decide(fake, KINDS["1×H100"])


@pytest.mark.parametrize("title", ["1×H100", "TPU v5e-1, on Colab", "a laptop"])
def test_jax_platforms_cpu_makes_any_machine_a_cpu(fake, monkeypatch, title):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    decision = decide(fake, KINDS[title])
    assert decision == (machine.CPU, "tiny", "JAX_PLATFORMS=cpu is set", {}, None, None)


MIXED = Kind((Gpu("RTX 4090", "8.9", "24564"), Gpu("GT 1030", "6.1", "2048")))
SMALL = "JAX has 1.9 GB of GT 1030, and the record needs"


@pytest.mark.parametrize("visible, wheels, why", [
    (None, "cuda12-volta", f"{SMALL} 11.0; {machine.OTHERS}"),
    ("1,0", "cuda12-volta", f"{SMALL} 11.0; {machine.OTHERS}"),
    ("0", "cuda13", "this machine has 1 x RTX 4090"),
    ("GPU-0", "cuda13", "this machine has 1 x RTX 4090"),
    (" 1", "cuda12-volta", f"{SMALL} 14.5"),
    ("MIG-8a", "cuda13", "this machine has 1 x RTX 4090"),
    ("", "cpu", "CUDA_VISIBLE_DEVICES= leaves no NVIDIA GPU"),
    ("-1", "cpu", "CUDA_VISIBLE_DEVICES=-1 leaves no NVIDIA GPU"),
])  # fmt: skip
def test_only_visible_gpus_count(fake, monkeypatch, visible, wheels, why):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    decision = decide(fake, MIXED)
    assert (decision.wheels.name, decision.why) == (wheels, why)
    if visible == "MIG-8a":  # of which nothing lists the memory
        assert decision.memory is None and "XLA_CLIENT_MEM_FRACTION" not in decision.environment


@pytest.mark.parametrize("gpus, order, exported", [
    (MIXED.gpus, None, "PCI_BUS_ID"),
    (MIXED.gpus, "FASTEST_FIRST", None),  # what the user has set stays
    (2 * MIXED.gpus[:1], None, None),
])  # fmt: skip
def test_gpus_that_differ_are_counted_as_by_nvidia_smi(fake, monkeypatch, gpus, order, exported):
    """Also where only one of them is visible: it must be the one that nvidia-smi means."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    if order:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    assert decide(fake, Kind(gpus)).environment.get("CUDA_DEVICE_ORDER") == exported


@pytest.mark.parametrize("script, why", [
    ("echo Failed to initialize NVML: Driver/library version mismatch; exit 18",
     "nvidia-smi shows no NVIDIA GPU: Failed to initialize NVML: Driver/library version mismatch"),
    ("echo No devices were found", "nvidia-smi shows no NVIDIA GPU: No devices were found"),
    ("[[ $1 = *driver* ]] && echo 580.1 && exit; echo GPU lost; exit 15",
     "nvidia-smi shows no NVIDIA GPU: GPU lost"),
    ("echo broken >&2; exit 1", "nvidia-smi shows no NVIDIA GPU: broken"),
    ("", "nvidia-smi shows no NVIDIA GPU: it prints nothing"),
    ("echo 470.1", "the NVIDIA driver 470 is too old: jax needs 525"),
    ("echo 524.99", "the NVIDIA driver 524 is too old: jax needs 525"),
    ("[[ $1 = *driver* ]] && echo 580.1 && exit; echo 0, GPU-0, K, [N/A], 8192",
     "nvidia-smi shows no NVIDIA GPU: 0, GPU-0, K, [N/A], 8192"),
    ("[[ $1 = *driver* ]] && echo 580.1 && exit; echo Unable to determine the device handle",
     "nvidia-smi shows no NVIDIA GPU: Unable to determine the device handle"),
])  # fmt: skip
def test_a_machine_whose_nvidia_smi_shows_no_gpu_is_a_cpu_and_knows_why(fake, script, why):
    fake.script("nvidia-smi", f"#!{BASH}\n{script}\n")
    decision = machine.decide(machine.find_machine())
    assert (decision.wheels, decision.preset, decision.why) == (machine.CPU, "tiny", why)


@pytest.mark.parametrize("noise", [
    "echo WARNING: infoROM is corrupted; exit 14",
    "echo 2, GPU-2, [GPU is lost], [GPU is lost], [GPU is lost]",
    "echo 2, GPU-2, K, 9.0, [Unknown Error]",
    "echo Unable to determine the device handle >&2; exit 255",
])  # fmt: skip
def test_gpus_that_are_listed_count_and_the_rest_is_a_warning(fake, monkeypatch, capsys, noise):
    monkeypatch.setattr(machine, "WARNED", [])
    fake.become(Kind(2 * (Gpu(),)))
    smi = fake.bin / "nvidia-smi"
    smi.write_text(f"{smi.read_text()}{noise}\n")
    decision = machine.decide(machine.find_machine())
    assert decision.why == "this machine has 2 x NVIDIA H100 80GB HBM3"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("run.sh: warning: nvidia-smi says: ")


def test_where_a_gpu_is_lost_the_others_are_named_by_uuid(fake, monkeypatch):
    rows = "\n".join(f"{i}, GPU-{i}f, K, 9.0, 81559" for i in (0, 2, 3))
    fake.script("nvidia-smi", f"#!{BASH}\n[[ $1 = *driver* ]] && echo 580.1 || echo '{rows}'\n")
    found = machine.find_machine()
    line = machine.odd_number(found, machine.decide(found), "record")
    assert line.endswith("type  export CUDA_VISIBLE_DEVICES=GPU-0f,GPU-2f")


def test_a_gpu_without_a_driver_version_is_no_laptop(fake):
    fake.script(
        "nvidia-smi",
        f"#!{BASH}\n[[ $1 = *driver* ]] && echo '[N/A]' || echo 0, GPU-0, K, 9.0, 81559\n",
    )
    with pytest.raises(SystemExit, match="lists a GPU, but not the version of its driver"):
        machine.find_machine()


def test_a_nvidia_smi_that_may_not_be_executed_is_none(fake):
    fake.script("nvidia-smi", "").chmod(0o644)
    decision = machine.decide(machine.find_machine())
    assert decision.why == "this machine has no NVIDIA GPU and no TPU"


def test_a_nvidia_smi_that_hangs_is_left(fake, monkeypatch):
    monkeypatch.setattr(machine, "PATIENCE", 0.1)
    fake.script("nvidia-smi", f"#!{BASH}\nwhile :; do :; done\n")
    assert machine.decide(machine.find_machine()).why == "nvidia-smi has not answered in a minute"
    fake.become(KINDS["1×H100"])  # it answers, and hangs then
    smi = fake.bin / "nvidia-smi"
    smi.write_text(f"{smi.read_text()}while :; do :; done\n")
    monkeypatch.setattr(machine, "PATIENCE", 0.5)
    assert machine.decide(machine.find_machine()).preset == "record"


def test_tpus_are_known_by_vendor_and_device(fake):
    """Google's network card has the vendor; a function that is not the first is no other chip."""
    assert decide(fake, Kind(pci=(GVNIC,))).wheels == machine.CPU
    fake.become(Kind(pci=(V5E,)))
    (chip,) = fake.pci.iterdir()
    chip.rename(chip.with_name("0000:00:00.1"))
    assert machine.tpus() == []
    fake.become(Kind(pci=(V5E,)))
    (chip / "vendor").write_text("0x8086\n")
    assert machine.tpus() == []
    fake.become(Kind(pci=("0x0027", "0x0027")))
    assert machine.tpus() == 4 * [machine.Device("TPU v2 or v3", None)]


# ---- The fit -------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_the_first_row_for_which_the_memory_is_enough_is_taken(number):
    for preset, rows in fits.ROWS.items():
        for flags, needs in rows:
            assert fits.fit(needs[number], number, preset) == flags
            assert fits.fit(needs[number] - 0.1, number, preset) != flags
        assert fits.fit(fits.least(number, preset) - 0.1, number, preset) is None


@pytest.mark.parametrize("number, stands_for", [(1, 1), (3, 2), (7, 4), (8, 8), (16, 8)])
def test_other_numbers_of_devices_are_judged_as_the_next_smaller(number, stands_for):
    assert fits.listed(number) == stands_for


# ---- Spelling ------------------------------------------------------------------------------------
@pytest.mark.parametrize("argv, message", [
    ("chekc", "there is no 'chekc': did you mean check?"),
    ("TINY", "there is no 'TINY': did you mean tiny?"),
    ("smal --seed 1", "there is no 'smal': did you mean small?"),
    ("--step 20", "there is no flag --step: did you mean --steps?"),
    ("tiny --muonlr=1", "there is no flag --muonlr: did you mean --muon_lr?"),
    ("tiny --lr 1", "did you mean --lr_floor or --muon_lr or --adam_lr?"),
    ("train_gpt.py tiny --stages 1", "there is no flag --stages: did you mean --steps?"),
    ("check --smal", "there is no flag --smal: did you mean --small?"),
    ("check small", "check takes no 'small', only record or medium: did you mean --small?"),
    ("check tiny", "check takes no 'tiny', only record or medium"),
    ("check medium --only tiny", ""), ("check record", ""),
    ("check record92", "check takes no 'record92': records/upstream92/train_gpt.py is frozen"),
    ("check --batch=64 --seeds 1", "there is no flag --seeds: did you mean --seed?"),
    ("check --only tiny --steps 9", ""), ("check --small", ""), ("check --help", ""),
    ("check --kernels record", ""), ("check --kernel", "did you mean --kernels?"),
    ("record92 --matrix_optimizer=anvil --help", ""), ("train_gpt.py record92", ""),
    ("record92 --segments 1", "there is no flag --segments: did you mean --segment?"),
    ("tiny --segment 1", "there is no flag --segment"),  # which only the frozen file has
    ("recrod92", "there is no 'recrod92': did you mean record92?"),
    ("copy.py mine --any 64", ""),  # a copy may have other presets and fields
    ("none.py tiny", "there is no file none.py"),
    ("chat", "there is no 'chat': did you mean sample?"),
    ("Eval x.npz", "there is no 'Eval': did you mean loss or hellaswag?"),
    ("train tiny", "there is no 'train': ./run.sh alone trains"),
    ("-v", "there is no '-v': did you mean --version?"),
    ("verfy logs", "there is no 'verfy': did you mean verify?"),
    ("basics mun", "there is no tutorial 'mun': did you mean muon?"),
    ("basics/mun.py", "there is no tutorial 'mun': did you mean muon?"),
    ("basics/muon --draw x.svg", ""), ("basics muon.py", ""), ("basics --help", ""),
    ("sample x.npz --tokens 9", ""),
    ("", ""), ("record --steps=5 --help", ""), ("-h", ""),
    ("tiny --resume logs --force=1 --stall 0 --save_every 9", ""),  # flags of the launcher
    ("tiny --save_eve 9", "there is no flag --save_eve: did you mean --save_every?"),
    ("check --stall 0", "there is no flag --stall"),
    ("tiny --steps 0", "--steps is at least 1, and cannot be 0; without --steps, the whole preset"),
    ("tiny --steps ²", "--steps must be a whole number, and cannot be '²'"),
    ("tiny --steps +-5", "--steps must be a whole number"),
    ("tiny --steps=20.0", "--steps must be a whole number, and cannot be '20.0'"),
    ("record --muon_lr fast", "--muon_lr must be a number, and cannot be 'fast'"),
    ("tiny --data", "--data needs a value"),
    ("tiny steps 20", "'steps' is neither a flag nor the value of one: did you mean --steps?"),
    ("record92 --steps=-5", "--steps is at least 1, and cannot be -5"),
    ("--batch 4 --adam_lr inf", "--adam_lr is at most 1e+30, and cannot be inf"),
    ("tiny --seed -1 --target -1", ""),
])  # fmt: skip
def test_a_misspelt_word_gets_its_neighbours(argv, message, tmp_path, monkeypatch):
    shutil.copy(ROOT / "train_gpt.py", tmp_path)
    shutil.copy(ROOT / "train_gpt.py", tmp_path / "copy.py")
    (tmp_path / "records/upstream92").mkdir(parents=True)
    shutil.copy(ROOT / "records/upstream92/train_gpt.py", tmp_path / "records/upstream92")
    (tmp_path / "basics").mkdir()
    (tmp_path / "basics/muon.py").touch()
    monkeypatch.chdir(tmp_path)
    found = machine.misspelt(argv.split())
    assert message in found and bool(message) == bool(found)


def test_a_script_that_cannot_be_parsed_is_left_to_python(tmp_path, monkeypatch):
    (tmp_path / "train_gpt.py").write_text("def (")
    monkeypatch.chdir(tmp_path)
    assert machine.misspelt(["tiny", "--any", "1"]) == ""


def test_verbs_are_those_of_run_sh():
    text = (ROOT / "run.sh").read_text(encoding="utf-8")
    words = re.findall(r"^  ([a-z][a-z |]*)( \| basics/.*)?\)", text, re.M)
    cases = {word for case, _ in words for word in case.split(" | ")}
    assert {*machine.VERBS} == cases
    others = " ".join(machine.SYNONYMS.values()).split()
    assert not {*machine.VERBS} & {*others, *machine.RUNS} and len(others) == len({*others})
    meant = {word for words in machine.SYNONYMS for word in words.split(" or ")}
    assert meant <= {*machine.VERBS, "--help", "--version"}


def test_the_tutorials_are_listed_with_their_first_lines(capsys):
    machine.main(["basics"])
    _, _, *lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert names[:2] == ["gpt2", "attention"]
    assert {*names} == {path.stem for path in (ROOT / "basics").glob("*.py")}
    assert "muon               Muon: a matrix moves equally far along" in "\n".join(lines)


def test_the_version_names_the_commit_and_jax(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "prefix", str(ROOT / ".venv"))
    machine.main(["--version"])
    line = capsys.readouterr().out
    assert re.fullmatch(rf"jNanoGPT \S.*, jax {re.escape(jax.__version__)}, Python 3\.\S+\n", line)


def test_without_venv_or_git_the_version_says_so(fake, capsys, monkeypatch):
    monkeypatch.chdir(fake.root)
    (fake.root / ".git").mkdir()
    machine.main(["--version"])
    line = "jNanoGPT (git is not installed), no jax yet: ./run.sh install\n"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize("line", ["tiny --steps 0", "tiny --data=", "tiyn", "record"])
def test_what_is_refused_ends_with_status_2_and_one_line(line, fake, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as stopped:
        machine.main(line.split())
    shown = capsys.readouterr()
    assert stopped.value.code == 2 and shown.err.startswith("run.sh: ") and shown.out == ""
    assert shown.err.count("\n") == 1


# ---- Refusals ------------------------------------------------------------------------------------
def refusal(fake, kind, *argv):
    """Why run.sh with these arguments refuses on a machine of this kind."""
    decision = decide(fake, kind)
    return machine.refusal([*argv], machine.find_machine(), decision)


RTX_3060 = Kind((Gpu("RTX 3060", "8.6", "12288"),))
NO_RECORD = (
    "the record does not run here: {}; type  ./run.sh tiny  or name what JAX should use all the "
    "same, as in  JAX_PLATFORMS=cpu ./run.sh record"
)


@pytest.mark.parametrize("kind, why", [
    (RTX_3060, "JAX has 11.6 GB of RTX 3060, and the record needs 14.5"),
    (Kind((Gpu("K", "5.0"),)), "K has compute capability 5.0, and jax needs 5.2"),
    (Kind((Gpu(),), "470.1"), "the NVIDIA driver 470 is too old: jax needs 525"),
    (KINDS["a laptop"], "this machine has no NVIDIA GPU and no TPU"),
])  # fmt: skip
def test_the_record_is_refused_where_it_cannot_run(fake, kind, why):
    assert refusal(fake, kind, "record") == NO_RECORD.format(why)
    for preset in ("record92", "medium"):
        line = refusal(fake, kind, preset)
        assert line.startswith(f"{preset} does not run here: ") and line.endswith(preset)
        assert why.partition(" of RTX")[0].partition(", and")[0] in line


@pytest.mark.parametrize("preset", ["record92", "medium"])
def test_larger_presets_need_more_memory_than_the_record(fake, preset):
    kind = Kind((Gpu("RTX 4090", "8.9", "24564"),))
    assert not refusal(fake, kind, "record")
    needs = f"{preset} needs {fits.least(1, preset):.1f}; type  ./run.sh tiny  or name"
    assert f"JAX has 23.2 GB of each device, and {needs}" in refusal(fake, kind, preset)
    assert not refusal(fake, Kind((Gpu(), Gpu())), preset)


@pytest.mark.parametrize("argv, env, refused", [
    ("", {}, False),
    ("tiny", {}, False),
    ("check --small", {}, False),
    ("basics/gpt2.py", {}, False),
    ("record --seed 1 --data x", {}, True),
    ("record92", {}, True),
    ("medium", {}, True),
    ("train_gpt.py record", {}, True),
    ("./train_gpt.py record", {}, True),
    ("record --resume logs", {}, True),
    ("small", {"JAX_PLATFORMS": "cpu"}, False),
    ("record --help", {}, False),
    ("record", {"JAX_PLATFORMS": "cpu"}, False),
    ("record92", {"JAX_PLATFORMS": "cpu"}, False),
    ("record", {"JAX_PLATFORMS": "rocm"}, False),  # AMD's GPUs
    ("record", {"JNANO_PROCESSES": "8", "JNANO_PROCESS": "0"}, False),
    ("record", {"WORLD_SIZE": "8", "RANK": "0"}, False),
    ("record", {"WORLD_SIZE": "8"}, True),  # left over in a shell
    ("record", {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, False),
    ("record", {"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "7"}, False),
    ("record", {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "WORLD_SIZE": ""}, True),
])  # fmt: skip
def test_only_the_record_as_it_is_is_refused(fake, monkeypatch, argv, env, refused):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    for kind in RTX_3060, KINDS["a laptop"]:
        assert bool(refusal(fake, kind, *argv.split())) == refused


@pytest.mark.parametrize(
    "argv",
    ["my_idea.py record", "my.py record92", "record --batch 64", "record92 --attention band"],
)
def test_what_may_fit_into_a_small_gpu_is_refused_only_without_one(fake, argv):
    assert not refusal(fake, RTX_3060, *argv.split())
    assert refusal(fake, KINDS["a laptop"], *argv.split())


def test_flags_and_batches_are_those_of_the_trainer():
    flags = {f"--{name}" for name in (*fits.RECORD, "attention")}
    assert {*machine.ADVANCED} == flags
    for preset, config in train_gpt.PRESETS.items():
        assert machine.BATCH[preset] == config.batch
    assert machine.BATCH["record92"] == frozen.PRESETS["record92"].batch
    assert machine.FROZEN == {"record92": str(PATH.relative_to(ROOT))}


@pytest.mark.parametrize("number, argv, visible, chosen", [
    (1, "record", None, None), (2, "record", None, None), (3, "record", None, "0,1"),
    (4, "record", None, None), (5, "", None, "0,1,2,3"), (6, "record", None, "0,1,2,3"),
    (7, "record", None, "0,1,2,3"), (8, "record", None, None), (9, "record", None, None),
    (16, "record", None, None), (8, "record", "7,5, 3", "7,5"), (3, "small", None, "0,1"),
    (3, "record92", None, "0,1"), (3, "medium", None, "0,1"),
    (3, "tiny", None, None), (3, "record --batch 2", None, None), (3, "install", None, None),
])  # fmt: skip
def test_gpus_that_do_not_divide_a_step_are_refused(
    fake, monkeypatch, number, argv, visible, chosen
):
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    line = refusal(fake, Kind(number * (Gpu(),)), *argv.split())
    assert line.endswith(f"export CUDA_VISIBLE_DEVICES={chosen}" if chosen else "")
    assert bool(line) == bool(chosen)


def test_of_more_than_eight_gpus_one_process_uses_eight(fake, monkeypatch):
    why = "this machine has 12 x NVIDIA H100 80GB HBM3"
    kind = Kind(12 * (Gpu(),))
    assert decide(fake, kind).why == f"{why}, of which the record uses 8"
    monkeypatch.setenv("WORLD_SIZE", "12")
    monkeypatch.setenv("RANK", "0")
    assert decide(fake, kind).why == why


def test_gpus_too_old_for_jax_are_not_counted(fake):
    assert refusal(fake, Kind(3 * (Gpu("K", "5.0"),)), "tiny") == ""


# ---- Constraints ---------------------------------------------------------------------------------
@pytest.mark.parametrize("wheels", [*machine.CUDA, machine.TPU])
def test_what_jax_leaves_open_is_pinned(wheels):
    """Everything that comes with the accelerator, for the jax of requirements.txt."""
    lines = (ROOT / wheels.constraints).read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert all(re.fullmatch(r"[\d.]+", version) for version in pins.values())
    if wheels == machine.TPU:
        assert [*pins] == ["libtpu"]
        return
    kind = re.search(r"\[(.*)\]", wheels.requirement)[1]
    (jax,) = re.findall('^jax==(.*); python_version >= "3.12"$',
                        (ROOT / "requirements.txt").read_text(), re.M)  # fmt: skip
    assert pins[f"jax-{kind}-plugin"] == pins[f"jax-{kind}-pjrt"] == jax
    words = " ".join(pins)
    for part in "cudnn", "cublas", "nccl", "nvcc", "cuda-runtime", "cusolver", "nvjitlink":
        assert part in words, part


def test_gpus_before_turing_get_the_last_cudnn_that_knows_them():
    volta, cuda12 = ((ROOT / f"run/constraints/{name}.txt").read_text().splitlines()
                     for name in ("cuda12-volta", "cuda12"))  # fmt: skip
    different = {line for line in volta if line not in cuda12 and not line.startswith("#")}
    assert different == {"nvidia-cudnn-cu12==9.10.2.21"}


# ---- The plan ------------------------------------------------------------------------------------
def test_the_plan_explains_odd_numbers_of_devices_and_unknown_memory():
    plans = [
        plan.describe(found, machine.decide(found))
        for found in (
            machine.Machine([machine.Device("RTX 3090", 24576.0, 8.6)] * 3, 580),
            machine.Machine([machine.Device("GB10", None, 12.1)], 580),
        )
    ]
    assert "\nrefused    3 GPUs do not divide a step of record: to use 2 of them, type" in plans[0]
    assert "\nminutes" not in plans[0]  # what does not run takes none
    assert "\nminutes    training: not known; compiling: 2 to 3" in plans[1]
    assert "\nflags      those for the memory that JAX finds\n" in plans[1]
    assert plans[1].startswith("machine    1 x GB10, compute capability 12.1, driver 580\n")


@pytest.mark.parametrize("argv, message", [
    ("tiyn", "there is no preset 'tiyn': did you mean tiny?"),
    ("tiny --pirce 3", "there is no flag --pirce: did you mean --price?"),
    ("--price 0", "--price '0' is no price: an hour costs more than 0 dollars, as 20"),
    ("--price nan", "--price 'nan' is no price"), ("tiny small", "small"),
    ("--price=", "--price '' is no price"),
])  # fmt: skip
def test_what_a_plan_cannot_use_is_refused_in_a_line(argv, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        plan.main(argv.split())
    line = capsys.readouterr().err
    assert stopped.value.code == 2 and line.startswith("run.sh plan: ") and line.count("\n") == 1
    assert message in line


@pytest.mark.parametrize("line", ["plan.py", "clean.py", "machine.py basics", "machine.py"])
def test_a_reader_that_leaves_gets_no_traceback(line, fake):
    """As of `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    script, *argv = line.split()
    command = [sys.executable, ROOT / "run" / script, *argv]
    streams = dict(stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE)
    done = subprocess.run(command, **streams, text=True, cwd=ROOT)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_what_a_preset_needs_is_what_its_arrays_take():
    """The padding of parameters is not saved, so that the weights are up to a tenth less."""
    presets = {name: (train_gpt, c) for name, c in train_gpt.PRESETS.items()}
    presets["record92"] = frozen, frozen.PRESETS["record92"]
    assert {*plan.NEEDS} == {*presets} == {*machine.BATCH}
    for name, (script, c) in presets.items():
        weights = 0
        for param in script.param_table(c).values():
            dtype = getattr(param, "dtype", "float32")
            weights += math.prod(param.shape) * np.dtype(dtype).itemsize
        state = jax.eval_shape(lambda c=c, script=script: script.initial_state(np.uint32(0), c))
        leaves = jax.tree.leaves(state._replace(lookups={}))
        checkpoint = sum(x.size * x.dtype.itemsize for x in leaves)
        assert plan.NEEDS[name].weights == pytest.approx(weights / 1e9, rel=0.1), name
        assert plan.NEEDS[name].checkpoint == pytest.approx(checkpoint / 1e9, rel=0.07), name


def test_the_dollars_are_those_of_the_minutes():
    """8 x H100 at $60 an hour: a dollar a minute."""
    found = machine.Machine([machine.Device("NVIDIA H100 80GB HBM3", 81559.0, 9.0)] * 8, 580)
    text = plan.describe(found, machine.decide(found), "record", 60.0)
    installing, fetching = plan.INSTALLING["gpu"], [1.6 * x for x in plan.FETCHING]
    low = installing[0] + fetching[0] + 2 + 12 / 8
    high = installing[1] + fetching[1] + 5 + 15 / 8
    assert f"\ndollars    about ${low:.2f} to ${high:.2f} at $60.00 an hour (estimate): " in text


H100 = machine.Device("NVIDIA H100 80GB HBM3", 81559.0, 9.0)
RTX_4090 = machine.Device("NVIDIA GeForce RTX 4090", 24564.0, 8.9)


@pytest.mark.parametrize("preset, devices, minutes", [
    ("record", [H100], (12, 15)), ("record", 8 * [H100], (1.5, 1.875)),
    ("medium", 8 * [H100], (21, 26)), ("record", [RTX_4090], (45, 55)),
    ("record", [RTX_4090] * 8, None), ("record", [H100._replace(mib=None)], None),
    ("record", [H100, RTX_4090], None), ("small", [H100], None), ("record", [], None),
    ("record", [RTX_4090._replace(name=RTX_4090.name + " Laptop GPU")], None),
    ("record", [RTX_4090._replace(name=RTX_4090.name + " D")], None),
])  # fmt: skip
def test_minutes_are_those_of_machines_that_somebody_estimated(preset, devices, minutes):
    assert plan.training_minutes(preset, devices) == minutes


def test_a_refused_preset_costs_nothing_and_unknown_minutes_are_named(fake):
    one = machine.Machine([H100], 580)
    text = plan.describe(one, machine.decide(one), "record92", 2.0)
    assert "\nrefused" in text and "\nminutes" not in text and "\ndollars    not known" in text
    four = machine.Machine([RTX_4090] * 4, 580)
    text = plan.describe(four, machine.decide(four), "record", 2.0)
    line = "not known for training; installing, downloading and compiling cost about $0.1"
    assert f"\ndollars    {line}" in text and text.count("at $2.00 an hour (estimate)") == 1


def test_the_page_has_the_plan_of_every_machine_and_planning_writes_nothing(tmp_path):
    fake = Machine(tmp_path)
    fake.python(12)
    files = fake.files()
    written = fake_machine.PAGE.read_text(encoding="utf-8")
    expected = [fake_machine.INTRODUCTION, *fake_machine.sections(fake)]
    assert written == "\n".join(expected), "python tests/fake_machine.py writes it anew"
    assert fake.files() == files
