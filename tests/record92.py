"""Imports the frozen file of record 92, records/upstream92/train_gpt.py, as the module `frozen`."""

import importlib.util
import sys

from tests.tools import ROOT

PATH = ROOT / "records/upstream92/train_gpt.py"
spec = importlib.util.spec_from_file_location("frozen92", PATH)
frozen = importlib.util.module_from_spec(spec)
sys.modules["frozen92"] = frozen  # dataclasses look it up
spec.loader.exec_module(frozen)

FORMATS = "compute", "qkv_forward", "mlp_forward", "head_forward", "head_backward"
FLOAT32 = dict.fromkeys(FORMATS, "float32")
