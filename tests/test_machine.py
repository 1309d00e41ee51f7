"""run/machine.py: devices, wheels, presets and flags by what a machine shows."""

import math

import machine
import pytest

import train_gpt
from tests.tools import ROOT

H100 = "0, GPU-a, NVIDIA H100 80GB HBM3, 9.0, 580.65.06, 81559"


@pytest.fixture
def shows(tmp_path, monkeypatch):
    """Makes nvidia-smi print a text."""
    for name in "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    def write(text):
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        return machine.find_machine()

    return write


@pytest.mark.parametrize("row, wheels, preset, fraction", [
    (H100, "cuda13", "record", 0.75),
    (H100.replace("580.65", "579.99"), "cuda12", "record", 0.75),
    ("0, GPU-a, A100-SXM4-40GB, 8.0, 550.54.15, 40960", "cuda12", "record", 0.92),
    ("0, GPU-a, Laptop, 8.9, 580.65, 8188", "cuda13", "tiny", 0.92),
    ("0, GPU-a, Tesla P100, 6.0, 580.1, 16384", "cpu", "tiny", 0.92),
    ("0, GPU-a, NVIDIA GB10, 12.1, 580.95, [N/A]", "cuda13", "record", 0.75),
    ("No devices were found", "cpu", "tiny", 1.0),
    ("0, GPU-a, [GPU is lost], [GPU is lost], [GPU is lost], [GPU is lost]", "cpu", "tiny", 1.0),
])  # fmt: skip
def test_driver_capability_and_memory_decide(shows, row, wheels, preset, fraction):
    found = shows(row)
    assert (found.wheels, found.preset, found.fraction) == (wheels, preset, fraction)
    assert wheels in machine.DISK and (ROOT / f"run/wheels/{wheels}.txt").exists()


def test_visible_gpus_count_and_the_smallest_decides(shows, monkeypatch):
    small = "1, GPU-b, NVIDIA GeForce RTX 4090, 8.9, 580.65, 24564"
    found = shows(f"{H100}\n{small}\nwarning: infoROM is corrupted")
    assert len(found.devices) == 2 and found.memory == pytest.approx(23.2, abs=0.1)
    both = ["NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"]
    for visible, names in ("0", both[:1]), ("GPU-b", both[1:]), ("MIG-5c89", both):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert [device.name for device in machine.find_machine().devices] == names
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.find_machine().wheels == "cpu"


@pytest.mark.parametrize("preset", machine.FITS)
def test_the_first_row_for_which_the_memory_is_enough_is_taken(preset):
    for flags, gigabytes in machine.FITS[preset]:
        for devices, enough in zip((1, 2, 4, 8), gigabytes, strict=True):
            assert machine.fit(preset, enough, devices) == flags
        assert train_gpt.parse_config([preset, *flags.split()])[0] == preset
    assert machine.fit(preset, enough - 0.1, 8) is None
    assert machine.fit(preset, math.inf, 3) == "" and machine.fit("tiny", 0.1, 1) == ""


def test_the_plan_has_three_lines(shows, capsys):
    shows(H100)
    machine.main(["plan", "medium", "--steps", "3"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["machine", "run", "needs"]
    assert "medium with --batch 16 --head_chunk 8192" in lines[1]
