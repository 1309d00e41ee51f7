"""Imports the frozen file of record 92, records/upstream92/train_gpt.py, as the module `frozen`."""

from lab.tests.tools import UPSTREAM92, import_source

SOURCE = (UPSTREAM92 / "train_gpt.py").read_text(encoding="utf-8")
frozen = import_source(SOURCE, "frozen92")
