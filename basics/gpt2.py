r"""GPT-2 as the world knows it, which train_gpt.py starts from; OpenAI's own weights run in it.

Run     ./run.sh basics/gpt2.py                  a small one, on the embedded text
        ./run.sh basics/gpt2.py --from gpt2 --prompt "Attention is"    OpenAI's: see README.md
        ./run.sh basics/gpt2.py --from gpt2 --data data/mine --save my_gpt2
                 fine-tunes them; Hugging Face transformers loads the folder my_gpt2
        ./run.sh basics/gpt2.py --size 124M --data data/fineweb10B --mesh 8 1 --batch 32 \
            --accumulate 16 --steps 1300 --lr 6e-4         on 8 GPUs or TPUs
Look    at `table`, which describes every parameter; at `forward`, the model; at `optimizer`
Dims    B sequence  T position  D model  F hidden  H head  L layer  V token; x residual stream
Source  Radford et al. 2019, github.com/openai/gpt-2. AdamW, warm-up, cosine, clipping and decay
        are from Brown et al. 2020, arXiv:2005.14165, but only matrices decay; there is no dropout
In train_gpt.py  `param_table` is the table, `block` the layer. `norm` has no weights, `norm_rotate`
        replaces learned positions, `mlp` squares a ReLU, `normuon` updates matrices
"""

import argparse
import functools
import itertools
import json
import math
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, P, lax
from jax.sharding import AxisType, Mesh, NamedSharding

DATA = Path(__file__).resolve().parent.parent / "data"
sys.path.append(str(DATA))
import shards  # noqa: E402
import source_code  # noqa: E402
from messages import one_line, refuse  # noqa: E402


class Config(NamedTuple):
    L: int = 12
    H: int = 12
    D: int = 768
    T: int = 1024
    V: int = 50257
    compute: str = "bfloat16"  # format of activations; the weights themselves are float32


# The fields of Config, and their names in the config.json of GPT-2s on the hub.
NAMES = dict(L="n_layer", H="n_head", D="n_embd", T="n_positions", V="vocab_size")
SIZES = {"small": Config(L=6, H=2, D=128, T=256, V=257), "124M": Config()}
# What the flags of training are if they are not passed, and with loaded weights.
SCRATCH = dict(steps=184, batch=4, accumulate=1, lr=2e-3, val_every=92, val_tokens=65536)
TUNING = SCRATCH | dict(steps=200, batch=1, lr=3e-5, val_every=50)


# ---- Model ---------------------------------------------------------------------------------------
def table(c: Config) -> dict[str, tuple]:
    """Of each parameter the shape, the split over the mesh, and mean and standard deviation of its
    initial values. Names are those of OpenAI's file, but h.* are arrays of all layers."""
    L = c.L
    D = c.D
    F = 4 * c.D
    wide = 0.02
    write = wide / math.sqrt(2 * c.L)  # because the residual stream adds up 2 L outputs
    # fmt: off
    return {
        "wte.weight":           ((c.V, D),     P(),                          0, wide),
        "wpe.weight":           ((c.T, D),     P(),                          0, wide / 2),
        "h.ln_1.weight":        ((L, D),       P(),                          1, 0),
        "h.ln_1.bias":          ((L, D),       P(),                          0, 0),
        "h.attn.c_attn.weight": ((L, D, 3, D), P(None, None, None, "model"), 0, wide),  # q, k, v
        "h.attn.c_attn.bias":   ((L, 3, D),    P(None, None, "model"),       0, 0),
        "h.attn.c_proj.weight": ((L, D, D),    P(None, "model", None),       0, write),
        "h.attn.c_proj.bias":   ((L, D),       P(),                          0, 0),
        "h.ln_2.weight":        ((L, D),       P(),                          1, 0),
        "h.ln_2.bias":          ((L, D),       P(),                          0, 0),
        "h.mlp.c_fc.weight":    ((L, D, F),    P(None, None, "model"),       0, wide),
        "h.mlp.c_fc.bias":      ((L, F),       P(None, "model"),             0, 0),
        "h.mlp.c_proj.weight":  ((L, F, D),    P(None, "model", None),       0, write),
        "h.mlp.c_proj.bias":    ((L, D),       P(),                          0, 0),
        "ln_f.weight":          ((D,),         P(),                          1, 0),
        "ln_f.bias":            ((D,),         P(),                          0, 0),
    }  # fmt: on


