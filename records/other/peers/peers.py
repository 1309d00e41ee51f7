"""How long public GPTs and `tiny` take to the same loss, from the start of the process.

    .venv/bin/python records/other/peers/peers.py FOLDER [--ours NAME=CLONE ...]   about 25 minutes
    .venv/bin/python records/other/peers/peers.py --page                           README.md anew

FOLDER has a clone of each of PEERS and two virtual environments, as README.md says. Each peer's own
model is trained by its own loop at the size of nanoGPT's README recipe for CPUs, on `tiny`'s text;
child processes of this file hand them the text, the sizes and the optimizer. Every 100 steps they
keep a copy of the weights, whose losses on the 65,536 bytes that `tiny` is validated on are
computed after the end of training. A CLONE is one of this repository whose `tiny` runs too.
log.txt has a line for each validation: seconds ("wall") and process seconds ("cpu") since start.
"""

import argparse
import hashlib
import json
import os
import pickle
import platform
import re
import runpy
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TEXT = ROOT / "data/source_code"
LOG = HERE / "log.txt"
TARGET = 1.69  # nats a byte
PEERS = {  # name: repository, virtual environment, what it is
    "nanoGPT": ("karpathy/nanoGPT", "torch", "PyTorch"),
    "nanodo": ("google-deepmind/nanodo", "nanodo", "Flax Linen"),
    "jax-transformer": ("enerrio/jax-transformer", "jax", "Equinox"),
    "jax-ai-stack": ("jax-ml/jax-ai-stack", "jax", "Flax NNX, its miniGPT tutorial"),
}
# The recipe, which nanoGPT gets as flags.
RECIPE = """config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20
    --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
    --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0""".split()
STEPS, BATCH, CONTEXT, LAYERS, HEADS, WIDTH = 2000, 12, 64, 4, 4, 128
RATE, LAST_RATE, WARMUP, BETA2, DECAY, CLIP = 1e-3, 1e-4, 100, 0.99, 0.1, 1.0
VALIDATE = 250, 20  # the recipe's own validation: every so many steps, on so many batches
VOCAB = 257
KEEP = 100  # steps between two copies of the weights
VAL_TOKENS = 65536
TICKS = os.sysconf("SC_CLK_TCK")  # of a second, in which /proc counts


# ---- The peers, in a process each ----------------------------------------------------------------
def read(split: str) -> np.ndarray:
    """The tokens of a split."""
    paths = sorted(TEXT.glob(f"*_{split}_*.bin"))
    return np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in paths])


def windows() -> np.ndarray:
    """The text of the validation, in windows of the context and the token after them."""
    rows = np.lib.stride_tricks.sliding_window_view(read("val")[: VAL_TOKENS + 1], CONTEXT + 1)
    return rows[::CONTEXT].astype(np.int32)


class Feed:
    """Batches of windows from random places of a split, as nanoGPT draws them. before(step) is
    called before each."""

    batch_size = BATCH  # which one of the loops asks for

    def __init__(self, split: str, count: int | None, before: Callable = lambda step: None):
        self.tokens = read(split).astype(np.int32)
        self.rng = np.random.default_rng(1)
        self.count = count
        self.before = before
        self.step = 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator:
        done = 0
        while self.count is None or done < self.count:
            self.before(self.step)
            at = self.rng.integers(len(self.tokens) - CONTEXT, size=BATCH)
            yield self.tokens[at[:, None] + np.arange(CONTEXT + 1)]
            self.step += 1
            done += 1


class Pairs(Feed):
    """The same as pairs of inputs and targets, arrays of JAX."""

    def __iter__(self) -> Iterator:
        import jax.numpy as jnp

        for rows in super().__iter__():
            yield jnp.array(rows[:, :-1]), jnp.array(rows[:, 1:])


