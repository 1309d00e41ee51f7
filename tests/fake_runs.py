"""Writes logs like those of train_gpt.py, without training."""

import hashlib
import json
from pathlib import Path

from verify import TRACKS

SOURCE = "print('not executed')\n" + "#\n" * 20  # so long that a patch of one line is short
BORDER = "=" * 100 + "\n"


def sha(text: str) -> str:
    """Returns the sha256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def data(shards: str) -> list[dict]:
    """Returns what a log states of shards, given as in Track.shards."""
    names = enumerate(shards.split())
    return [dict(file=f"{i}.bin", sha256=f"{digits:0<64}") for i, digits in names]


def ours(seed: int, loss: float, ms=90000.4, steps=500, tokens=0, source=SOURCE, **facts) -> str:
    """Returns a log of train_gpt.py; facts replace those that it would state. tokens=0: as many as
    its steps have."""
    config = dict(preset="tiny", val_T=1024, val_tokens=65536, target=0.0, seed=seed)
    config |= facts.pop("config", {})
    stated = dict(
        data=data(TRACKS["tiny"].shards), versions={"jax": "0.12.0.1", "python": "3.12.1 (main)"},
        devices=["cpu"], driver="", environment={"TF_CPP_MIN_LOG_LEVEL": "1"},
        argv=["tiny", "--target", "0", "--seed", str(seed)], seed=seed, config=config,
        parameters={}, compile={"seconds": 1.0},
    ) | facts  # fmt: skip
    validation = "step:{}/{} val_loss:{:.4f} train_time:{:.0f}ms step_avg:1.00ms"
    lines = [f"{name} {json.dumps(value)}" for name, value in stated.items()]
    lines.append(validation.format(0, steps, 5.9506, 0))
    for step in (10, 20):
        train_loss = 5 - step / 10
        lines.append(f"step:{step}/{steps} train_loss:{train_loss:.4f} train_time:{step * 180}ms")
    lines.append(validation.format(steps // 2, steps, 2.0 + loss / 10, ms / 2))
    lines.append(validation.format(steps, steps, loss, ms))
    result = dict(reason="end of schedule", val_loss=loss, steps=steps, resumed=False, seed=seed,
                  tokens=tokens or steps * 2048, train_time_ms=ms, weights="x.npz")  # fmt: skip
    return source + BORDER + "\n".join([*lines, f"RESULT {json.dumps(result)}", ""])


LOSSES = (1.4633, 1.4655, 1.4457, 1.4541, 1.4698)


def write_ours(folder: Path, losses=LOSSES, hour=13, seed=100, ms=90000.4, **facts) -> Path:
    """Writes a folder like one of an attempt: logs, source, plan. Each run takes 1 ms longer than
    the one before it."""
    (folder / "logs").mkdir(parents=True)
    source = facts.get("source", SOURCE)
    (folder / "train_gpt.py").write_text(source)
    for i, loss in enumerate(losses):
        name = f"2026-11-21T{hour:02}-{i:02}-00_{seed + i:08x}.txt"
        (folder / "logs" / name).write_text(ours(seed + i, loss, ms + i, **facts))
    write_plan(folder, [seed + i for i in range(len(losses))], source)
    return folder


def write_plan(folder: Path, seeds: list[int], source: str = SOURCE, **changes) -> None:
    """Writes the plan of one variant, as attempt.py does; changes replace what it states."""
    plan = dict(created="2026-11-21T12:59:00Z", n=len(seeds), seeds=seeds, salt="0", machine="0",
                arguments=["tiny", "--target", "0"], arms={folder.name: sha(source)})  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan | changes))


def plan_together(*folders: Path) -> None:
    """Writes one plan into folders of write_ours, whose runs have the same seeds."""
    arms = {folder.name: sha((folder / "train_gpt.py").read_text()) for folder in folders}
    for folder in folders:
        plan = json.loads((folder / "plan.json").read_text())
        (folder / "plan.json").write_text(json.dumps(plan | {"arms": arms}))