def forward(params: dict[str, Array], tokens_BT: Array, c: Config) -> Array:
    """Logits of the next token at each position, (B, T, V), float32."""
    x = params["wte.weight"][tokens_BT] + params["wpe.weight"][: tokens_BT.shape[1]]
    layers = {name[2:]: p for name, p in params.items() if name.startswith("h.")}

    def layer(x, w):
        return block(x, w, c), None

    x, _ = lax.scan(layer, x.astype(c.compute), layers)
    x = layer_norm(x, params, "ln_f")
    head = params["wte.weight"].astype(x.dtype)  # tied: embedding and head are one table
    return jnp.einsum("BTD,VD->BTV", x, head, preferred_element_type=jnp.float32)


def block(x: Array, w: dict[str, Array], c: Config) -> Array:
    """One layer: attention, then the MLP. Both read the normalized stream and are added to it."""
    B, T, D = x.shape

    def linear(x, name):
        y = jnp.tensordot(x, w[f"{name}.weight"].astype(x.dtype), 1)
        # Rounded only at the tokens: its gradient, a sum over them, is computed in float32.
        return y + jnp.broadcast_to(w[f"{name}.bias"], y.shape).astype(y.dtype)

    qkv = linear(layer_norm(x, w, "ln_1"), "attn.c_attn").reshape(B, T, 3, c.H, D // c.H)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + linear(y.reshape(B, T, D), "attn.c_proj")
    y = jax.nn.gelu(linear(layer_norm(x, w, "ln_2"), "mlp.c_fc"), approximate=True)
    return x + linear(y, "mlp.c_proj")


def layer_norm(x: Array, w: dict[str, Array], name: str) -> Array:
    y = jax.nn.standardize(x.astype(jnp.float32), epsilon=1e-5)  # bfloat16 is too coarse for sums
    return (y * w[f"{name}.weight"] + w[f"{name}.bias"]).astype(x.dtype)


def loss_fn(params: dict[str, Array], tokens_BT: Array, c: Config) -> Array:
    """Mean cross-entropy, nats. tokens_BT: (B, T + 1), because the last one is only a target."""
    logits = forward(params, tokens_BT[:, :-1], c)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens_BT[:, 1:]).mean()


# ---- Training ------------------------------------------------------------------------------------
def optimizer(lr: float, steps: int, accumulate: int) -> optax.GradientTransformation:
    """AdamW by the mean gradient of `accumulate` microbatches, which MultiSteps collects."""
    rate = optax.warmup_cosine_decay_schedule(0.0, lr, steps // 20, max(1, steps), lr / 10)

    def is_matrix(params):
        return {name: name.endswith("weight") and "ln" not in name for name in params}

    adamw = optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=is_matrix)
    tx = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    return optax.MultiSteps(tx, accumulate) if accumulate > 1 else tx


