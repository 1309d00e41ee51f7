"""The optimizer benchmark: model, text and batch are fixed. Which optimizer needs the fewest steps?

    ./run.sh optimizers NAME     or   python train_gpt_simple.py [tiny | 124m] [--steps N] [--lr X]

The model is a plain GPT: forward(). 124m is modded-nanogpt's third track: 3.28 nats a token on
FineWeb. tiny is a small model, trained on source code, for two CPU cores. A step is a forward and a
backward pass over the batch, and an update by optimizer(), which a contestant writes. ./run.sh puts
its file into the section "Optimizer" below: see README.md.
"""

import argparse
import dataclasses
import hashlib
import inspect
import json
import math
import os
import re
import secrets
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SOURCE = Path(__file__).read_text("utf-8")  # for the log, before the file can change


@dataclasses.dataclass(frozen=True)
class Size:
    """Model, batch and text, the same for all; steps, microbatch and data may be chosen."""

    preset: str  # name in logs
    goal: float  # the benchmark's target: a validation loss to reach, nats a token
    steps: int  # of a run, if neither the contestant nor --steps chooses
    vocab: int  # tokens, padded to a multiple of 128
    layers: int
    D: int  # width of the model
    K: int  # channels of a head
    T: int  # tokens in a sequence
    batch: int  # sequences in a step, on all devices together
    microbatch: int  # sequences that a device runs at once, at most
    val_tokens: int
    val_every: int  # steps between validations
    compute: str  # dtype of activations, and of weights in products
    data: str  # folder with the *_train_*.bin and *_val_*.bin shards


SIZES = {
    "tiny": Size(
        preset="optimizers-tiny", goal=1.84, steps=1500, vocab=384, layers=2, D=64, K=32, T=128,
        batch=4, microbatch=4, val_tokens=32768, val_every=500, compute="float32",
        data="data/source_code",
    ),
    "124m": Size(
        preset="optimizers-124m", goal=3.28, steps=3250, vocab=50304, layers=12, D=768, K=128,
        T=1024, batch=512, microbatch=16, val_tokens=10485760, val_every=125, compute="bfloat16",
        data="data/fineweb10B",
    ),
}  # fmt: skip


# ---- Model ---------------------------------------------------------------------------------------
def parameter_shapes(size: Size) -> dict[str, tuple]:
    """The shape of every parameter, by its name in PyTorch. A weight is (inputs, outputs)."""
    D = size.D
    shapes = {"embed.weight": (size.vocab, D), "norm1.gains": (D,), "norm2.gains": (D,)}
    linears = {"proj": (D, size.vocab)}  # the head; norm2 is before it, and norm1 at the embedding
    for block in range(size.layers):
        for name in ("norm1", "norm2"):
            shapes[f"blocks.{block}.{name}.gains"] = (D,)
        for name in ("attn.q", "attn.k", "attn.v", "attn.proj"):
            linears[f"blocks.{block}.{name}"] = (D, D)
        linears[f"blocks.{block}.mlp.fc"] = (D, 4 * D)
        linears[f"blocks.{block}.mlp.proj"] = (4 * D, D)
    shapes |= {f"{name}.weight": shape for name, shape in linears.items()}
    return shapes | {f"{name}.bias": (outputs,) for name, (_, outputs) in linears.items()}


def make_params(size: Size, seed: int | Array) -> dict[str, Array]:
    """All parameters by name, float32."""
    shapes = parameter_shapes(size)
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {n: initial_value(n, s, key) for (n, s), key in zip(shapes.items(), keys, strict=True)}