class Weights:
    """Copies of the weights, by step. The parent notes the time at each."""

    def __init__(self):
        self.kept = {}

    def keep(self, step: int, get: Callable) -> None:
        """Keeps get(), a tree of arrays, at the steps that are validated."""
        if step > 0 and step % KEEP == 0 and step not in self.kept:
            import jax

            self.kept[step] = jax.tree.map(np.array, get())
            print(f"\n@ step {step}", flush=True)

    def validate(self, forward: Callable) -> None:
        """Prints the losses. forward(weights, tokens) gives logits of at least CONTEXT tokens."""
        import jax
        import jax.numpy as jnp

        @jax.jit
        def loss(weights, rows):
            logits = forward(weights, rows)[:, :CONTEXT].astype(jnp.float32)
            logs = jax.nn.log_softmax(logits)
            return -jnp.take_along_axis(logs, rows[:, 1:, None], axis=-1).mean()

        for step, weights in self.kept.items():
            parts = [float(loss(weights, rows)) for rows in np.split(windows(), 16)]
            print(f"@ loss {step} {np.mean(parts)}", flush=True)


def optimizer(steps: int):
    """The recipe's: AdamW with its schedule."""
    import jax
    import optax

    rate = optax.warmup_cosine_decay_schedule(0.0, RATE, WARMUP, steps, LAST_RATE)
    matrices = lambda tree: jax.tree.map(lambda leaf: leaf.ndim >= 2, tree)
    adamw = optax.adamw(rate, b2=BETA2, weight_decay=DECAY, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(CLIP), adamw)


def run_nanogpt(clone: Path, folder: Path, steps: int) -> None:
    """nanoGPT: its train.py, as it is, with the recipe's flags."""
    text = folder / "data/tiny"
    text.mkdir(parents=True)
    for split in ("train", "val"):
        read(split).tofile(text / f"{split}.bin")
    (text / "meta.pkl").write_bytes(pickle.dumps(dict(vocab_size=VOCAB)))
    for name in ("configurator.py", "config"):
        (folder / name).symlink_to(clone / name)
    sys.path.insert(0, str(clone))
    import model
    import torch

    kept = {}
    models = []
    configure = model.GPT.configure_optimizers

    def configure_and_keep(self, *args):
        """The model's optimizer, whose step() keeps copies of the weights."""
        models.append(self)
        adamw = configure(self, *args)
        step = adamw.step
        count = 0

        def step_and_keep(*args, **kwargs):
            nonlocal count
            result = step(*args, **kwargs)
            count += 1
            if count % KEEP == 0:
                state = self.state_dict()
                kept[count] = {name: value.clone() for name, value in state.items()}
                print(f"@ step {count}", flush=True)
            return result

        adamw.step = step_and_keep
        return adamw

    model.GPT.configure_optimizers = configure_and_keep
    sys.argv = ["train.py", *RECIPE, "--dataset=tiny", "--out_dir=out"]
    if steps != STEPS:
        sys.argv += [f"--max_iters={steps}", f"--lr_decay_iters={steps}"]
    runpy.run_path(str(clone / "train.py"), run_name="__main__")
    rows = torch.from_numpy(windows()).long()
    trained = models[0].eval()
    for step, state in kept.items():
        trained.load_state_dict(state)
        with torch.no_grad():
            parts = []
            for part in rows.split(64):
                parts.append(trained(part[:, :-1], part[:, 1:].contiguous())[1].item())
        print(f"@ loss {step} {np.mean(parts)}", flush=True)