def initial(c: Config, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    params = {}
    for name, (shape, _, mean, std) in table(c).items():
        params[name] = mean + np.float32(std) * rng.standard_normal(shape, np.float32)
    return params


def batches(tokens: np.ndarray, B: int, T: int) -> Iterator[np.ndarray]:
    """Yields (B, T + 1) in the order of the text, without end: the first token follows the last."""
    for start in itertools.count(0, B * T):
        positions = (start + np.arange(B)[:, None] * T + np.arange(T + 1)) % len(tokens)
        yield tokens[positions].astype(np.int32)


def train(params: dict, c: Config, mesh: Mesh, texts: list[np.ndarray], args) -> dict[str, Array]:
    """Prints the validation loss every args.val_every steps, and saves the weights whenever it is
    lower than before: a model that reads a short text often begins to memorize it."""
    train_text, val_text = texts
    tx = optimizer(args.lr, args.steps, args.accumulate)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, tokens_BT):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens_BT, c)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    rows = NamedSharding(mesh, P("data"))
    val_step = jax.jit(functools.partial(loss_fn, c=c))
    microbatch_tokens = args.batch * args.context
    val_batches = max(1, min(args.val_tokens, len(val_text) - 1) // microbatch_tokens)

    def validate(params):
        part = itertools.islice(batches(val_text, args.batch, args.context), val_batches)
        return np.mean([float(val_step(params, jax.device_put(batch, rows))) for batch in part])

    train_batches = batches(train_text, args.batch, args.context)
    state = tx.init(params)
    losses = {}
    start = time.perf_counter()
    for step in range(args.steps + 1):
        if step > 0:
            for _ in range(args.accumulate):
                batch = jax.device_put(next(train_batches), rows)
                params, state, loss = train_step(params, state, batch)
        about = ""
        if step % args.val_every == 0 or step == args.steps:
            losses[step] = validate(params)
            if not np.isfinite(losses[step]):
                refuse(f"the loss is {losses[step]} at step {step}: pass a lower --lr")
            about = f"val_loss:{losses[step]:.4f}"
            if args.save and step > 0 and losses[step] == min(losses.values()):
                save(args.save, params, c)
                about += " saved"
        elif step % 10 == 0:
            about = f"train_loss:{loss:.4f}"  # of the last microbatch
        if about:
            tokens = step * args.accumulate * microbatch_tokens
            about += f" time:{time.perf_counter() - start:.1f}s"
            print(f"step:{step}/{args.steps} tokens:{tokens} {about}", flush=True)
    if args.source is None:
        fall = losses[0] - min(losses.values())
        check(f"the first loss is about log {c.V}", abs(losses[0] - math.log(c.V)) < 0.2)
        check(f"the loss falls by {fall:.4f}", fall > 0 or not args.steps)
    return params


# ---- Files ---------------------------------------------------------------------------------------
def read_folder(folder: Path) -> tuple[Config, dict[str, np.ndarray]]:
    """What save() or transformers has written. Refuses what is not a GPT-2 in float32."""
    c = read_config(folder)
    return c, read(folder / "model.safetensors", c)


def read_config(folder: Path) -> Config:
    """The sizes in a folder's config.json. Refuses other keys that change transformers' GPT-2."""
    about = json.loads((folder / "config.json").read_bytes())
    c = Config(**{key: about[name] for key, name in NAMES.items() if name in about})
    computed = {  # the values with which transformers' model is this one; the first is the default
        "model_type": ["gpt2"],
        "auto_map": [None],  # code in place of transformers'
        "activation_function": ["gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh"],
        "layer_norm_epsilon": [1e-5],
        "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False],
        "is_causal": [True],
        "tie_word_embeddings": [True],
        "num_attention_heads": [c.H],  # another name; other sizes show in the shapes of arrays
    }
    for key, values in computed.items():
        if about.get(key, values[0]) not in values:
            refuse(f"{folder}: config.json has {key} {about[key]}, and this file computes {values}")
    return c


def read(path: Path, c: Config) -> dict[str, np.ndarray]:
    """Weights from a model.safetensors with OpenAI's names, before which transformers may have put
    "transformer.". The format: 8 bytes with the size of a JSON header, the header, the data."""
    content = np.fromfile(path, np.uint8)
    begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:begin].tobytes())
    header.pop("__metadata__", None)
    prefix = "transformer." if "transformer.wpe.weight" in header else ""

    def array(name: str, shape: tuple) -> np.ndarray:
        found = header.pop(name)
        if (found["dtype"], found["shape"]) != ("F32", [*shape]):
            refuse(f"{path} has {name} as {found}, not in float32 and {shape}: use transformers")
        start, end = found["data_offsets"]
        values = content[begin + start : begin + end].view("<f4").reshape(shape)
        if not np.isfinite(values).all():
            refuse(f"{path} has NaN or infinity in {name}: take another model")
        return values

    params = {}
    for name, (shape, *_) in table(c).items():
        in_file = (*shape[:-2], 3 * c.D) if "c_attn" in name else shape  # q, k, v side by side
        if name.startswith("h."):
            layers = [array(f"{prefix}h.{n}.{name[2:]}", in_file[1:]) for n in range(c.L)]
            params[name] = np.stack(layers).reshape(shape)
        else:
            params[name] = array(prefix + name, shape)
    if "lm_head.weight" in header:
        head = array("lm_head.weight", (c.V, c.D))
        if not np.array_equal(head, params["wte.weight"]):
            refuse(f"{path} has an lm_head.weight that is not wte.weight: use transformers")
    mask = prefix + "h[.][0-9]+[.]attn[.](bias|masked_bias)"  # of older versions: constants
    others = [name for name in header if not re.fullmatch(mask, name)]
    if others:
        refuse(f"{path} has arrays that GPT-2 has not, as {others[0]}: use transformers")
    return params


