r"""GPT-2 as the world knows it, which train_gpt.py starts from; OpenAI's own weights run in it.

Run     ./run.sh basics/gpt2.py                  a small one, on the embedded text
        ./run.sh basics/gpt2.py --size openai --prompt "Attention is"
        ./run.sh basics/gpt2.py --size openai --data data/mine --save my_gpt2
                 fine-tunes OpenAI's weights; Hugging Face transformers loads the folder my_gpt2
        ./run.sh basics/gpt2.py --from my_gpt2 --prompt "Attention is"
        ./run.sh basics/gpt2.py --size 124M --data data/fineweb10B --mesh 8 1 --batch 32 \
            --accumulate 16 --steps 1300 --lr 6e-4         on 8 GPUs or TPUs
Look    at `table`, which describes every parameter; at `forward`, the model; at `optimizer`
Dims    B sequence  T position  D model  F hidden  H head  L layer  V token; x residual stream
Source  Radford et al. 2019, github.com/openai/gpt-2. AdamW, warm-up, cosine, clipping and decay
        are from Brown et al. 2020, arXiv:2005.14165, but only matrices decay; there is no dropout
In train_gpt.py  `param_table` is the table, `block` the layer. `norm` has no weights, `norm_rotate`
        replaces learned positions, `mlp` squares a ReLU, `softcap` bounds the logits; `normuon`
        updates matrices, `whole_weights` gathers what is sharded, `pack_documents` packs documents
"""

import contextlib
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
import messages  # noqa: E402
import shards  # noqa: E402
import source_code  # noqa: E402


class Config(NamedTuple):
    L: int = 12
    H: int = 12
    D: int = 768
    T: int = 1024
    V: int = 50257
    compute: str = "bfloat16"  # format of activations; the weights themselves are float32


CONVERT = "save it again by transformers, as basics/README.md shows"
# The fields of Config, and their names in the config.json of GPT-2s on the hub.
NAMES = dict(L="n_layer", H="n_head", D="n_embd", T="n_positions", V="vocab_size")
OTHER_NAMES = dict(L="num_hidden_layers", H="num_attention_heads", D="hidden_size",
                   T="max_position_embeddings")  # fmt: skip
SIZES = {"small": Config(L=6, H=2, D=128, T=256, V=257), "124M": Config()}
HUB = {"openai": "openai-community/gpt2"}  # OpenAI's weights, 124M to 1.6B
HUB |= {f"openai-{size}": f"openai-community/gpt2-{size}" for size in ("medium", "large", "xl")}
HUB_TIMEOUT = 5.0  # seconds
# What the flags of training are if they are not passed, and with loaded weights.
SCRATCH = dict(steps=184, batch=4, accumulate=1, lr=2e-3, val_every=92, val_tokens=65536)
TUNING = SCRATCH | dict(steps=200, batch=1, lr=3e-5, val_every=50)