def run_nanodo(clone: Path, folder: Path, steps: int) -> None:
    """nanodo: its train_and_evaluate() with its configuration, the recipe's values in it. Without
    its checkpoints, statistics of each layer and a log of each step, in float32 (on CPUs the faster
    one)."""
    sys.path.insert(0, str(clone))
    from nanodo import data, metrics, train
    from nanodo.configs import default

    every, batches = VALIDATE
    c = default.get_config()
    with c.unlocked():
        c.update(batch_size=BATCH, workdir=str(folder), checkpoint=False, eval_every_steps=every)
        c.update(eval_steps=batches, pygrain_worker_count=0, eval_max_target_length=CONTEXT + 1)
        c.update(log_internal_metrics=False, write_train_metrics_every_steps=100)
        # Of a window of L tokens it predicts L - 1.
        c.model.update(D=WIDTH, H=HEADS, L=CONTEXT + 1, N=LAYERS, F=4 * WIDTH, dtype="float32")
        c.opt.update(num_train_steps=steps, peak_learning_rate=RATE, init_learning_rate=0.0)
        c.opt.update(final_learning_rate=LAST_RATE, warmup_steps=WARMUP, weight_decay=DECAY)
        c.opt.update(b2=BETA2, clip_by_global_norm=CLIP)
    weights = Weights()
    trainers = []
    do_step = train.Trainer.do_step

    def keep_and_do_step(self, step, batch):
        """A step, before which the weights are kept."""
        trainers[:] = [self]
        weights.keep(step, lambda: self.state.params)
        return do_step(self, step, batch)

    def feed(*, split, num_epochs, **_):
        """Batches in place of those of a data set of tfds."""
        return Feed("train", None) if num_epochs is None else Feed("val", batches)

    # Its validation masks by floats, which jax refuses since nanodo's last commit.
    average = metrics.Average.from_array
    metrics.Average.from_array = lambda x, mask: average(x, mask=mask.astype(bool))
    train.Trainer.do_step = keep_and_do_step
    data.get_py_tokenizer = lambda path: SimpleNamespace(GetPieceSize=lambda: VOCAB)
    data.py_batched_tfds = feed
    train.train_and_evaluate(c)
    apply = trainers[0].state.apply_fn
    weights.validate(lambda params, rows: apply(dict(params=params), rows))


