"""How long nanoGPT and `tiny` take for the same loss, one after the other on the same cores.

    .venv/bin/python records/other/nanogpt/race.py NANOGPT PYTHON [--cores 0]     about 6 minutes
    .venv/bin/python records/other/nanogpt/race.py --page                         README.md anew

NANOGPT is a clone of github.com/karpathy/nanoGPT, PYTHON one that has torch and numpy. nanoGPT's
own train.py runs unchanged with the flags that its README gives for CPUs, on `tiny`'s text. Its
checkpoints are copied while it runs, and validated at the end on the 65,536 bytes that `tiny` is
validated on. Then train_gpt.py runs, on the same text. Both have one thread on each of --cores, and
memory in huge pages, as run.sh sets it. race.txt has a line for each validation: process seconds
("cpu") and seconds ("wall") of training alone, without start, compilation, and validations, and of
everything.
"""

import argparse
import hashlib
import json
import math
import os
import pickle
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TEXT = ROOT / "data/source_code"
LOG = HERE / "race.txt"
RECIPE = """config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20
    --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
    --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0""".split()
ITERS = 2000  # steps, of the recipe
CONTEXT = 64  # tokens, of the recipe
VAL_TOKENS = 65536
TICKS = os.sysconf("SC_CLK_TCK")  # of a second, in which /proc counts


# ---- Running -------------------------------------------------------------------------------------
class Clock:
    """Follows a process: what it prints, and the seconds that it has taken."""

    def __init__(self, command: list[str], folder: Path, cores: list[int]):
        threads = {f"{name}_NUM_THREADS": str(len(cores)) for name in ("OMP", "MKL", "OPENBLAS")}
        env = os.environ | threads | dict(PYTHONUNBUFFERED="1", JAX_PLATFORMS="cpu")
        env |= dict(GLIBC_TUNABLES="glibc.malloc.hugetlb=1")
        self.start = time.perf_counter()
        self.process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cores)), *command],
            cwd=folder, env=env, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def now(self) -> np.ndarray:
        """Process seconds of all threads, and seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / TICKS  # user's and the system's
        return np.array([cpu, time.perf_counter() - self.start])

    def lines(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each line with now(). Raises CalledProcessError at the end if the process failed."""
        for line in self.process.stdout:
            yield line.rstrip("\n"), self.now()
        if self.process.wait():
            raise subprocess.CalledProcessError(self.process.returncode, self.process.args)


def entry(who: str, step: int, train: np.ndarray, total: np.ndarray, **more) -> dict:
    """A line of the log."""
    names = ("train_cpu", "train_wall", "cpu", "wall")
    seconds = [round(float(value), 2) for value in (*train, *total)]
    return dict(who=who, step=step) | dict(zip(names, seconds, strict=True)) | more


def run_nanogpt(args: argparse.Namespace, folder: Path) -> list[dict]:
    """Trains nanoGPT in a folder, and validates its checkpoints."""
    text = folder / "data/tiny"
    text.mkdir(parents=True)
    for split in ("train", "val"):
        paths = sorted(TEXT.glob(f"*_{split}_*.bin"))
        np.concatenate([read(path) for path in paths]).tofile(text / f"{split}.bin")
    (text / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=257)))
    for name in ("configurator.py", "config"):
        (folder / name).symlink_to(args.nanogpt / name)
    mine = ["--dataset=tiny", "--out_dir=out", "--always_save_checkpoint=True"]
    mine += [f"--max_iters={args.iters}", f"--lr_decay_iters={args.iters}"]
    mine += [f"--eval_interval={max(1, args.iters // 8)}"]
    clock = Clock([args.python, args.nanogpt / "train.py", *RECIPE, *mine], folder, args.cores)
    entries = []
    idle = np.zeros(2)  # start, and validations
    before = np.zeros(2)
    saves = False
    for line, now in clock.lines():
        found = re.match(r"step (\d+): train loss \S+, val loss (\S+)", line)
        if found:
            step = int(found[1])
            idle += now if step == 0 else now - before
            about = dict(own_estimate=float(found[2]))
            entries.append(entry("nanogpt", step, now - idle, now, **about))
            print(entries[-1], flush=True)
        if saves and line.startswith("iter "):
            shutil.copy(folder / "out/ckpt.pt", folder / f"{step}.pt")
        saves = line.startswith("saving checkpoint") or (saves and not line.startswith("iter "))
        before = now
    entries = entries[1:]  # it saves no checkpoint at step 0
    steps = [str(item["step"]) for item in entries]
    command = [args.python, __file__, "--validate", str(args.nanogpt), str(folder), *steps]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    losses = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [item | loss for item, loss in zip(entries, losses, strict=True)]