# ---- Model ---------------------------------------------------------------------------------------
def table(c: Config) -> dict[str, tuple]:
    """Of each parameter the shape, the split over the mesh, and mean and standard deviation of its
    initial values. Names are those of OpenAI's file, but h.* are arrays of all layers. Matrices
    that write to the residual stream begin smaller, because it adds up 2 L outputs."""
    L = c.L
    D = c.D
    F = 4 * c.D
    wide = 0.02
    write = wide / math.sqrt(2 * c.L)
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
    w = {name: p.astype(x.dtype) for name, p in w.items()}

    def linear(x, name):
        return jnp.tensordot(x, w[f"{name}.weight"], 1) + w[f"{name}.bias"]

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
    """AdamW by the mean gradient of `accumulate` microbatches, which MultiSteps collects. Its state
    takes twice the memory of the weights, and MultiSteps as much as they do."""
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
    lower than before, because a model that reads a short text often begins to memorize it. Returns
    the last weights."""
    train_text, val_text = texts
    tx = optimizer(args.lr, args.steps, args.accumulate)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params, state, tokens_BT):
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens_BT, c)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    def split(batch):
        return jax.device_put(batch, NamedSharding(mesh, P("data")))

    val_step = jax.jit(functools.partial(loss_fn, c=c))
    microbatch_tokens = args.batch * args.context
    val_batches = max(1, min(args.val_tokens, len(val_text) - 1) // microbatch_tokens)

    def validate(params):
        part = itertools.islice(batches(val_text, args.batch, args.context), val_batches)
        return np.mean([val_step(params, split(batch)) for batch in part])

    train_batches = batches(train_text, args.batch, args.context)
    state = tx.init(params)
    losses = {}
    recent = []  # training losses since the last line
    start = time.perf_counter()
    for step in range(args.steps + 1):
        about = ""
        if step % args.val_every == 0 or step == args.steps:
            losses[step] = validate(params)
            if not np.isfinite(losses[step]):
                raise shards.Fault(f"the loss is {losses[step]} at step {step}: pass a lower --lr")
            about = f"val_loss:{losses[step]:.4f}"
            if args.save and losses[step] == min(losses.values()):
                save(args.save, params, c)
                about += " saved"
        elif step % 10 == 0:
            about = f"train_loss:{np.mean(recent):.4f}"
        if about:
            recent = []
            tokens = step * args.accumulate * microbatch_tokens
            about += f" time:{time.perf_counter() - start:.1f}s"
            print(f"step:{step}/{args.steps} tokens:{tokens} {about}", flush=True)
        if step < args.steps:
            for _ in range(args.accumulate):
                params, state, loss = train_step(params, state, split(next(train_batches)))
                recent.append(loss)
    best = min(losses, key=losses.get)
    fall = f"the loss falls by {losses[0] - losses[best]:.4f}, and is lowest at step {best}"
    if args.source is None:
        check(f"the first loss is about log {c.V}", abs(losses[0] - math.log(c.V)) < 0.2)
    if args.source is None and args.steps:
        check(fall, best > 0)
    elif args.steps:
        cure = "the loss has not fallen: pass a lower --lr, or more --steps, or take more text"
        print(fall if best else cure)
    return params


# ---- Files ---------------------------------------------------------------------------------------
def download(repo: str) -> Path:
    """The folder of a model in the hub's cache, which is fetched if it is not there."""
    from cached_fineweb10B import explain
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import get_session

    files = dict(allow_patterns=["config.json", "model.safetensors"])
    with contextlib.suppress(Exception):
        return Path(snapshot_download(repo, local_files_only=True, **files))
    try:
        # First this question, because snapshot_download waits for an answer without an end.
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
        return Path(snapshot_download(repo, **files))
    except Exception as error:
        cure = "Or pass --from FOLDER: a copy of that model's folder, from another machine"
        raise shards.Fault(f"{repo}: {explain(error, repo, 'main')}. {cure}") from None


def read_folder(folder: Path) -> tuple[Config, dict[str, np.ndarray]]:
    """What save() or transformers has written. Raises Fault unless it is a GPT-2 in float32."""
    for name in ("config.json", "model.safetensors"):
        if not (folder / name).is_file():
            present = sorted(path.name for path in folder.iterdir())
            raise shards.Fault(f"has no file {name}, but {present[:20]}: {CONVERT}")
    try:
        name = "config.json"
        c = read_config(json.loads((folder / name).read_bytes()))
        name = "model.safetensors"
        return c, read(folder / name, c)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        with shards.open_file(folder / name) as file:
            what = f"{name} that begins with {file.read(40)} ({error!s:.150})"
        raise shards.Fault(f"has a broken {what}: get it again") from None