def save(folder: Path, params: dict[str, Array], c: Config) -> None:
    """Writes the two files of which transformers' GPT2LMHeadModel.from_pretrained(folder) makes the
    model in PyTorch. They are like OpenAI's on the hub: each layer has its own arrays, with q, k
    and v side by side, and matrices are inputs x outputs, so that nothing is transposed."""
    arrays = {}
    for name, p in params.items():
        p = np.ascontiguousarray(p, "<f4")  # this gathers what is split over devices
        if "c_attn" in name:
            p = p.reshape(*p.shape[:-2], 3 * c.D)
        if name.startswith("h."):
            arrays |= {f"h.{layer}.{name[2:]}": part for layer, part in enumerate(p)}
        else:
            arrays[name] = p
    about = {name: getattr(c, field) for field, name in NAMES.items()}
    about |= dict(model_type="gpt2", architectures=["GPT2LMHeadModel"], dtype="float32")
    about |= dict(bos_token_id=c.V - 1, eos_token_id=c.V - 1)  # the token between two texts
    header = {"__metadata__": {"format": "pt"}}  # transformers 4.46 asks for it, newer ones do not
    end = 0
    for name, p in arrays.items():
        header[name] = dict(dtype="F32", shape=p.shape, data_offsets=[end, end + p.nbytes])
        end += p.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that the data is aligned
    size = len(text).to_bytes(8, "little")
    shards.write(folder / "model.safetensors", [size, text, *arrays.values()])
    shards.write(folder / "config.json", [json.dumps(about, indent=1).encode(), b"\n"])


# ---- Text ----------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnames="c")
def next_token(params: dict, tokens_T: Array, last: int, key: Array, c: Config) -> Array:
    """One of the 40 likeliest tokens after position `last`, as OpenAI did."""
    logits, tokens = lax.top_k(forward(params, tokens_T[None], c)[0, last], 40)
    return tokens[jax.random.categorical(key, logits)]


def sample(params: dict, prompt: list[int], count: int, c: Config, seed: int) -> list[int]:
    """The prompt without its first token, which separates texts, and up to `count` tokens more. One
    program of all positions serves every token: empty positions are later ones, which none sees."""
    end = min(c.T, len(prompt) + count)
    tokens = np.pad(np.int32(prompt), (0, end - len(prompt)))
    keys = jax.random.split(jax.random.key(seed), end)
    for n in range(len(prompt), end):
        tokens[n] = next_token(params, tokens, n - 1, keys[n], c)
        if tokens[n] == tokens[0]:  # the text ends
            return tokens[1:n].tolist()
    return tokens[1:end].tolist()


def read_text(folder: Path) -> tuple[int, list[np.ndarray]]:
    """The vocabulary of a folder of shards, and its tokens of training and of validation."""
    if folder == DATA / "source_code":
        source_code.make(folder)
    texts = [shards.tokens(folder, split) for split in ("train", "val")]
    about = shards.read_manifest(folder) or shards.GPT2
    for text in texts:
        if text.max() >= about["vocab"] or about["eot"] not in text:
            refuse(f"{folder} has tokens beyond {about['vocab']}, or no {about['eot']}")
    return about["vocab"], texts