def run_equinox(clone: Path, folder: Path, steps: int) -> None:
    """jax-transformer: its train(), in epochs as long as the recipe's time between validations."""
    sys.path.insert(0, str(clone))
    import equinox as eqx
    import jax
    from transformer.model import GPTModel
    from transformer.train import train

    every, batches = VALIDATE
    weights = Weights()
    config = dict(vocab_size=VOCAB, context_length=CONTEXT, emb_dim=WIDTH, n_heads=HEADS)
    config |= dict(n_layers=LAYERS, drop_rate=0.0, qkv_bias=False)
    model_key, key = jax.random.split(jax.random.key(21))
    model = GPTModel(config, model_key)

    def keep(step: int) -> None:
        """Keeps the weights, which are a local variable of train()."""
        frame = sys._getframe()
        while frame.f_code is not train.__code__:
            frame = frame.f_back
        weights.keep(step, lambda: eqx.filter(frame.f_locals["model"], eqx.is_array))

    feeds = Pairs("train", every, keep), Pairs("val", batches)
    trained, _ = train(model, optimizer(steps), *feeds, key, max(1, steps // every))
    weights.keep(steps, lambda: eqx.filter(trained, eqx.is_array))
    static = eqx.filter(trained, eqx.is_array, inverse=True)

    def forward(arrays, rows):
        model = eqx.combine(arrays, static)
        return jax.vmap(lambda row: model(row, inference=True))(rows[:, :-1])

    weights.validate(forward)


def run_nnx(clone: Path, folder: Path, steps: int) -> None:
    """jax-ai-stack: the cells of its tutorial to the end of training. It validates nowhere, but
    prints a text of CONTEXT tokens every 200 steps."""
    page = (clone / "docs/source/JAX_for_LLM_pretraining.md").read_text()
    page = page.partition("Visualize the training loss.")[0]
    cells = re.findall(r"^```\{code-cell\}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    code = "\n".join(re.sub(r"\A---\n.*?^---\n", "", cell, flags=re.M | re.S) for cell in cells)
    changes = {
        r"^[!:].*$": "",
        r"^( *)batch_size = .*$": rf"\1batch_size = {BATCH}",
        r"^maxlen = .*$": f"maxlen = {CONTEXT + 1}",  # the last target of a window is no byte
        r"^embed_dim = .*$": f"embed_dim = {WIDTH}",
        r"^num_heads = .*$": f"num_heads = {HEADS}",
        r"^feed_forward_dim = .*$": f"feed_forward_dim = {4 * WIDTH}",
        r"^text_dl = .*$": "text_dl = feed",
        r"optax\.adam\(1e-3\)": "recipe",
        r"(self\.transformer_blocks) = \[([^]]*)\]": r"\1 = nnx.List([\2])",
    }
    for pattern, text in changes.items():
        code, count = re.subn(pattern, text, code, flags=re.MULTILINE)
        if not count:
            raise ValueError(f"the tutorial has no {pattern}")

    def encode(text: str, **_) -> list[int]:
        return [VOCAB - 1] if text == "<|endoftext|>" else list(text.encode())

    def decode(tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    import flax
    from flax import nnx

    # Flax 0.12 refuses two things of the tutorial: vectors sharded as if they were matrices, and
    # a list of modules, which is an nnx.List above.
    flax.config.update("flax_always_shard_variable", False)
    tokenizer = SimpleNamespace(n_vocab=VOCAB, encode=encode, decode=decode)
    sys.modules["tiktoken"] = SimpleNamespace(get_encoding=lambda name: tokenizer)
    weights = Weights()
    get = lambda: nnx.to_pure_dict(nnx.state(names["model"], nnx.Param))

    class Columns(Feed):
        """Batches as its loader stacks them: a row for each place of a window."""

        def __iter__(self) -> Iterator:
            for rows in super().__iter__():
                yield rows.T

    feed = Columns("train", steps, lambda step: weights.keep(step, get))
    names = dict(__name__="__main__", feed=feed, recipe=optimizer(steps))
    exec(compile(code, "tutorial", "exec"), names)
    weights.keep(steps, get)
    graph, state = nnx.split(names["model"])

    def forward(arrays, rows):
        nnx.replace_by_pure_dict(state, arrays)
        return nnx.merge(graph, state)(rows)

    weights.validate(forward)


CHILDREN = dict(zip(PEERS, (run_nanogpt, run_nanodo, run_equinox, run_nnx), strict=True))


# ---- Running -------------------------------------------------------------------------------------
class Clock:
    """Follows a process: what it prints, and the seconds that it has taken."""

    def __init__(self, command: list, folder: Path, cores: list[int], **variables):
        threads = {f"{name}_NUM_THREADS": str(len(cores)) for name in ("OMP", "MKL", "OPENBLAS")}
        env = os.environ | threads | dict(PYTHONUNBUFFERED="1", JAX_PLATFORMS="cpu") | variables
        env |= dict(GLIBC_TUNABLES="glibc.malloc.hugetlb=1")  # as run.sh sets it
        if sys.version_info < (3, 12):  # and this for jax 0.10.2, whose issue 39103 needs it
            env |= dict(XLA_FLAGS="--xla_cpu_experimental_ynn_fusion_type=")
        self.start = time.perf_counter()
        self.process = subprocess.Popen(
            ["taskset", "-c", ",".join(map(str, cores)), *command],
            cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            stdin=subprocess.DEVNULL, errors="replace",
        )  # fmt: skip

    def now(self) -> dict:
        """Seconds, and process seconds of all threads and of children that have ended."""
        wall = time.perf_counter() - self.start
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        cpu = sum(map(int, fields[11:15])) / TICKS
        return dict(wall=round(wall, 2), cpu=round(cpu, 2))

    def lines(self) -> Iterator[tuple[str, dict]]:
        """Each line with now(). Raises CalledProcessError at the end if the process failed."""
        for line in self.process.stdout:
            yield line.rstrip("\n"), self.now()
        if self.process.wait():
            raise subprocess.CalledProcessError(self.process.returncode, self.process.args)


def follow(clock: Clock, pattern: str, about: dict) -> list[dict]:
    """The entries of a run, a line of whose output matches at each validation."""
    entries = []
    for line, now in clock.lines():
        found = re.match(pattern, line)
        if found:
            loss = dict(val_loss=float(found[2])) if found.lastindex > 1 else {}
            entries.append(about | dict(step=int(found[1])) | now | loss)
        lost = re.match(r"@ loss (\d+) (\S+)", line)
        if lost:
            (item,) = [item for item in entries if item["step"] == int(lost[1])]
            item["val_loss"] = round(float(lost[2]), 6)
    return entries


def commit(clone: Path) -> str:
    """The commit of a clone."""
    git = ["git", "-C", str(clone), "rev-parse", "HEAD"]
    return subprocess.check_output(git, text=True).strip()


def versions(python: Path) -> dict[str, str]:
    """Of the packages that matter, in a virtual environment."""
    code = """import importlib.metadata as m, json
found = {d.name.lower(): d.version for d in m.distributions()}
names = "torch jax flax equinox optax tensorflow-cpu numpy".split()
print(json.dumps({name: found[name] for name in names if name in found}))"""
    return json.loads(subprocess.check_output([python, "-c", code], text=True))


def run_peer(name: str, args: argparse.Namespace, cores: list[int]) -> list[dict]:
    """Trains a peer."""
    clone = args.folder / name
    python = args.folder / f"env-{PEERS[name][1]}" / "bin/python"
    about = dict(who=name, cores=len(cores))
    head = about | dict(repository=PEERS[name][0], commit=commit(clone), load=os.getloadavg()[0])
    head |= dict(versions=versions(python))
    with tempfile.TemporaryDirectory() as folder:
        command = [python, Path(__file__).resolve(), "--child", name, clone, folder, args.steps]
        clock = Clock([*map(str, command)], Path(folder), cores)
        return [head, *finish(clock, r"@ step (\d+)", about)]


def run_ours(name: str, clone: Path, flags: list, args: argparse.Namespace, cores: list[int]):
    """Trains `tiny` of a clone, with an empty compilation cache."""
    flags = ["--seed", "1", *flags]
    flags += ["--steps", str(args.tiny_steps)] if args.tiny_steps else []
    about = dict(who=name, cores=len(cores))
    source = hashlib.sha256((clone / "train_gpt.py").read_bytes()).hexdigest()
    head = about | dict(commit=commit(clone), train_gpt=source, flags=" ".join(flags))
    head |= dict(load=os.getloadavg()[0], versions=versions(Path(sys.executable)))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "run/launch.py", "train_gpt.py", "tiny", *flags]
        clock = Clock(command, clone, cores, JAX_COMPILATION_CACHE_DIR=folder)
        return [head, *finish(clock, r"step:(\d+)/\d+ val_loss:(\S+)", about)]


def finish(clock: Clock, pattern: str, about: dict) -> list[dict]:
    """follow(), with what the process wrote to stderr if it failed."""
    import threading

    errors = []
    reader = threading.Thread(target=lambda: errors.extend(clock.process.stderr))
    reader.start()
    try:
        return follow(clock, pattern, about)
    except subprocess.CalledProcessError:
        reader.join()
        print("".join(errors[-40:]), file=sys.stderr)
        raise


# ---- The page ------------------------------------------------------------------------------------
def passes(entries: list[dict]) -> dict | None:
    """The first validation at or below TARGET."""
    return next((item for item in entries if item["val_loss"] <= TARGET), None)


def page(entries: list[dict]) -> str:
    """The part of README.md that the log makes."""
    about = entries[0]
    heads = [item for item in entries if "commit" in item]
    runs = {(item["who"], item["cores"]): [] for item in heads}
    for item in entries:
        if "val_loss" in item:
            runs[item["who"], item["cores"]].append(item)
    cores = sorted({number for _, number in runs})
    lines = []
    for number in cores:
        found = {who: passes(run) for (who, n), run in runs.items() if n == number}
        peers = {who: item["wall"] for who, item in found.items() if item and who in PEERS}
        best = min(peers, key=peers.get, default=None)
        label = "One core" if number == 1 else f"{number} cores"
        text = f"{label}: no peer passes {TARGET}."
        if best:
            text = f"{label}: the fastest peer is {best} with {peers[best]:.0f} s."
            for who, item in found.items():
                if item and who not in PEERS:
                    ratio = item["wall"] / peers[best]
                    met = "met" if ratio <= 0.35 else "not met"
                    text += f" {who} needs {ratio:.2f} of it (goal 0.35: {met})."
        lines += [*textwrap.wrap(text, 110, break_on_hyphens=False), ""]
    title = "".join(f" {n} core{'s' * (n > 1)}: wall, CPU | of this, load |" for n in cores)
    lines += [f"| | at | step |{title} loss at the end |", "|---" * (4 + 2 * len(cores)) + "|"]
    every = list(dict.fromkeys(who for who, _ in runs))
    for who in [name for name in PEERS if name in every] + [n for n in every if n not in PEERS]:
        head = next(item for item in heads if item["who"] == who)
        steps, cells, ends = [], "", []
        for number in cores:
            run = runs.get((who, number), [])
            load = [item["load"] for item in heads if (item["who"], item["cores"]) == (who, number)]
            item = passes(run)
            last = item or (run[-1] if run else None)
            if not last:
                cells += " – | – |"
                continue
            steps.append(str(item["step"]) if item else "not reached")
            ends.append(f"{run[-1]['val_loss']:.3f}")
            cells += f" {last['wall']:.0f}, {last['cpu']:.0f} | {load[0]:.1f} |"
        name = who if who in PEERS else f"**{who}**"
        lines.append(
            f"| {name} | {head['commit'][:7]} | {', '.join(dict.fromkeys(steps))} |{cells}"
            f" {', '.join(dict.fromkeys(ends))} |"
        )
    packages = {f"{key} {value}" for item in heads for key, value in item["versions"].items()}
    text = f"""{about["date"]}, {about["processor"]}, Python {about["python"]}, n = 1 each.
    {", ".join(sorted(packages))}."""
    lines += ["", *textwrap.wrap(" ".join(text.split()), 110, break_on_hyphens=False)]
    return "\n".join(lines) + "\n"


def write_page() -> None:
    """Replaces the part of README.md between its two marks."""
    path = HERE / "README.md"
    entries = [json.loads(line) for line in LOG.read_text().splitlines()]
    before, begin, rest = path.read_text().partition("<!-- peers: begin -->\n")
    _, end, after = rest.partition("<!-- peers: end -->")
    path.write_text(before + begin + page(entries) + end + after)


def main() -> None:
    """The command line."""
    if sys.argv[1:2] == ["--child"]:
        name, clone, folder, steps = sys.argv[2:]
        CHILDREN[name](Path(clone), Path(folder), int(steps))
        return
    if sys.argv[1:] == ["--page"]:
        write_page()
        return
    form = argparse.RawDescriptionHelpFormatter
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    cli.add_argument("folder", type=lambda name: Path(name).absolute())
    cli.add_argument("--ours", nargs="*", default=[], help="NAME=CLONE, besides this one")
    cli.add_argument("--only", nargs="*", help="names of those to run; the log keeps the others")
    cli.add_argument("--cores", nargs="*", default=["0", "0,1"], help="numbers of cores")
    cli.add_argument("--log", type=Path, help="another log, for a trial")
    cli.add_argument("--steps", type=int, default=STEPS, help="of the peers, for a trial")
    cli.add_argument("--tiny_steps", type=int, default=0, help="of `tiny`, for a trial")
    args = cli.parse_args()
    log = args.log or LOG
    if log == LOG and (args.steps != STEPS or args.tiny_steps):
        cli.error("a trial needs --log")
    model = re.search("model name\\s*: (.*)", Path("/proc/cpuinfo").read_text())
    head = dict(date=f"{datetime.now(UTC):%Y-%m-%d}", processor=model and model[1])
    head |= dict(python=platform.python_version(), steps=args.steps, target=TARGET)
    subprocess.run([sys.executable, "data/source_code.py"], cwd=ROOT, check=True)
    clones = {"`tiny`": ROOT}
    for pair in args.ours:
        name, _, path = pair.partition("=")
        clones[f"`{name}`"] = Path(path).resolve()
    jobs = {name: lambda cores, name=name: run_peer(name, args, cores) for name in PEERS}
    for name, clone in clones.items():
        often = f"{name}, --val_every 10"
        for label, flags in ((name, []), (often, ["--val_every", "10"])):
            jobs[label] = lambda cores, label=label, clone=clone, flags=flags: run_ours(
                label, clone, flags, args, cores
            )
    entries = [head]
    if args.only and log.exists():
        entries += [json.loads(line) for line in log.read_text().splitlines()[1:]]
    for numbers in args.cores:
        cores = [int(number) for number in numbers.split(",")]
        for name, job in jobs.items():
            if args.only and name.replace("`", "") not in args.only:
                continue
            new = job(cores)
            run = {key: new[0][key] for key in ("who", "cores")}.items()
            entries = [item for item in entries if not run <= item.items()] + new
            print(new[-1], "first:", passes(new[1:]), flush=True)
            log.write_text("".join(json.dumps(item) + "\n" for item in entries))
    print(page(entries))


if __name__ == "__main__":
    main()
