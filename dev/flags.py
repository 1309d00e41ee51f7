"""The flags of ./run.sh that train_gpt.py does not have: dev/guard.py obeys them.

There is no JAX here, because dev/machine.py reads this before anything is installed.
"""

from __future__ import annotations

# By name: the type, the default, and what the flag does.
GUARD_FLAGS = {
    "save_every": (int, 0, "steps between checkpoints; 0: only when a signal stops the run"),
    "resume": (str, "", "checkpoint to resume, or a folder, for its newest intact one"),
    "force": (int, 0, "1: resume although source, flags or tokens have changed"),
    "stall": (int, 300, "the run ends if no step has ended for so many seconds; 0: never"),
}