def run_tiny(args: argparse.Namespace) -> list[dict]:
    """Trains `tiny`. Between the lines of the training loss and of the validation loss of the same
    step, it validates."""
    flags = ["--seed", "1", "--save", "0", "--target", "0", "--val_every", "10"]
    flags += ["--steps", str(args.steps)] if args.steps else []
    clock = Clock([sys.executable, "train_gpt.py", "tiny", *flags], ROOT, args.cores)
    entries = []
    idle = np.zeros(2)
    before = np.zeros(2)
    for line, now in clock.lines():
        found = re.match(r"step:(\d+)/\d+ val_loss:(\S+)", line)
        if found:
            step = int(found[1])
            idle += now if step == 0 else now - before
            entries.append(entry("tiny", step, now - idle, now, val_loss=float(found[2])))
            print(entries[-1], flush=True)
        before = now
    return entries


def read(path: Path) -> np.ndarray:
    """The tokens of a shard."""
    return np.fromfile(path, "<u2", offset=1024)


def validate(nanogpt: Path, folder: Path, steps: list[str]) -> None:
    """Prints the losses of checkpoints, for PYTHON: on all of the text in windows of 64, and for
    the last one, with four times the work, of the tokens that have at least 48 before them."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(nanogpt))
    from model import GPT, GPTConfig

    (path,) = TEXT.glob("*_val_*.bin")
    tokens = torch.from_numpy(read(path)[: VAL_TOKENS + 1].astype(np.int64))
    for step in steps:
        saved = torch.load(folder / f"{step}.pt", map_location="cpu")
        model = GPT(GPTConfig(**saved["model_args"])).eval()
        model.load_state_dict(saved["model"])

        def losses(stride: int, model=model) -> torch.Tensor:
            """Of each token of each window, (windows, 64)."""
            rows = tokens.unfold(0, CONTEXT + 1, stride)
            with torch.no_grad():
                parts = []
                for part in rows.split(64):
                    target = part[:, 1:].contiguous()
                    logits, _ = model(part[:, :-1].contiguous(), target)
                    flat = logits.flatten(0, 1), target.flatten()
                    parts.append(torch.nn.functional.cross_entropy(*flat, reduction="none"))
            return torch.cat(parts).reshape(-1, CONTEXT).double()

        found = dict(val_loss=losses(CONTEXT).mean().item())
        if step == steps[-1]:
            last = losses(CONTEXT // 4)[:, -CONTEXT // 4 :]
            found |= dict(val_loss_with_context=last.mean().item())
        print(json.dumps(found))


def head(args: argparse.Namespace) -> dict:
    """The log's first line: what ran, and on what."""
    code = "import torch; print(torch.__version__)"
    torch = subprocess.check_output([args.python, "-c", code], text=True).strip()
    git = ["git", "-C", str(args.nanogpt), "rev-parse", "HEAD"]
    commit = subprocess.check_output(git, text=True).strip()
    model = re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    jax = subprocess.check_output([sys.executable, "-c", "import jax; print(jax.__version__)"])
    source = hashlib.sha256((ROOT / "train_gpt.py").read_bytes()).hexdigest()
    return dict(
        who="head", date=f"{datetime.now(UTC):%Y-%m-%d}", cores=len(args.cores), torch=torch,
        jax=jax.decode().strip(), python=platform.python_version(), processor=model and model[1],
        nanogpt=commit, train_gpt=source, iters=args.iters, load=os.getloadavg()[0],
    )  # fmt: skip


# ---- The page ------------------------------------------------------------------------------------
def crossing(entries: list[dict], loss: float, key: str) -> float:
    """When a curve falls to a loss: between two validations by a line."""
    for a, b in zip(entries, entries[1:], strict=False):
        if b["val_loss"] <= loss:
            part = (a["val_loss"] - loss) / (a["val_loss"] - b["val_loss"])
            return a[key] + part * (b[key] - a[key])
    return math.nan


