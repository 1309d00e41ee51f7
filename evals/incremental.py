"""The log-probabilities of a text's next token, without a whole pass over the text for every token.

A text is read in chunks: the script's own forward() reads CHUNK tokens, of which the last are new,
while these functions of its module are replaced:

    positions      computes those of the whole text, and returns the chunk's
    attend         stores the new tokens' keys and values, and attends to all that are stored
    dc_attention   stores them, too, and calls the script's with the stored ones that it can see

After forward(), the new tokens' keys of the pointer are stored as well.

What a chunk computes for its new tokens is what a whole pass computes, because only attention and
the pointer reach far back. Beside them a token reads an n-gram of at most 5 tokens, by smear the
token before it, and by key_offset the key of the token before it, which has read 5 tokens itself.
The pointer's key of a token reads the output for the token before it, too.
HALO tokens before the new ones are enough for that. The first of them have wrong n-grams, and so
wrong streams, keys and values, but nothing reads these: other tokens read the stored ones, which
were computed when that token was new.

A copy of the script may have parts that reach further, or another attention. So random tokens are
read first, for which a whole pass must give the same probabilities. If it does not, every token
takes a whole pass.
"""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import weights
from jax import Array, P, lax
from jax.sharding import NamedSharding

CHUNK = 16  # tokens that the program reads
HALO = 8  # of them at the beginning of a chunk are not new, unless the text begins there
ROOM = 4096  # tokens for which memory is taken at once, if the text may grow to them
TEST = 96  # random tokens
TOLERANCE = 1e-3  # of their log-probabilities
REPLACED = "positions", "attend", "dc_attention"


class Chunk:
    """The functions that replace REPLACED while a chunk is traced: CHUNK tokens of a text, from
    token `start` on, of which those from `first` to `last` are new."""

    def __init__(self, code: ModuleType, tokens_BT: Array, first: Array, last: Array, store: list):
        self.script = {name: getattr(code, name) for name in REPLACED}
        self.patch = mock.patch.multiple(code, **{name: getattr(self, name) for name in REPLACED})
        self.tokens = tokens_BT
        self.start = jnp.maximum(last + 1 - CHUNK, 0)
        token = self.start + jnp.arange(CHUNK)
        self.is_new = (first <= token) & (token <= last)
        # (B, T, D): keys and values of all calls of attend and dc_attention, keys of the pointer.
        self.store = store
        self.stored = []  # the same of the calls so far, with those of the new tokens

    def part(self, x: Array, axis: int = 1) -> Array:
        """The chunk's part of an array that has an axis of the text's tokens."""
        return lax.dynamic_slice_in_dim(x, self.start, CHUNK, axis)

    def positions(self, _: Array, c: Any, stage: int, last: Any = None) -> Any:
        """The script's positions(), of the chunk. The number of a token's document
        depends on all tokens before it."""
        whole = self.script["positions"](self.tokens == c.eot, c, stage)
        rope = {}
        for paired, angles in whole.rope.items():
            rope[paired] = [self.part(x, axis=0) for x in angles]
        return whole._replace(rope=rope, doc_q=self.part(whole.doc_q), doc_k=self.part(whole.doc_k))

    def attend(self, q_BiHK, k, v, window: int, scale: float, _: Any) -> Array:
        """The script's attend(), for the chunk's queries and the stored keys."""
        k_BjHK, v_BjHK, nearest = self.store_and_take(k, v, window)
        distance = nearest[:, None] - jnp.arange(k_BjHK.shape[1])
        scores = jnp.einsum("BiHK,BjHK->BHij", q_BiHK, k_BjHK, preferred_element_type="float32")
        scores = jnp.where((0 <= distance) & (distance <= window), scale * scores, -jnp.inf)
        return jnp.einsum("BHij,BjHK->BiHK", jax.nn.softmax(scores).astype(v.dtype), v_BjHK)

    def dc_attention(self, q, k, v, w_in, w_out, scale: float, c: Any) -> Array:
        """The script's dc_attention(). It takes as many queries as keys, so that those before and
        after the chunk are zeros."""
        k, v, nearest = self.store_and_take(k, v, c.dc_window)
        queries = []
        for x in (q, w_in, w_out):
            zeros = jnp.zeros((*k.shape[:2], *x.shape[2:]), x.dtype)
            queries.append(lax.dynamic_update_slice_in_dim(zeros, x, nearest[0], axis=1))
        q, w_in, w_out = queries
        y = self.script["dc_attention"](q, k, v, w_in, w_out, scale, c)
        return lax.dynamic_slice_in_dim(y, nearest[0], CHUNK, axis=1)

    def store_and_take(self, k: Array, v: Array, reach: int) -> tuple[Array, Array, Array]:
        """Stores the new tokens' keys and values. k and v have the chunk's positions: n for each
        token, if n heads are paired. Returns stored ones that include the chunk's and `reach`
        positions before it, and where the one of each of the chunk's positions is among them."""
        B, positions = k.shape[:2]
        near = []
        for x in (k, v):
            x_BTD = self.store_rows(x.reshape(B, CHUNK, -1))
            near.append(x_BTD.reshape(B, -1, *x.shape[2:]))
        total = near[0].shape[1]
        size = min(reach + positions, total)
        first = self.start * positions // CHUNK
        begin = jnp.clip(first - reach, 0, total - size)
        k, v = (lax.dynamic_slice_in_dim(x, begin, size, axis=1) for x in near)
        return k, v, first - begin + jnp.arange(positions)

    def store_rows(self, x_BCD: Array) -> Array:
        """Stores the new tokens' rows, and returns those of all tokens, (B, T, D)."""
        old_BTD = self.store[len(self.stored)]
        new_BCD = jnp.where(self.is_new[:, None], x_BCD, self.part(old_BTD))
        x_BTD = lax.dynamic_update_slice_in_dim(old_BTD, new_BCD, self.start, axis=1)
        self.stored.append(x_BTD)
        return x_BTD