def forward(w: dict[str, Array], tokens: Array, size: Size) -> Array:
    """Logits (B, T, vocab), float32, of tokens (B, T)."""
    x = rms_norm(w["embed.weight"][tokens]).astype(size.compute)
    x = x * at_tokens(w["norm1.gains"], x)
    for i in range(size.layers):
        block = f"blocks.{i}."
        normed = rms_norm(x) * at_tokens(w[block + "norm1.gains"], x)
        x = x + attention(w, block + "attn.", normed, size)
        normed = rms_norm(x) * at_tokens(w[block + "norm2.gains"], x)
        hidden = jax.nn.relu(linear(w, block + "mlp.fc", normed)) ** 2
        x = x + linear(w, block + "mlp.proj", hidden)
    x = rms_norm(x) * at_tokens(w["norm2.gains"], x)
    logits = linear(w, "proj", x).astype(jnp.float32)
    return 15 * logits * jax.lax.rsqrt(logits**2 + 15**2)  # softcap: between -15 and 15


def attention(w: dict[str, Array], name: str, x: Array, size: Size) -> Array:
    """Causal attention over the whole sequence, with normalized and rotated queries and keys."""
    B, T, D = x.shape
    q, k, v = (linear(w, name + part, x).reshape(B, T, D // size.K, size.K) for part in "qkv")
    q = rotary(rms_norm(q))
    k = rotary(rms_norm(k))
    kernel = "cudnn" if x.dtype == jnp.bfloat16 and jax.default_backend() == "gpu" else "xla"
    y = jax.nn.dot_product_attention(q, k, v, scale=0.12, is_causal=True, implementation=kernel)
    return linear(w, name + "proj", y.reshape(B, T, D))


def rotary(x_BTHK: Array) -> Array:
    """Rotates channels c and c + K/2 by an angle that grows with the position. Half of the
    frequencies are zero (half-truncated)."""
    _, T, _, K = x_BTHK.shape
    frequencies = np.append(1024.0 ** -np.linspace(0, 1, K // 4), np.zeros(K // 4))
    angles = np.outer(np.arange(T), frequencies)[:, None, :]
    cos = jnp.float32(np.cos(angles))
    sin = jnp.float32(np.sin(angles))
    x1, x2 = jnp.split(x_BTHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([x1 * cos + x2 * sin, x2 * cos - x1 * sin], axis=-1)
    return rotated.astype(x_BTHK.dtype)


def linear(w: dict[str, Array], name: str, x: Array) -> Array:
    """x W + b."""
    y = x @ w[f"{name}.weight"]
    return y + at_tokens(w[f"{name}.bias"], y)


def at_tokens(vector: Array, x: Array) -> Array:
    """Gains or a bias, float32, at every token of x and in its dtype. Rounded only there, they have
    a gradient that is summed over the tokens in float32."""
    return jnp.broadcast_to(vector, x.shape).astype(x.dtype)


def rms_norm(x: Array) -> Array:
    """x, scaled to a root mean square of 1."""
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x32**2, axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean_square + jnp.finfo(jnp.float32).eps)).astype(x.dtype)


# ---- What a contestant may replace, by functions of the same names -------------------------------
def initial_value(name: str, shape: tuple, key: Array) -> Array:
    """The first value of a parameter, float32."""
    if name.endswith("gains"):
        return jnp.ones(shape)
    if name.endswith(("bias", "proj.weight")):
        return jnp.zeros(shape)
    deviation = 1.0 if name == "embed.weight" else (0.33 / shape[0]) ** 0.5
    return deviation * jax.random.normal(key, shape)


def validated_params(params: dict[str, Array], state) -> dict[str, Array]:
    """The parameters that are validated, from the optimizer's state if it averages them."""
    return params


# ---- What a contestant may use -------------------------------------------------------------------
def cooldown(rate, total_steps, start=0.3, warmup=0.0):
    """A schedule: the rate rises linearly over the first fraction `warmup` of the run, and falls
    linearly to 0 from the fraction `start` on."""

    def rate_at(step):
        rise = (step + 1) / max(1, warmup * total_steps)
        fall = (1 - step / total_steps) / (1 - start)
        return rate * jnp.clip(fall, 0, jnp.minimum(rise, 1))

    return rate_at


def kinds(params: dict[str, Array]) -> dict[str, str]:
    """What each parameter is: "matrix" (a weight of a block), "embed", "head" or "vector"."""
    names = {"embed.weight": "embed", "proj.weight": "head"}
    return {n: names.get(n, "matrix") if p.ndim == 2 else "vector" for n, p in params.items()}


def beside_adam(matrices, params, total_steps, embed=0.7, head=0.004, vector=0.015):
    """One transform for the matrices, and AdamW for all else, with upstream's rate for each kind.
    The head's is multiplied by sqrt(768 / width). eps is small, for gradients of the mean loss."""
    D = params["embed.weight"].shape[1]
    rates = {"embed": embed, "head": head * (768 / D) ** 0.5, "vector": vector}
    transforms = {"matrix": matrices}
    for kind, rate in rates.items():
        schedule = cooldown(rate, total_steps)
        transforms[kind] = optax.adamw(schedule, b1=0.8, b2=0.95, eps=1e-15, weight_decay=0.001)
    return optax.partition(transforms, kinds(params))


# ---- Optimizer: begin ----------------------------------------------------------------------------
"""Muon: momentum, made orthogonal. Keller Jordan, 2024: kellerjordan.github.io/posts/muon

    average <- average + (1 - momentum) (gradient - average)
    update = orthogonal(gradient + momentum (average - gradient)) sqrt(max(1, outputs / inputs))
    weight <- weight - rate (update + decay weight)
orthogonal(U S V^T) = U V^T: the matrix with the same singular vectors, and singular values of 1.

A contestant is a file like this one: a function optimizer(), the numbers that it was tuned to, and
whatever they need. This file explains the parts of one.
"""

import jax
import jax.numpy as jnp
import optax


# By size: steps, and numbers. A number that is missing has its default in optimizer(). Those of
# 124m are upstream's.
SETTINGS = {
    "tiny": dict(steps=1370, lr=0.02, momentum=0.9),
    "124m": dict(steps=3250, lr=0.025, decay=0.05),
}


def optimizer(params, total_steps, lr=0.02, decay=0.05, momentum=0.95):
    """Muon for the matrices of the blocks, AdamW for everything else.

    params has the shapes of the parameters, by name. The arguments after total_steps are numbers,
    and also flags: ./run.sh optimizers muon --lr 0.03."""
    # An optax transform turns gradients into updates, which are added to the parameters. A chain
    # applies several, one after another. The last one multiplies by -rate.
    muon = optax.chain(
        nesterov(momentum),
        optax.stateless_with_tree_map(lambda update, _: orthogonalize(update)),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(cooldown(lr, total_steps)),
    )
    # Orthogonality means something for a matrix between two vectors of activations. A row of the
    # embedding and a column of the head belong to one token, and gains and biases are vectors:
    # AdamW updates them.
    return beside_adam(muon, params, total_steps)


def nesterov(momentum):
    """Nesterov's momentum: the average of past gradients, moved toward the newest one."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(grads, average, params=None):
        average = jax.tree.map(lambda a, g: a + (1 - momentum) * (g - a), average, grads)
        ahead = jax.tree.map(lambda a, g: g + momentum * (a - g), average, grads)
        return ahead, average

    return optax.GradientTransformation(init, update)


def orthogonalize(update):
    """About the nearest orthogonal matrix, scaled up if it has more columns than rows."""
    # Newton-Schulz: an odd polynomial p of a matrix, p(X) = U p(S) V^T, acts on its singular values
    # alone. p(s) = 2 s - 1.5 s^3 + 0.5 s^5 has p(1) = 1 and moves all of (0, 1] toward 1: small
    # values double in an iteration, and 12 iterations lift all above 1/2048 to about 1.
    inputs, outputs = update.shape
    x = update.T if inputs > outputs else update  # so that x x^T is the smaller product
    x = x / (jnp.linalg.norm(x) + 1e-15)  # the largest singular value is 1 at most

    def polynomial(_, x):
        gram = x @ x.T
        return 2 * x + (-1.5 * gram + 0.5 * gram @ gram) @ x

    x = jax.lax.fori_loop(0, 12, polynomial, x)  # compiles faster than 12 repetitions
    x = x.T if inputs > outputs else x
    # A matrix with more outputs than inputs would change each output by less than a square one.
    return x * max(1, outputs / inputs) ** 0.5


# ---- Optimizer: end ------------------------------------------------------------------------------
# ---- Training ------------------------------------------------------------------------------------
def mean_loss(params: dict[str, Array], tokens: Array, size: Size, mesh: Mesh) -> Array:
    """Mean cross-entropy of sequences (B, T + 1), nats a token. All-gathers the sharded parameters:
    those of products in their dtype, in which the devices' gradients are summed, all others in
    float32, because their gradients are sums over many tokens."""
    in_products = {n for n, kind in kinds(params).items() if kind in ("matrix", "head")}
    weights = {n: p.astype(size.compute) if n in in_products else p for n, p in params.items()}
    weights = jax.lax.with_sharding_constraint(weights, NamedSharding(mesh, PartitionSpec()))
    logits = forward(weights, tokens[:, :-1], size)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def gradients(params: dict[str, Array], tokens: Array, size: Size, mesh: Mesh) -> tuple:
    """Mean loss of a batch (microbatches, B, T + 1), and its gradients, sharded and float32."""

    def add_microbatch(total, microbatch):
        loss, grads = jax.value_and_grad(mean_loss)(params, microbatch, size, mesh)
        grads = jax.lax.with_sharding_constraint(grads, shardings(grads, mesh))
        return jax.tree.map(jnp.add, total, (loss, grads)), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add_microbatch, zero, tokens)
    return jax.tree.map(lambda x: x / len(tokens), total)


def train_step(params: dict, state, tokens: Array, tx, size: Size, mesh: Mesh) -> tuple:
    """One step of the optimizer tx: new parameters, its new state, and the loss before the step. tx
    may use value, this loss, and obj_fn, the first microbatch's loss as a function of params."""
    loss, grads = gradients(params, tokens, size, mesh)
    first_loss = lambda p: mean_loss(p, tokens[0], size, mesh)
    update = optax.with_extra_args_support(tx).update
    updates, state = update(grads, state, params, value=loss, obj_fn=first_loss)
    return optax.apply_updates(params, updates), state, loss


def shardings(tree, mesh: Mesh):
    """For every array, a sharding along its first axis whose length the devices divide, if any."""

    def sharding(x):
        axes = [axis for axis, length in enumerate(x.shape) if length % mesh.size == 0]
        spec = [None] * axes[0] + ["devices"] if axes else []
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(sharding, tree)


def compile_programs(tx, size: Size, mesh: Mesh) -> list:
    """Compiles three programs: seed -> (params, state); a step; the validation loss of a batch.
    Refuses an optimizer that counts in Python, whose number would be the same in every step."""

    def begin(seed):
        params = make_params(size, seed)
        return params, tx.init(params)

    def step(params, state, tokens):
        return train_step(params, state, tokens, tx, size, mesh)

    def validation(params, state, tokens):
        params = validated_params(params, state)
        return jax.lax.map(lambda part: mean_loss(params, part, size, mesh), tokens).mean()

    shapes = jax.eval_shape(begin, 0)
    placement = shardings(shapes, mesh)
    batch = batch_shape(size, mesh)
    inputs = (*placement, batch.sharding)
    outputs = (*placement, NamedSharding(mesh, PartitionSpec()))
    begin = jax.jit(begin, out_shardings=placement)
    step = jax.jit(step, in_shardings=inputs, out_shardings=outputs, donate_argnums=(0, 1))
    validation = jax.jit(validation, in_shardings=inputs)

    def lower():
        return [begin.lower(0), step.lower(*shapes, batch), validation.lower(*shapes, batch)]

    lowered = lower()
    jax.clear_caches()  # so that all is traced again
    if [program.as_text() for program in lowered] != [program.as_text() for program in lower()]:
        refuse("the optimizer changes each time it is traced: count steps in its state")
    # In jax 0.10, some of YNNPACK's kernels for CPUs are wrong: jax issue 39103.
    is_old = jax.__version_info__ < (0, 11) and mesh.devices.flat[0].platform == "cpu"
    options = {"xla_cpu_experimental_ynn_fusion_type": ""} if is_old else None
    return [program.compile(options) for program in lowered]


# ---- Data ----------------------------------------------------------------------------------------
def batch_shape(size: Size, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """A batch is (microbatches, B, T + 1). The B sequences of each are split over the devices."""
    B = min(size.batch, size.microbatch * mesh.size)
    split = NamedSharding(mesh, PartitionSpec(None, "devices"))
    return jax.ShapeDtypeStruct((size.batch // B, B, size.T + 1), jnp.int32, sharding=split)


def find_batches(kind: str, count: int, size: Size) -> tuple[list, list]:
    """The first `count` batches of the "train" or "val" shards, as (shard, first token), and facts
    of these shards for the log. What a shard has beyond its last whole batch is left out."""
    tokens = size.batch * size.T
    batches = []
    facts = []
    for path in sorted(Path(size.data).glob(f"[!.]*_{kind}_*.bin")):
        if len(batches) < count:
            shard = np.memmap(path, np.uint16, mode="r", offset=1024)  # after the header
            is_whole = np.fromfile(path, "<i4", 3).tolist() == [20240520, 1, len(shard)]
            if not is_whole or not shard[1::2].any():  # every second one is 0 in 32 bits
                refuse(f"{path} is no whole shard, or one of 32 bits: see data/README.md")
            if shard.max() >= size.vocab:  # JAX would read another token's row
                refuse(f"{path} has token {shard.max()}, and the model has {size.vocab} tokens")
            batches += [(shard, start) for start in range(0, len(shard) - tokens, tokens)]
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            facts.append({"file": path.name, "tokens": len(shard), "sha256": sha256})
    if len(batches) < count:
        refuse(f"{size.data} has {len(batches)} of {count} {kind} batches: use fewer --steps")
    return batches[:count], facts


def read_batch(batch: tuple, size: Size, mesh: Mesh) -> Array:
    """A batch on the devices, (microbatches, B, T + 1) int32. Sequences follow one another in the
    text: the last target of one is the first input of the next."""
    shard, start = batch
    positions = start + np.arange(size.batch)[:, None] * size.T + np.arange(size.T + 1)
    shape = batch_shape(size, mesh)
    return jax.device_put(shard[positions].astype(np.int32).reshape(shape.shape), shape.sharding)


# ---- Run -----------------------------------------------------------------------------------------
def refuse(message: str) -> None:
    """Ends a run before it begins, with one line and exit status 2."""
    print(f"{Path(__file__).name}: {message}", file=sys.stderr)
    sys.exit(2)


def parse_config(argv: list[str]) -> tuple[Size, argparse.Namespace, dict[str, float]]:
    """[tiny | 124m] [--flag value ...]. Returns the size, all flags, and the optimizer's
    numbers: those of flags, else of SETTINGS, else the defaults of its arguments."""
    cli = argparse.ArgumentParser(allow_abbrev=False)
    cli.add_argument("size", nargs="?", choices=SIZES, default="tiny")
    cli.add_argument("--steps", type=int)
    cli.add_argument("--seed", type=int, default=secrets.randbits(31))
    cli.add_argument("--target", type=float, default=0, help="loss at which to stop; 0: none")
    cli.add_argument("--microbatch", type=int, help="sequences that a device runs at once")
    cli.add_argument("--data", help="folder with shards")
    arguments = list(inspect.signature(optimizer).parameters.values())[2:]
    for argument in arguments:
        cli.add_argument(f"--{argument.name}", type=type(argument.default))
    args = cli.parse_args(argv)
    typed = {name: value for name, value in vars(args).items() if value is not None}
    chosen = SETTINGS.get(args.size, {}) | typed
    numbers = {argument.name: chosen.get(argument.name, argument.default) for argument in arguments}
    fields = {name: chosen[name] for name in ("steps", "data", "microbatch") if name in chosen}
    return dataclasses.replace(SIZES[args.size], **fields), args, numbers


def run_facts(argv: list[str], size: Size, args, numbers: dict, data: list) -> dict:
    """Facts for the log, by name."""
    relevant = re.compile("JAX|XLA|(LIB)?TPU|CUD|NVI|NCCL|TF_CPP|GLI")
    versions = {module.__name__: module.__version__ for module in (jax, np, optax)}
    return {
        "data": data,
        "versions": versions | {"python": sys.version},
        "devices": [device.device_kind for device in jax.devices()[: size.batch]],
        "driver": jax.devices()[0].client.platform_version,
        "environment": {name: v for name, v in os.environ.items() if relevant.match(name)},
        "argv": argv,
        "seed": args.seed,
        "config": vars(args) | dataclasses.asdict(size) | {"numbers": numbers},
        "parameters": {name: math.prod(s) for name, s in parameter_shapes(size).items()},
    }


def main(argv: list[str]) -> None:
    """Trains, and writes a log in the format of train_gpt.py."""
    size, args, numbers = parse_config(argv)
    mesh = Mesh(np.array(jax.devices()[: size.batch]), ("devices",))
    train_batches, train_facts = find_batches("train", size.steps, size)
    val_batches, val_facts = find_batches("val", size.val_tokens // (size.batch * size.T), size)
    tx = optimizer(jax.eval_shape(lambda: make_params(size, 0)), size.steps, **numbers)

    Path("logs").mkdir(exist_ok=True)
    path = time.strftime(f"logs/%Y-%m-%dT%H-%M-%S_{secrets.token_hex(4)}.txt", time.gmtime())
    log = open(path, "w", encoding="utf-8")
    print(SOURCE + "=" * 100, file=log)
    for name, fact in run_facts(argv, size, args, numbers, train_facts + val_facts).items():
        print(name, json.dumps(fact), file=log, flush=True)
    print(f"{size.preset} on {mesh.size} x {jax.devices()[0].device_kind}, log in {path}")

    def show(line: str) -> None:
        for file in (log, sys.stdout):
            print(line, file=file, flush=True)

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        loss, step, ms = train(tx, train_batches, val_batches, size, args, mesh, show)
    except KeyboardInterrupt:
        show("INTERRUPTED: no step follows, and a run cannot be resumed")
        sys.exit(130)
    result = {"reason": "target reached" if loss <= args.target else "end of schedule"}
    result |= {"val_loss": loss, "steps": step, "tokens": step * size.batch * size.T}
    result |= {"train_time_ms": ms, "seed": args.seed, "devices": mesh.size}
    print("RESULT", json.dumps(result), file=log)
    print(f"steps {step}, loss {loss:.4f}, target {size.goal}")


def train(tx, train_batches, val_batches, size: Size, args, mesh: Mesh, show) -> tuple:
    """Trains to the last step or the target, and shows losses. Returns the last one, the steps and
    their milliseconds, without validation. Exits with status 3 at a loss that is not finite."""
    begin, step_program, validation = compile_programs(tx, size, mesh)
    params, state = jax.block_until_ready(begin(args.seed))
    ms = 0.0
    loss = math.nan  # of the latest step
    start = time.perf_counter()
    for step in range(size.steps + 1):
        validates = step == size.steps or (step > 0 and step % size.val_every == 0)
        if validates or (step > 0 and step % 50 == 0):
            loss = float(loss)  # waits for the step
            ms += 1000 * (time.perf_counter() - start)
            if validates:
                losses = [validation(params, state, read_batch(b, size, mesh)) for b in val_batches]
                loss = float(np.mean([float(x) for x in losses]))
            progress = f"{'val' if validates else 'train'}_loss:{loss:.4f} train_time:{ms:.0f}ms"
            show(f"step:{step}/{size.steps} {progress} step_avg:{ms / step:.2f}ms")
            if not np.isfinite(loss):
                show(f"NON-FINITE: the loss, by step {step}")
                sys.exit(3)
            if validates and (loss <= args.target or step == size.steps):
                return loss, step, ms
            start = time.perf_counter()
        batch = read_batch(train_batches[step], size, mesh)
        params, state, loss = step_program(params, state, batch)


if __name__ == "__main__":
    main(sys.argv[1:])