def page(entries: list[dict]) -> str:
    """The part of README.md that the log makes."""
    (about,) = [item for item in entries if item["who"] == "head"]
    nanogpt = [item for item in entries if item["who"] == "nanogpt"]
    tiny = [item for item in entries if item["who"] == "tiny"]
    last = nanogpt[-1]
    passed = crossing(tiny, last["val_loss"], "train_cpu")
    waited = crossing(tiny, last["val_loss"], "wall")
    text = f"""nanoGPT's recipe reached **{last["val_loss"]:.3f}** nats per byte after
    **{last["train_cpu"]:.0f} CPU seconds** of training; `tiny` passes {last["val_loss"]:.3f} after
    **{passed:.0f}** ({last["train_cpu"] / passed:.0f} times fewer). From the start of the process,
    with compilation and validations, it is {last["wall"]:.0f} s against {waited:.0f}, of which
    `tiny` compiles and validates for {tiny[0]["wall"]:.0f} before its first step. It ends at
    {tiny[-1]["val_loss"]:.3f} after {tiny[-1]["train_cpu"]:.0f} CPU seconds of training. Of the
    bytes that have at least 48 before them in their window, nanoGPT's loss is
    {last["val_loss_with_context"]:.3f}. {about["date"]}, cores: {about["cores"]} of
    {about["processor"]}, torch {about["torch"]}, jax {about["jax"]}, nanoGPT at
    {about["nanogpt"][:7]}, n = 1 each; the machine's load before the start was
    {about["load"]:.2f}."""
    lines = textwrap.wrap(" ".join(text.split()), 110, break_on_hyphens=False)
    lines += [
        "",
        "| | step | CPU seconds of training | seconds in all, with start and validations | loss |",
        "|---|---|---|---|---|",
    ]
    shown = [item for item in tiny if item["step"] % 20 == 0 or item is tiny[-1]]
    for item in nanogpt + shown:
        name = "nanoGPT" if item["who"] == "nanogpt" else "`tiny`"
        seconds = f"{item['train_cpu']:.1f} | {item['wall']:.0f}"
        lines.append(f"| {name} | {item['step']} | {seconds} | {item['val_loss']:.4f} |")
    return "\n".join(lines) + "\n"


def read_log() -> list[dict]:
    """The lines of race.txt."""
    return [json.loads(line) for line in LOG.read_text().splitlines()]


def write_log(text: str, is_trial: bool) -> Path:
    """Writes the log, which is evidence and so of a whole race; of a trial, a temporary file."""
    path = LOG
    if is_trial:
        path = Path(tempfile.mkdtemp(prefix="race_")) / LOG.name
    path.write_text(text)
    return path


def write_page() -> None:
    """Replaces the part of README.md between its two marks."""
    path = HERE / "README.md"
    before, begin, rest = path.read_text().partition("<!-- race: begin -->\n")
    _, end, after = rest.partition("<!-- race: end -->")
    path.write_text(before + begin + page(read_log()) + end + after)


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--validate"]:
        validate(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
        return
    if sys.argv[1:] == ["--page"]:
        write_page()
        return
    form = argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    cli.add_argument("nanogpt", type=lambda name: Path(name).resolve())
    cli.add_argument("python", help="with torch and numpy")
    cli.add_argument("--cores", default="0", help="numbers of cores, 0 or 0,1")
    trial = "fewer to try the script, which then writes another log"
    cli.add_argument("--iters", type=int, default=ITERS, help=f"of nanoGPT; {trial}")
    cli.add_argument("--steps", type=int, default=0, help=f"of tiny; {trial}")
    args = cli.parse_args()
    args.cores = [int(number) for number in args.cores.split(",")]
    args.python = str(Path(args.python).absolute())  # a venv's is a link that must not be resolved
    entries = [head(args)]
    print(entries[0], flush=True)
    subprocess.run([sys.executable, "data/source_code.py"], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory() as folder:
        entries += run_nanogpt(args, Path(folder))
    entries += run_tiny(args)
    text = "".join(json.dumps(item) + "\n" for item in entries)
    print(page(entries))
    print("log:", write_log(text, is_trial=args.iters != ITERS or args.steps > 0))


if __name__ == "__main__":
    main()
