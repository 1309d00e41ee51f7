"""Writes logs like those of train_gpt.py and modded-nanogpt, without training."""

import hashlib
import json
from pathlib import Path

from verify import TRACKS

SOURCE = "print('not executed')\n" + "#\n" * 20  # so long that a patch of one line is short
BORDER = "=" * 100 + "\n"
# Final losses (nats) and training times (ms) that modded-nanogpt published, by the folder there.
RECURSIVE = [  # 2026-06-11_RecursiveFromBest, pull request 322
    (3.2791, 77933), (3.2800, 77446), (3.2790, 77299), (3.2798, 77194), (3.2819, 77401),
    (3.2795, 77431), (3.2801, 77149), (3.2766, 77247), (3.2780, 77336), (3.2778, 77186),
    (3.2785, 77318), (3.2776, 77224), (3.2782, 77225),
]  # fmt: skip
XSA = [  # 2026-05-07_XSAGatedLayers
    (3.2792, 85188), (3.2769, 85258), (3.2775, 85313), (3.2785, 85251), (3.2798, 85299),
    (3.2790, 85198), (3.2805, 85206), (3.2798, 85260), (3.2803, 85213), (3.2787, 85123),
    (3.2777, 85081),
]  # fmt: skip
XSA_MASTER = [  # the baseline of 2026-05-07_XSAGatedLayers
    (3.2794, 85993), (3.2803, 85850), (3.2794, 85967), (3.2797, 85919), (3.2797, 85890),
    (3.2798, 85905), (3.2808, 85788),
]  # fmt: skip


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


def upstream(loss: float, ms: float, *, steps: int = 1390, i: int = 0) -> str:
    """Returns a log of modded-nanogpt; its loss at step 250 depends on i."""
    gpu = "|   {}  NVIDIA H100 80GB HBM3          On  |   00000000:8D:00.0 Off |              0 |"
    lines = ["Running Python 3.12.3 (main) [GCC 13.3.0]",
             "Running PyTorch 2.10.0+cu128 compiled for CUDA 12.8", "Running Triton version 3.6.0",
             "| NVIDIA-SMI 580.159.04   Driver Version: 580.159.04     CUDA Version: 13.0 |",
             *(gpu.format(number) for number in range(8)), BORDER.rstrip(),
             f"step:0/{steps} val_loss:10.8296 train_time:0ms step_avg:0.04ms",
             f"step:1/{steps} train_time:90ms step_avg:90.29ms",
             f"step:250/{steps} val_loss:{4.5 + i / 1000:.4f} train_time:9000ms step_avg:36.00ms",
             f"step:{steps}/{steps} val_loss:{loss:.6f} train_time:{ms:.0f}ms step_avg:58.05ms",
             "peak memory allocated: 30908 MiB reserved: 46472 MiB", ""]  # fmt: skip
    return SOURCE + "\n" + BORDER + "\n".join(lines)


def write_upstream(folder: Path, results: list[tuple[float, float]], steps: int = 1390) -> Path:
    """Writes a folder with a log of modded-nanogpt for each (loss, ms)."""
    folder.mkdir(parents=True)
    for i, (loss, ms) in enumerate(results):
        (folder / f"run{i:02}.txt").write_text(upstream(loss, ms, steps=steps, i=i))
    return folder


LOSSES = (1.4633, 1.4655, 1.4457, 1.4541, 1.4698)


def write_ours(folder: Path, losses=LOSSES, hour=13, seed=100, ms=90000.4, **facts) -> Path:
    """Writes a folder like one of compare.py: logs, source, plan. Each run takes 1 ms longer than
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
    """Writes the plan of one variant, as compare.py does; changes replace what it states."""
    plan = dict(created="2026-11-21T12:59:00Z", n=len(seeds), seeds=seeds, salt="0", machine="0",
                arguments=["tiny", "--target", "0"], arms={folder.name: sha(source)})  # fmt: skip
    (folder / "plan.json").write_text(json.dumps(plan | changes))


def plan_together(*folders: Path) -> None:
    """Writes one plan into folders of write_ours, whose runs have the same seeds."""
    arms = {folder.name: sha((folder / "train_gpt.py").read_text()) for folder in folders}
    for folder in folders:
        plan = json.loads((folder / "plan.json").read_text())
        (folder / "plan.json").write_text(json.dumps(plan | {"arms": arms}))
