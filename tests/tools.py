"""What several test files need: small configurations, random weights, meshes, tokens, shards."""

import dataclasses
import functools
import os
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import train_gpt
from train_gpt import BANK, EXCHANGED, LONG, LOOKUP, SHORT, Layer, Stage

ROOT = Path(__file__).resolve().parent.parent
FORMATS = "compute", "head_forward", "head_backward"
FLOAT32 = dict.fromkeys(FORMATS, "float32")
FLOAT32_FLAGS = [argument for name in FORMATS for argument in (f"--{name}", "float32")]

# A small model that uses every technique.
MINI_LAYERS = (
    Layer(SHORT, paired_heads=True, xsa=True, value_table=0),
    Layer(LONG, key_offset=True, key_start=True, xsa=True, head_gate=True, ngram=True),
    Layer(SHORT, paired_heads=True, ngram=True, value_table=1, new_gates=True),
    Layer(None, skip_from=1, x0=False),
    Layer(SHORT, xsa=True, ngram=True, attend_to=2),
    Layer(LONG, key_offset=True, head_gate=True, dc=True, value_table=2, attend_to=2,
          x0=False, ngram=True, mudd=("input", "layer2")),
)  # fmt: skip
MINI_STAGES = (
    Stage(10, 512, short=8, long=16, max_doc=0, lr=1.0, targets=(1.0, (0.5, 0.0))),
    Stage(10, 512, short=16, long=48, max_doc=0, lr=1.5),
    Stage(0, 512, short=16, long=64, max_doc=0, lr=1.0),
)
MINI = dataclasses.replace(
    train_gpt.PRESETS["tiny"],
    layers=MINI_LAYERS,
    stages=MINI_STAGES,
    mudd_head=(("input", 0.0), ("layer2", -0.5), ("layer4", 0.0), ("value0", 0.0), ("layer1", 0.0)),
    D=32, H=2, F=64, R=8, ngram_buckets=512, ngrams=(2, 3), pointer=4, pointer_D=8,
    pointer_band=16, batch=8, microbatch=8,
    adam_lr=0.008, adam_every=2, head_chunk=32,
    head_forward="float8_e4m3fn", head_backward="float8_e5m2",
    dc_window=12, attention="band", val_T=128, val_tokens=2048, seed=3, cooldown_start=8 / 20,
    cooldown_end=18 / 20, momentum_warmup=5 / 20, momentum_cooldown=4 / 20, untie=13 / 20,
)  # fmt: skip
MINI32 = dataclasses.replace(MINI, **FLOAT32)

SMALL = (  # flags of train_gpt.py for a run that takes seconds
    "--D 32 --H 2 --F 64 --R 8 --ngram_buckets 512 --head_chunk 16 --dc_window 12 --val_T 64 "
    "--val_tokens 1024 --batch 8 --adam_every 2 --pointer 4 --pointer_D 8 "
    "--head_forward float8_e4m3fn --head_backward float8_e5m2 --target 0"
).split()


def with_tiny(source: str, layers: str, stages: str) -> str:
    """`source` with other layers and stages in its preset `tiny`; both are given as code."""
    main = 'if __name__ == "__main__":'
    assert source.count(main) == 1
    change = f"layers=({layers},), stages=({stages},), mudd_head=(), head_chunk=32"
    preset = f'PRESETS["tiny"] = dataclasses.replace(PRESETS["tiny"], {change})'
    return source.replace(main, f"{preset}\n\n\n{main}")


# What the trained run of conftest.py has learned.
ALPHABET = "ABCDEFGHIJKLMNOP"
PHRASE = "the cat sat on a mat, "


def train_a_run(folder: Path) -> None:
    """Trains a small model in the folder, in a process. It learns two kinds of documents by heart:
    ALPHABET, and 120 characters of PHRASE repeatedly. Its validation shard has documents of 1 to
    100 random tokens."""
    folder.mkdir()
    alphabet = [256, *ALPHABET.encode()]
    tokens = []
    for first in range(600):
        phrases = (PHRASE * 7)[first % len(PHRASE) :][:120]
        tokens += [256, *phrases.encode(), *alphabet, *alphabet]
    write_shard(folder / "x_train_000001.bin", tokens)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 20, 1500)
    tokens[[0, 130, 131, *np.cumsum(rng.integers(1, 100, 22))]] = 256
    write_shard(folder / "x_val_000000.bin", tokens)
    layers = (
        Layer(SHORT, paired_heads=True, key_offset=True, value_table=0),
        Layer(LONG, xsa=True, key_start=True, ngram=True, attend_to=0),
    )
    stages = (Stage(80, 256, short=12, long=30, max_doc=0, lr=4.0),)
    # In this way, the log has the unchanged source of train_gpt.py.
    program = (
        "import dataclasses, sys, train_gpt\n"
        "from train_gpt import Layer, Stage\n"
        f"changes = dict(layers={layers}, stages={stages}, mudd_head=(), head_chunk=32)\n"
        "tiny = dataclasses.replace(train_gpt.PRESETS['tiny'], **changes)\n"
        "train_gpt.PRESETS['tiny'] = tiny\n"
        "train_gpt.main(sys.argv[1:])\n"
    )
    flags = [*SMALL, *FLOAT32_FLAGS, "--adam_every", "1", "--seed", "1", "--val_every", "80"]
    command = [sys.executable, "-c", program, "tiny", *flags, "--data", "."]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert done.stdout.splitlines()[-1].startswith("RESULT {")