def check(what: str, right: bool) -> None:
    print("ok   " if right else "WRONG", what, flush=True)
    if not right:
        sys.exit(1)


def parse() -> argparse.Namespace:
    """Reads the flags. Those of training, if they are not passed, are SCRATCH's or TUNING's."""
    cli = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    cli.error = refuse
    add = cli.add_argument
    add("--size", choices=SIZES, default="small", help="of a model that begins with random weights")
    add("--from", dest="source", type=Path, metavar="FOLDER", help="begin with weights from here")
    add("--data", type=Path, help="shards; loaded weights are trained only if this is passed")
    add("--mesh", type=int, nargs=2, default=(1, 1), metavar=("DATA", "MODEL"), help="devices")
    add("--steps", type=int, help="updates of the weights; 0: only print the loss")
    add("--batch", type=int, help="sequences in a microbatch: a multiple of DATA")
    add("--context", type=int, help="tokens of a sequence; default: the model's positions")
    add("--accumulate", type=int, help="microbatches in a step")
    add("--lr", type=float, help="highest learning rate")
    add("--val_every", type=int, help="steps between two validations")
    add("--val_tokens", type=int, help="tokens to validate on, at most, but a microbatch")
    add("--seed", type=int, default=0, help="of the initial weights and of the samples")
    add("--prompt", default="The", help="what the sample continues")
    add("--save", type=Path, metavar="FOLDER", help="write trained weights, for transformers too")
    args = cli.parse_args()
    if not args.source:
        args.data = args.data or DATA / "source_code"
    for name, value in (TUNING if args.source else SCRATCH).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.save and args.save.exists():
        refuse(f"{args.save} is there already: pass another --save, or move it away")
    return args


def main() -> None:
    args = parse()
    jax.config.update("jax_num_cpu_devices", math.prod(args.mesh))  # read on CPUs only
    mesh = jax.make_mesh(args.mesh, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    data = args.data and args.data.name
    print("gpt2.py", vars(args) | dict(data=data, jax=jax.__version__))
    if args.data:
        vocab, texts = read_text(args.data)
    if args.source:
        c, params = read_folder(args.source)
        if jax.default_backend() == "cpu":
            c = c._replace(compute="float32")  # there as fast as bfloat16
        if c.V == 50304:  # nanoGPT and llm.c pad GPT-2's 50,257 tokens to a multiple of 128
            print(f"{args.source}: rows of the vocabulary from 50257 on are left out as padding")
            c = c._replace(V=shards.GPT2["vocab"])
            params["wte.weight"] = params["wte.weight"][: c.V]
    else:
        c = SIZES[args.size]
        c = c._replace(V=vocab, T=args.context or c.T)
        params = initial(c, args.seed)
    if args.data and vocab != c.V:
        refuse(f"{args.data} has {vocab} different tokens, and {args.source} {c.V}")
    args.context = args.context or c.T
    if args.data and len(texts[1]) <= args.batch * args.context:  # it would be read around its end
        refuse(f"{args.data} has {len(texts[1])} tokens to validate on, fewer than a microbatch")
    coder = shards.coder(c.V, c.V - 1)
    split = {name: NamedSharding(mesh, spec) for name, (_, spec, *_) in table(c).items()}
    params = jax.device_put(params, split)
    if args.save:
        args.save.mkdir(parents=True)  # now, as another run may have the same words
    if args.data:
        params = train(params, c, mesh, texts, args)
    if args.save and not any(args.save.iterdir()):
        print(f"nothing is in {args.save}: no training has lowered the loss of a validation")
    prompt = coder.encode(args.prompt)
    if len(prompt) > c.T // 2:
        print(f"the sample goes on from the last {c.T // 2} of the prompt's {len(prompt)} tokens")
    tokens = sample(params, [c.V - 1, *prompt[-(c.T // 2) :]], 100, c, args.seed)
    text = b"".join(map(coder.piece, tokens)).decode(errors="replace")
    print(f"---- sample\n{text}")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # where a terminal lacks a character
    with one_line("gpt2.py"):
        main()