class Reader:
    """Reads texts that grow, and computes the log-probabilities of their next tokens, in
    float32."""

    def __init__(self, w: weights.Weights):
        c = dataclasses.replace(w.c, compute="float32").without_fp8()
        self.w = w._replace(c=w.code.fit_kernels(w.devices[0], c))
        self.mesh, self.arrays = weights.place(self.w, 1)
        self.chunks = self.jit(self.read_chunk, donate_argnums=1)
        self.can_read_chunks = None  # not known yet
        self.tokens = np.zeros((0, 0), np.int32)  # (B, length): those that are stored
        self.store = []  # see Chunk

    def __call__(self, tokens: np.ndarray, most: int = 0) -> np.ndarray:
        """Log-probabilities (B, V) of the tokens that follow `tokens`, (B, length). Texts may grow
        to `most` tokens, and also beyond, but that compiles another program."""
        B, length = tokens.shape
        # Powers of two: few programs compile. Attention is causal, so that padding has no effect.
        T = 1 << (max(256, length, min(most, ROOM)) - 1).bit_length()
        with jax.default_matmul_precision("highest"):  # or GPUs would multiply in TF32
            if self.can_read_chunks is None:
                self.test(B, T)
            if self.can_read_chunks:
                return self.read_on(tokens, T)
            padded = np.pad(tokens, ((0, 0), (0, T - length)))
            arguments = padded, weights.ngram_rows(self.w, padded), length - 1
            return weights.check_outputs(self.w, self.whole(self.arrays, arguments))

    def jit(self, function, **options):
        """A program of read_chunk() or read_whole()."""
        return weights.jit(self.w, function, self.mesh, P(), P(), **options)

    def test(self, B: int, T: int) -> None:
        """Finds out whether chunks give the log-probabilities of a whole pass, for a text of three
        documents. The program of the whole pass compiles beside the other one; it runs once, so
        that it is not optimized."""
        rng = np.random.default_rng(0)
        tokens = rng.choice(rng.integers(0, self.w.c.vocab, 9), (1, TEST))  # few, so some repeat
        tokens[:, [0, TEST // 3, TEST // 2]] = self.w.c.eot
        options = {}
        if self.w.devices[0].platform == "cpu":
            options = {"xla_backend_optimization_level": 0}
        arguments = tokens, weights.ngram_rows(self.w, tokens), TEST - 1
        whole = self.jit(self.read_whole, compiler_options=options)
        whole = whole.lower(self.arrays, arguments)
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(whole.compile)
            try:
                for n in range(TEST - 2, TEST + 1):
                    log_p = self.read_on(np.repeat(tokens[:, :n], B, axis=0), T)
                expected = np.asarray(whole.result()(self.arrays, arguments))
                gap = np.abs(log_p - expected).max()
                why = f"the log-probabilities of random tokens differ by {gap:.2g}"
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                gap = np.inf
                why = repr(error)
        self.can_read_chunks = bool(gap < TOLERANCE)  # False also for NaN
        if not self.can_read_chunks:
            weights.tell(f"{self.w.script} has parts that evals/incremental.py does not know, so "
                         f"every token takes a whole pass ({why})")  # fmt: skip
            self.store = []
            self.whole = self.jit(self.read_whole)

    def read_on(self, tokens: np.ndarray, T: int) -> np.ndarray:
        """Log-probabilities (B, V) after tokens (B, length), of which those are read that are not
        stored. T tokens of each text can be stored."""
        B, length = tokens.shape
        store = self.store
        self.store = []  # unless Ctrl-C ends this: a program that has begun takes its memory
        known = 0  # tokens that all texts have in common with those that are stored
        if store and store[0].shape[:2] == (B, T):
            most = min(self.tokens.shape[1], length - 1)
            is_same = (self.tokens[:, :most] == tokens[:, :most]).all(axis=0)
            known = int(np.append(is_same, False).argmin())
        else:
            store = self.empty_store(B, T)
        padded = np.pad(tokens, ((0, 0), (0, T - length)))
        for first in range(known, length, CHUNK - HALO):
            last = min(first + CHUNK - HALO, length) - 1
            start = max(0, last + 1 - CHUNK)
            rows = weights.ngram_rows(self.w, padded[:, start : start + CHUNK])
            log_p, store = self.chunks(self.arrays, store, (padded, rows, first, last))
        self.tokens = tokens
        self.store = store
        return weights.check_outputs(self.w, log_p)

    def empty_store(self, B: int, T: int) -> list[Array]:
        """Zeros, (B, T, D): two arrays for each attention, and one for the pointer."""
        c = self.w.c
        calls = sum((layer.window is not None) + layer.dc for layer in c.layers)
        device = NamedSharding(self.mesh, P())
        widths = [c.D] * 2 * calls
        if c.pointer:
            widths.append(c.pointer_D)
        return [jnp.zeros((B, T, width), c.compute, device=device) for width in widths]

    def read_chunk(self, whole: dict, store: list, arguments: tuple) -> tuple[Array, list]:
        """Log-probabilities (B, V) after token `last`, and the store with the tokens from `first`
        to it."""
        tokens_BT, rows_BND, first, last = arguments
        chunk = Chunk(self.w.code, tokens_BT, first, last, store)
        with chunk.patch:
            x_BCD = self.forward(whole, chunk.part(tokens_BT), rows_BND)
        q_BCE, k_BCE = self.pointer_qk(x_BCD, whole)
        k_BTE = None if k_BCE is None else chunk.store_rows(k_BCE)
        x_BD, q_BE = jax.tree.map(lambda y: y[:, last - chunk.start], (x_BCD, q_BCE))
        arguments = x_BD, tokens_BT, last, q_BE, k_BTE
        return weights.predict(self.w, whole, *arguments, padding=False).log_p, chunk.stored

    def read_whole(self, whole: dict, arguments: tuple) -> Array:
        """Log-probabilities (B, V) after token `last`."""
        tokens_BT, rows_BND, last = arguments
        x_BTD = self.forward(whole, tokens_BT, rows_BND)
        q_BTE, k_BTE = self.pointer_qk(x_BTD, whole)
        x_BD, q_BE = jax.tree.map(lambda y: y[:, last], (x_BTD, q_BTE))
        arguments = x_BD, tokens_BT, last, q_BE, k_BTE
        return weights.predict(self.w, whole, *arguments, padding=False).log_p

    def forward(self, whole: dict, tokens: Array, rows_BND: Array) -> Array:
        """The normalised output of the script's forward()."""
        w = whole | {"ngram_rows": rows_BND}
        return self.w.code.norm(self.w.code.forward(w, tokens, self.w.c, self.w.stage))

    def pointer_qk(self, x: Array, whole: dict) -> tuple:
        """The script's pointer_qk(), or None and None without [pointer]."""
        if not self.w.c.pointer:
            return None, None
        return self.w.code.pointer_qk(x, whole, self.w.c)