def write_shard(path: Path, tokens, magic=20240520, version=1, count=None) -> Path:
    """A file of tokens; magic, version and count are written into its header as they are given."""
    header = np.zeros(256, "<i4")
    header[0] = magic
    header[1] = version
    header[2] = len(tokens) if count is None else count
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return path


def text(length: int, first: int = 0) -> np.ndarray:
    """Tokens that are easy to learn: documents of 50 tokens that count from 0 to 15, repeatedly."""
    return np.where(np.arange(length) % 50, (np.arange(length) + first) % 16, 256)


def make_mesh(devices: int) -> Mesh:
    return train_gpt.make_mesh(jax.devices()[:devices])


def sequences(c, T: int, seed: int = 0, documents: int = 4, count: int = 8) -> np.ndarray:
    """(count, T + 1) random tokens in which documents start at random places. Six tokens are there
    twice, for [pointer]."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, c.vocab - 1, (count, T + 1)).astype(np.int32)
    tokens[tokens == c.eot] = 0
    if T >= 12:
        tokens[:, 6:12] = tokens[:, :6]
    for row in tokens:
        row[rng.choice(T, documents, replace=False)] = c.eot
    return tokens


def place_on(mesh: Mesh, tokens: np.ndarray) -> jax.Array:
    return jax.device_put(tokens, NamedSharding(mesh, PartitionSpec("fsdp")))


def noise(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Normal numbers that depend on the name and the seed alone."""
    return np.random.default_rng([zlib.crc32(name.encode()), seed]).normal(size=shape).astype("f4")


def ngram_rows(w: dict, tokens: jax.Array, c: train_gpt.Config) -> dict:
    """Weights as forward() takes them: with the rows of the n-gram table that tokens (B, T) use."""
    table = w["ngram"].reshape(-1, c.D)
    return w | {"ngram_rows": train_gpt.take_rows(table, train_gpt.ngram_rows(tokens, c))}


def whole_loss(w: dict, tokens, targets: dict, c: train_gpt.Config, stage: int) -> jax.Array:
    """loss_fn of weights like those of whole_weights(), and of tokens (B, T + 1)."""
    return train_gpt.loss_fn(ngram_rows(w, tokens[:, :-1], c), tokens, targets, c, stage)


def bank_matrices(name: str, matrices, c: train_gpt.Config) -> dict[int, list]:
    """The matrices [N, rows, cols] of a bank, grouped by layer as train_gpt.whole_weights does."""
    by_layer = {}
    for layer, matrix in zip(train_gpt.param_table(c)[name].layers, matrices, strict=True):
        by_layer.setdefault(layer, []).append(matrix)
    return by_layer


def whole_weights(c: train_gpt.Config, seed: int = 0) -> dict:
    """Weights as train_gpt.whole_weights returns them. All are random, because a weight that is
    zero would hide an error in what it multiplies."""
    weights = {}
    for name, param in train_gpt.param_table(c).items():
        if param.kind == BANK:
            matrices = jnp.asarray(c.D**-0.5 * noise(name, param.model_shape, seed))
            weights[name] = bank_matrices(name, matrices, c)
        elif param.kind in (LOOKUP, EXCHANGED):
            weights[name] = jnp.asarray(0.3 * noise(name, param.shape, seed))
        else:  # near their first values, some of which keep the residual stream small
            first = np.asarray(param.init(jax.random.key(seed), param.shape))
            weights[name] = jnp.asarray(first + 0.2 * noise(name, param.shape, seed))
    return weights


@functools.cache
def random_params(c: train_gpt.Config) -> dict[str, np.ndarray]:
    """Stored parameters of which none is zero. With zeros, some gradients would be nothing but
    rounding, and Adam would turn that into full steps."""
    params = train_gpt.initial_state(np.uint32(c.seed), c).params
    params = {name: np.asarray(p) + 0.05 * noise(name, p.shape) for name, p in params.items()}
    return params | dict(embed=params["head"])


def make_random_state(c: train_gpt.Config, mesh: Mesh) -> train_gpt.State:
    """A state with the parameters of random_params(); its lookups are copies of them."""
    state = train_gpt.make_state(c, mesh)
    params = random_params(c)
    put = lambda name, like: jax.device_put(params[name].astype(like.dtype), like.sharding)
    return state._replace(
        params={name: put(name, like) for name, like in state.params.items()},
        lookups={name: put(name, like) for name, like in state.lookups.items()},
    )


def schedule_row(c: train_gpt.Config, step: int, mesh: Mesh) -> train_gpt.ScheduleRow:
    """A step's row of the schedule, on all devices."""
    return jax.device_put(train_gpt.schedule(c)[step], NamedSharding(mesh, PartitionSpec()))


def basic(tmp_path: Path, name: str, *flags: str, plant: tuple[str, str] | None = None):
    """Runs a file of basics/ as its readers do, in a process that asks for its devices itself.
    plant=(old, new) replaces text of the file. Returns subprocess.CompletedProcess."""
    source = (ROOT / f"basics/{name}.py").read_text(encoding="utf-8")
    if plant:
        assert source.count(plant[0]) == 1, plant
        source = source.replace(*plant)
    (tmp_path / "basics").mkdir(exist_ok=True)
    if not (tmp_path / "data").exists():
        (tmp_path / "data").symlink_to(ROOT / "data")
    (tmp_path / f"basics/{name}.py").write_text(source, encoding="utf-8")
    hidden = "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES"
    env = {key: value for key, value in os.environ.items() if key not in hidden}
    return subprocess.run([sys.executable, f"basics/{name}.py", *flags], cwd=tmp_path, env=env,
                          capture_output=True, text=True, timeout=300)  # fmt: skip
