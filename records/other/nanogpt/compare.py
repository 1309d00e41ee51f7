"""nanoGPT on the text of `tiny`: its own model and optimizer, on the tokens that train_gpt.py sees.

    python compare.py train NANOGPT [--rate R] [--steps N] [--seed S] > LOG
    python compare.py speed NANOGPT --jax PYTHON --steps 60 [--rounds N] > LOG

NANOGPT is a clone of github.com/karpathy/nanoGPT: model.py is imported, nothing else; it needs
torch. `speed` runs train_gpt.py by PYTHON and nanoGPT by this one, by turns, both with memory in
huge pages as in run.sh. Both need the shards that data/source_code.py makes. Six layers of width
128, two heads and sequences of 256, eight a step, as in `tiny`; AdamW, clipping and cosine are as
its train_shakespeare_char.py sets them, the warm-up is 5 % of the steps. Eager, in bfloat16 by
autocast, which is faster here than its own float32.
"""

import argparse
import hashlib
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
SHARDS = ROOT / "data/source_code"
B, T, VAL_TOKENS, CONTEXT = 8, 256, 65536, 192
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def tokens_of(name: str) -> np.ndarray:
    return np.fromfile(SHARDS / name, "<u2", offset=1024).astype(np.int64)


def batches(steps: int):
    """As stream() of train_gpt.py: consecutive, a shard's tail is dropped."""
    for name in ("source_train_000001.bin", "source_train_000002.bin"):
        tokens = tokens_of(name)
        for start in range(0, (len(tokens) - 2) // (B * T) * B * T, B * T):
            if not steps:
                return
            steps -= 1
            piece = tokens[start : start + B * T + 1]
            yield np.lib.stride_tricks.sliding_window_view(piece, T + 1)[::T].copy()


def train(args: argparse.Namespace) -> None:
    import torch

    sys.path.insert(0, str(args.nanogpt))
    from model import GPT, GPTConfig

    torch.manual_seed(args.seed)
    shape = dict(block_size=T, vocab_size=257, n_layer=6, n_head=2, n_embd=128)
    model = GPT(GPTConfig(**shape, dropout=0.0, bias=False))
    optimizer = model.configure_optimizers(0.1, args.rate, (0.9, 0.99), "cpu")
    bf16 = torch.autocast("cpu", dtype=torch.bfloat16)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, bfloat16 by autocast, "
          f"seed {args.seed}, rate {args.rate}, {args.steps} steps")  # fmt: skip
    for file in (*sorted(SHARDS.glob("*.bin")), args.nanogpt / "model.py"):
        print(f"{file.name} sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}")

    def losses(tokens: np.ndarray) -> torch.Tensor:
        """Of all tokens of [sequences, T + 1], nats."""
        found = []
        with torch.no_grad(), bf16:
            for piece in torch.from_numpy(tokens).split(64):
                target = piece[:, 1:].contiguous()
                logits, _ = model(piece[:, :-1].contiguous(), target)
                flat = logits.float().reshape(target.numel(), -1), target.reshape(-1)
                found.append(torch.nn.functional.cross_entropy(*flat, reduction="none"))
        return torch.cat(found).reshape(-1, T)

    val = tokens_of("source_val_000000.bin")[: VAL_TOKENS + 1]
    views = np.lib.stride_tricks.sliding_window_view(val, T + 1)
    warmup, seconds = args.steps // 20, 0.0
    for step, batch in enumerate(batches(args.steps)):
        began = time.perf_counter()
        decay = 0.55 + 0.45 * math.cos(math.pi * max(0, step - warmup) / (args.steps - warmup))
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1.0, (step + 1) / (warmup + 1)) * decay
        batch, done = torch.from_numpy(batch), step + 1
        with bf16:
            _, loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        seconds += time.perf_counter() - began
        if done == args.steps or (done % 50 == 0 and not args.no_val):
            text = f"step:{done}/{args.steps} val_loss:{losses(views[::T].copy()).mean():.4f} "
            ms = 1e3 * seconds
            print(f"{text}train_time:{ms:.0f}ms step_avg:{ms / done:.2f}ms", flush=True)
    if done < args.steps:
        sys.exit(f"compare.py: the text ends after {done} steps")
    wide = losses(views[:: T - CONTEXT].copy())
    last = torch.cat((wide[0, :CONTEXT], wide[:, CONTEXT:].reshape(-1)))
    result = dict(rate=args.rate, steps=args.steps, tokens=args.steps * B * T, seed=args.seed,
                  val_loss=float(losses(views[::T].copy()).mean()), seconds=seconds,
                  val_loss_with_context=float(last.mean()))  # fmt: skip
    print(f"RESULT {json.dumps(result)}")


def speed(args: argparse.Namespace) -> None:
    """Mean time of a step in runs by turns: ours with windows that grow as in a full run."""
    steps = ["--steps", str(args.steps)]
    here = [sys.executable, str(Path(__file__).resolve()), "train", str(args.nanogpt), *steps]
    ours = [args.jax, "train_gpt.py", "tiny", *steps, "--save", "0", "--seed", "1"]
    ours += ["--val_every", "1000"]
    arms = {"nanogpt": [*here, "--no_val"], "jnanogpt": ours}
    env, times = os.environ | HUGE_PAGES, {name: [] for name in arms}
    print(f"{args.steps} steps, {HUGE_PAGES}")
    for i in range(args.rounds):
        for name, command in arms.items():
            out = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
            out.check_returncode()
            times[name].append(float(re.findall(r"step_avg:([\d.]+)ms", out.stdout)[-1]))
            print(f"round {i + 1} {name} {times[name][-1]:.1f} ms a step", flush=True)
    ratios = [b / a for a, b in zip(times["nanogpt"], times["jnanogpt"], strict=True)]
    print({name: f"median {statistics.median(all_):.1f} ms" for name, all_ in times.items()},
          f"ratio of pairs: median {statistics.median(ratios):.2f}, "
          f"{min(ratios):.2f} to {max(ratios):.2f}")  # fmt: skip


if __name__ == "__main__":
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("what", choices=("train", "speed"))
    cli.add_argument("nanogpt", type=lambda path: Path(path).resolve())
    cli.add_argument("--rate", type=float, default=2e-3)
    cli.add_argument("--steps", type=int, default=500)
    cli.add_argument("--seed", type=int, default=1)
    cli.add_argument("--no_val", action="store_true")
    cli.add_argument("--jax", help="a Python with the packages of requirements.txt")
    cli.add_argument("--rounds", type=int, default=8)
    chosen = cli.parse_args()
    if chosen.what == "train":
        print(Path(__file__).read_text() + "=" * 100)
    dict(train=train, speed=speed)[chosen.what](chosen)
