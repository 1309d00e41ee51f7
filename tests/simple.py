"""Imports the optimizer benchmark: records/optimizers/train_gpt_simple.py as the module `simple`,
and contestants' files beside it by their names."""

import importlib.util
import sys
from types import ModuleType

from tests.tools import ROOT

FOLDER = ROOT / "records/optimizers"


def load(file: str, name: str) -> ModuleType:
    """The module of a file in FOLDER. Its name in sys.modules is given, for there is another
    muon.py in basics/."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # contestants import train_gpt_simple, and dataclasses look it up
    spec.loader.exec_module(module)
    return module


simple = load("train_gpt_simple.py", "train_gpt_simple")
muon = load("muon.py", "contestant_muon")
