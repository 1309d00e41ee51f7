"""Large presets where memory is short: flags with which they fit.

There is no JAX here, because run/machine.py needs these flags before anything is installed.
"""

from __future__ import annotations

# What the presets have. If a flag or a copy of train_gpt.py sets one of these, nothing is fitted.
RECORD = {"batch": 8, "microbatch": 1, "head_chunk": 16384, "val_T": 262144, "bigrams": 377280}
RECORD92 = {**RECORD, "bigrams": 21150720}
MEDIUM = {**RECORD, "bigrams": 251520}
SIZES = {"record": RECORD, "record92": RECORD92, "medium": MEDIUM}

# Flags, and the gigabytes that JAX must have of every device, by the number of devices.
# `lab/compile_8xh100.py --memory` checks them. With twice the batch, a step has as many tokens, in
# sequences half as long: the same model from another stream of tokens. These are the record's rows.
# The last one is another model, with a smaller bigram table.
FITS = (
    ({}, {1: 34.5, 2: 28.5, 4: 26.0, 8: 22.0}),
    ({"batch": 16, "head_chunk": 8192}, {1: 28.5, 2: 23.3, 4: 21.0, 8: 17.5}),
    ({"batch": 32, "head_chunk": 4096, "val_T": 65536}, {1: 20.5, 2: 14.5, 4: 12.0, 8: 11.0}),
    (
        {"batch": 64, "head_chunk": 2048, "val_T": 32768, "bigrams": 65536},
        {1: 14.5, 2: 11.0, 4: 9.0, 8: 8.0},
    ),
)

# The n-gram table of record92 and its waiting gradients stay as large with shorter sequences. No
# such row was compiled.
FITS_92 = (({}, {1: 76.0, 2: 40.0, 4: 29.0, 8: 21.0}),)
FITS_MEDIUM = (
    ({}, {1: 67.0, 2: 58.5, 4: 55.0, 8: 48.5}),
    ({"batch": 16, "head_chunk": 8192}, {1: 44.0, 2: 36.0, 4: 32.0, 8: 30.5}),
    ({"batch": 32, "head_chunk": 4096, "val_T": 65536}, {1: 32.5, 2: 24.5, 4: 21.0, 8: 19.0}),
)
ROWS = {"record": FITS, "record92": FITS_92, "medium": FITS_MEDIUM}


def fit(memory: float, devices: int, preset: str = "record") -> dict[str, int] | None:
    """The flags of the preset's first row for which so many gigabytes are enough; None if there is
    none."""
    for flags, gigabytes in ROWS[preset]:
        if memory >= gigabytes[listed(devices)]:
            return flags
    return None


def least(devices: int, preset: str = "record") -> float:
    """The gigabytes that the preset's last row needs."""
    return ROWS[preset][-1][1][listed(devices)]


def listed(devices: int) -> int:
    """The largest number of devices in FITS that is no larger."""
    return max(number for number in FITS[0][1] if number <= devices)


def command_line(flags: dict[str, int]) -> str:
    """The flags as words."""
    return " ".join(f"--{name} {value}" for name, value in flags.items())