def check_tokens(folder: Path) -> None:
    """Raises Fault if a folder has a tokenizer of other tokens than GPT-2's."""
    ids = {b"the": 262, b"world": 995, b"language": 3303}  # with a space before the word
    for name in ("tokenizer.json", "vocab.json"):
        if not (folder / name).is_file():
            continue
        content = (folder / name).read_bytes()
        for word, number in ids.items():
            pattern = rb'(\xc4\xa0|\\u0120)%b" ?: ?%d\b' % (word, number)  # U+0120 is the space
            if not re.search(pattern, content):
                raise shards.Fault(f"has a {name} of other tokens than GPT-2's: use transformers")
    for name in ("vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"):
        if (folder / name).exists():
            raise shards.Fault(f"has a {name}, so its tokens are not GPT-2's: use transformers")


def read_config(about: dict) -> Config:
    """The sizes in a config.json. Raises Fault if another key changes transformers' GPT-2."""
    for key, other_name in OTHER_NAMES.items():
        if other_name in about:
            about.setdefault(NAMES[key], about[other_name])
    sizes = {name: about.get(name, Config._field_defaults[key]) for key, name in NAMES.items()}
    are_positive = all(type(size) is int and 0 < size < 2**31 for size in sizes.values())
    c = Config(**{key: sizes[name] for key, name in NAMES.items()})
    if not are_positive or c.D % c.H or c.T < 16:
        raise shards.Fault(f"has unusable sizes in config.json: {sizes!r:.300}")
    computed = {  # the values with which transformers' model is this one; the first is the default
        "model_type": ["gpt2"],
        "architectures": [None, [], ["GPT2LMHeadModel"], ["GPT2Model"]],
        "transformers_weights": [None],  # another file than model.safetensors
        "tokenizer_class": [None, "GPT2Tokenizer", "GPT2TokenizerFast"],
        "auto_map": [None],  # code in place of transformers'
        "activation_function": ["gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_python_tanh"],
        "layer_norm_epsilon": [1e-5],
        "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False],
        "is_causal": [True],
        "add_cross_attention": [False],
        "tie_word_embeddings": [True],
        "n_inner": [None, 4 * c.D],
        "pruned_heads": [None, {}],
        "quantization_config": [None],
        "dtype": ["float32", None],
        "torch_dtype": ["float32", None],  # of older versions
    } | {other_name: [getattr(c, key)] for key, other_name in OTHER_NAMES.items()}
    for key, values in computed.items():
        value = about.get(key, values[0])
        if value not in values:
            what = f"{key} {value!r:.80} in config.json, and this file computes {values}"
            raise shards.Fault(f"has {what}: use transformers")
    return c


def read(path: Path, c: Config) -> dict[str, np.ndarray]:
    """Weights from a model.safetensors with OpenAI's names, before which transformers may have put
    "transformer.". The format: 8 bytes with the size of a JSON header, the header, the data."""
    content = np.fromfile(path, np.uint8)
    begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:begin].tobytes())
    data = content[begin:]
    header.pop("__metadata__", None)
    spans = sorted(about["data_offsets"] for about in header.values())
    if [start for start, _ in spans] + [len(data)] != [0] + [end for _, end in spans]:
        raise shards.Fault(f"has a {path.name} whose arrays do not fill it: get it again")
    prefix = "transformer." if "transformer.wpe.weight" in header else ""
    if "lm_head.weight" in header:  # tied, so either name is enough
        header.setdefault(f"{prefix}wte.weight", header["lm_head.weight"])

    def array(name: str, shape: tuple) -> np.ndarray:
        if name not in header:
            raise shards.Fault(f"has no {name}, but {[*header][:5]}: use transformers")
        found = header.pop(name)
        start = found["data_offsets"][0]
        end = start + 4 * math.prod(shape)
        expected = dict(dtype="F32", shape=[*shape], data_offsets=[start, end])
        if found != expected:
            what = f"{name} as {found!r:.200}, and config.json needs {expected}"
            cure = "get both files again" if found.get("dtype") == "F32" else CONVERT
            raise shards.Fault(f"has {what}: {cure}")
        values = data[start:end].view("<f4").reshape(shape)
        if not np.isfinite(values).all():
            raise shards.Fault(f"has NaN or infinity in {name}: take another model")
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
            raise shards.Fault("has an lm_head.weight that is not wte.weight: use transformers")
    mask = prefix + "h[.][0-9]+[.]attn[.](bias|masked_bias)"  # of older versions: constants
    others = [name for name in header if not re.fullmatch(mask, name)]
    if others:
        what = f"other arrays than GPT-2, {len(others)} in all: {others[:5]}"
        raise shards.Fault(f"has {what}: use transformers")
    return params


