"""The flags of ./run.sh that train_gpt.py does not have, and the ranges of all flags' values.

run/guard.py obeys the former. There is no JAX here, because run/machine.py reads this before
anything is installed.
"""

from __future__ import annotations

import re

# By name: the type, the default, and what the flag does.
GUARD_FLAGS = {
    "save_every": (int, 0, "steps between checkpoints; 0: only when a signal stops the run"),
    "resume": (str, "", "checkpoint to resume, or a folder, for its newest intact one"),
    "force": (int, 0, "1: resume although source, flags or tokens have changed"),
    "stall": (int, 300, "the run ends if no step has ended for so many seconds; 0: never"),
}

MOST = 2**31 - 1  # indices are int32
LARGEST_VOCAB = 2**16  # tokens of shards are uint16
LARGEST_TABLE = 2**27  # rows, of which record 92 has 84,602,880; padded, they must fit int32
LARGE = 1e30  # of float32
# Names of fields, and the least and the largest value that they may have. A field may be a float
# where its bounds are. A score_scale below 0.1 would not tell documents apart: positions().
RANGES = (
    ("seed", -1, 2**32 - 1),
    ("steps", 0, 10**6),
    ("D H batch microbatch head_chunk dc_window F val_every val_T val_tokens", 1, MOST),
    ("pointer_D pointer_band", 1, MOST),
    ("vocab", 1, LARGEST_VOCAB),
    ("bigrams", 1, LARGEST_TABLE),
    ("R eot pointer", 0, MOST),
    ("save", 0, 1),
    ("muon_lr adam_lr lr_floor untie cooldown_start cooldown_end", 0.0, LARGE),
    ("momentum_warmup momentum_cooldown", 0.0, LARGE),
    ("momentum_low momentum_high", 0.0, 0.99999),
    ("x_scale w_scale g_scale", 1e-30, LARGE),
    ("score_scale", 0.1, LARGE),
    ("target", -LARGE, LARGE),
)
GUARD_RANGES = (("save_every stall", 0, MOST), ("force", 0, 1))


def wrong_value(argv: list[str], stages: int = 1) -> str:
    """Which value on the command line of a run is out of its range, and what the range is; "" if
    none is. `stages` is the number of stages, each of which needs a step. What is no number, the
    script refuses."""
    typed = {}
    for i, argument in enumerate(argv):
        name, is_joined, text = argument.partition("=")
        if name.startswith("--"):
            typed[name] = text if is_joined else "".join(argv[i + 1 : i + 2])
    steps = typed.get("--steps", "")
    if re.fullmatch("[+-]?[0-9]+", steps) and int(steps) < stages:
        each = "" if stages == 1 else f", one for each of {stages} stages"
        whole = "; without --steps, the whole preset runs" if int(steps) == 0 else ""
        return f"--steps is at least {stages}{each}, and cannot be {steps}{whole}"
    for names, least, most in (*RANGES, *GUARD_RANGES):
        for name in names.split():
            try:
                value = float(typed.get(f"--{name}", least))
            except ValueError:
                continue
            why = out_of_range(f"--{name}", value, least, most)
            if why:
                return why
    return ""


def out_of_range(name: str, value: float, least: float, most: float) -> str:
    """What a number must be, in words, if it is not from `least` to `most`; "" if it is."""
    shown = f"{value:g}" if abs(value) < 1e6 else f"{value:.0f}" if abs(value) < 1e20 else value
    if value < least:
        return f"{name} is at least {least:g}, and cannot be {shown}"
    if value > most:
        largest = most if isinstance(most, int) else f"{most:g}"
        return f"{name} is at most {largest}, and cannot be {shown}"
    if value != value:
        return f"{name} must be a number from {least:g} to {most:g}, and cannot be nan"
    return ""
