"""The parts of lab/compile_8xh100.py.

hlo.py reads the text of a compiled program. ptx.py counts the instructions of XLA's kernels, and
mosaic.py those of our own. estimate.py turns both into bytes and milliseconds, checks.py compares
them with what the record needs, and report.py writes the page. target.txtpb describes an H100 to
XLA.
"""