def save(folder: Path, params: dict[str, Array], c: Config) -> None:
    """Writes the two files of which transformers' GPT2LMHeadModel.from_pretrained(folder) makes the
    model in PyTorch. They are like OpenAI's on the hub: each layer has its own arrays, with q, k
    and v side by side, and matrices are stored as inputs x outputs, which for once is not
    PyTorch's way, so that nothing is transposed."""
    arrays = {}
    for name, p in params.items():
        p = np.asarray(p, "<f4")  # this gathers what is split over devices
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
    vocab = (shards.read_manifest(folder) or shards.GPT2)["vocab"]
    largest = max(int(text.max()) for text in texts)
    if largest >= vocab:
        raise shards.Fault(f"has token {largest}, but a vocabulary of {vocab}: make it again")
    return vocab, texts


@contextlib.contextmanager
def named(folder: Path) -> Iterator[None]:
    """Puts a folder's name before a message."""
    try:
        yield
    except shards.Fault as fault:
        raise shards.Fault(f"{folder} {fault}") from None


def check(what: str, right: bool) -> None:
    print("ok   " if right else "WRONG", what, flush=True)
    if not right:
        sys.exit(1)


def main() -> None:
    cli = messages.Parser(description=__doc__)
    add = cli.add_argument
    folder = shards.folder_name
    add("--size", choices=[*SIZES, *HUB], help="default: small; openai has 124M parameters "
        "(0.5 GB), openai-xl 1.6B (6.4 GB)")  # fmt: skip
    add("--from", dest="source", type=folder, metavar="FOLDER",
        help="begin with weights that transformers or --save wrote")  # fmt: skip
    add("--data", type=folder, help="folder of shards, as in data/; default: the embedded text; "
        "loaded weights are trained only if this is passed")  # fmt: skip
    add("--mesh", type=int, nargs=2, default=(1, 1), metavar=("DATA", "MODEL"),
        help="devices over which batches, and layers, are split")  # fmt: skip
    add("--steps", type=int, help="updates of the weights; 0: only print the loss")
    add("--batch", type=int, help="sequences in a microbatch: a multiple of DATA")
    add("--context", type=int, help="tokens of a sequence; default: the model's positions")
    add("--accumulate", type=int, help="microbatches in a step")
    add("--lr", type=float, help="highest learning rate")
    add("--val_every", type=int, help="steps between two validations")
    add("--val_tokens", type=int, help="tokens to validate on, at most, but a microbatch")
    add("--seed", type=int, default=0, help="of the initial weights and of the samples")
    add("--prompt", help="what the sample continues; default: the first tokens of the validation "
        "text, or The")  # fmt: skip
    add("--save", type=folder, metavar="FOLDER", help="write the weights for transformers to load")
    args = cli.parse_args()
    loaded = args.source is not None or args.size in HUB
    for name in (*SCRATCH, "context"):
        if loaded and not args.data and getattr(args, name) is not None:
            cli.error(f"--{name} needs --data: there is no text to train on")
    for name, value in (TUNING if loaded else SCRATCH).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    for name in ("batch", "accumulate", "lr", "val_every", "val_tokens"):
        if not getattr(args, name) > 0:
            cli.error(f"--{name} {getattr(args, name)} is not above 0")
    if args.steps < 0:
        cli.error(f"--steps {args.steps} is below 0")
    if args.size and args.source:
        cli.error(f"--size {args.size} and --from {args.source}: the folder has its own size")
    if min(args.mesh) < 1 or args.batch % args.mesh[0]:
        cli.error(f"--mesh {args.mesh}: DATA and MODEL begin at 1, and DATA divides --batch")
    if not 0 <= args.seed < 2**32:
        cli.error(f"--seed {args.seed} is not from 0 to 4294967295")
    jax.config.update("jax_num_cpu_devices", math.prod(args.mesh))  # read on CPUs only
    mesh = jax.make_mesh(args.mesh, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    size = sum(math.prod(shape) for shape, *_ in table(SIZES["124M"]).values())
    check(f"GPT-2 124M has {size:,} parameters", size == 124_439_808)
    c = SIZES.get(args.size or "small")
    if args.size in HUB:
        args.source = download(HUB[args.size])
    if not loaded:
        args.data = args.data or DATA / "source_code"
    about = dict(data=args.data and args.data.name, jax=jax.__version__)
    print("gpt2.py", vars(args) | about)
    if args.save:  # now, because an error after the training would cost a run
        args.save.mkdir(parents=True, exist_ok=True)
    if args.data:
        with named(args.data):
            vocab, texts = read_text(args.data)
    if loaded:
        with named(args.source):
            c, weights = read_folder(args.source)
            check_tokens(args.source)
        if jax.default_backend() == "cpu":
            c = c._replace(compute="float32")  # there as fast as bfloat16
    else:
        c = c._replace(V=vocab, T=args.context or c.T)
        weights = initial(c, args.seed)
    if args.data and vocab != c.V:
        cure = "GPT-2's tokens are made by ./run.sh tokenize without --bytes"
        what = f"{args.data} has {vocab} different tokens, and {args.source} {c.V}"
        raise shards.Fault(f"{what}: {cure}")
    args.context = args.context or c.T
    if not 16 <= args.context <= c.T:
        cli.error(f"--context {args.context} is not from 16 to the model's {c.T} positions")
    if c.D % args.mesh[1]:
        cli.error(f"--mesh {args.mesh}: MODEL must divide the width {c.D}")
    needed = args.batch * args.context + 1
    if args.data and len(texts[1]) < needed:
        what = f"{args.data} has {len(texts[1]):,} tokens to validate on, and a microbatch of"
        what += f" {args.batch} x {args.context} needs {needed:,}"
        raise shards.Fault(f"{what}: pass a smaller --batch or --context")
    coder = shards.coder(c.V, c.V - 1)
    split = {name: NamedSharding(mesh, spec) for name, (_, spec, *_) in table(c).items()}
    params = jax.device_put(weights, split)
    del weights
    two = np.stack([np.arange(16), np.arange(16)])
    two[1, 8] = 99  # the two sequences differ in one token
    logits = jax.jit(functools.partial(forward, c=c))(params, two)
    if not np.isfinite(logits).all():
        raise shards.Fault(f"{args.source}: its weights are too large for {c.compute}: use another")
    change = np.abs(logits[0] - logits[1]).max(axis=-1)
    right = not change[:8].any() and (loaded or change[8:].all())
    check("a token changes logits at its position and at all later ones, nothing before", right)
    prompt = coder.encode("The" if args.prompt is None else args.prompt)
    if args.prompt is None and args.data:
        prompt = [token for token in texts[1][:64].tolist() if token != c.V - 1][:8]

    def print_sample(title):
        tokens = sample(params, [c.V - 1, *prompt[-c.T // 2 :]], 100, c, args.seed)
        text = b"".join(map(coder.piece, tokens)).decode(errors="replace")
        print(f"---- {title}\n{text}", flush=True)

    if loaded and args.data and args.steps:
        print_sample("before")
    if args.data:
        params = train(params, c, mesh, texts, args)
    elif args.save:
        save(args.save, params, c)
    if args.save:
        params = jax.device_put(read_folder(args.save)[1], split)
        print(f"{args.save} is for GPT2LMHeadModel.from_pretrained and for --from")
    print_sample("sample")


if __name__ == "__main__":
    with shards.one_line("gpt2.py"):  # \u4e2d is printed where a terminal lacks 中
        main()
