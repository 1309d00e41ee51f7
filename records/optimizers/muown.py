"""Muown: Muon on directions, Adam on lengths. Lion et al. 2026, arXiv:2605.10797.

The weights w of a neuron (a column of W) are g v / |v|. With their gradient G and u = w / g:
    dg = u . G,   dv = g / |v| (G - u dg)
    V <- V - rate .2 sqrt(max(inputs, outputs)) orthogonal(momentum of dV),   g <- Adam(dg)
Only the direction of V counts: |v| is set after every step, and grows from its first value toward
`stretch`, which makes turns smaller. There is no decay.
"""

import jax
import jax.numpy as jnp
import optax
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {"124m": dict(steps=3075, lr=0.0035)}


def optimizer(params, total_steps, lr=0.01, momentum=0.95, stretch=2.688):
    """Muown for the matrices of the blocks, AdamW for everything else."""
    rate = cooldown(lr, total_steps)
    trace = optax.trace(momentum, nesterov=True)
    adam = optax.adam(rate, b1=0.9, b2=0.95, eps=1e-15)

    def init(params):
        g = jax.tree.map(lengths, params)
        return jnp.zeros((), jnp.int32), g, g, trace.init(params), adam.init(g)

    def update(grads, state, params):
        step, first, g, trace_state, adam_state = state
        progress = step / total_steps
        part = progress**2 * (3 - 2 * progress)

        def v_length(w, length):
            end = stretch * (3.33 if w.shape[0] > w.shape[1] else 1)  # mlp.proj grows more
            return length + part * (end - length)

        v_norm = jax.tree.map(v_length, params, first)
        u = jax.tree.map(jnp.divide, params, g)
        dg = jax.tree.map(lambda u, G: jnp.sum(u * G, axis=0, keepdims=True), u, grads)
        dv = jax.tree.map(lambda n, g, G, u, d: g / n * (G - u * d), v_norm, g, grads, u, dg)
        dv, trace_state = trace.update(dv, trace_state)
        dg, adam_state = adam.update(dg, adam_state)
        g = jax.tree.map(jnp.add, g, dg)

        def change(w, u, n, g, dv):
            v = u * n - rate(step) * 0.2 * max(w.shape) ** 0.5 * orthogonalize(dv)
            norm = jnp.linalg.norm(v, axis=0, keepdims=True)
            return g * v / jnp.maximum(norm, 1e-12) - w

        updates = jax.tree.map(change, params, u, v_norm, g, dv)
        return updates, (step + 1, first, g, trace_state, adam_state)

    return beside_adam(optax.GradientTransformation(init, update), params, total_steps)


def lengths(w):
    """Norms of columns; of those of zeros, that of the other weights' columns."""
    norm = jnp.linalg.norm(w, axis=0, keepdims=True)
    return jnp.where(norm > 1e-12, norm, 0.33**0.5)


def orthogonalize(update):
    """The orthogonal matrix nearest to the update."""
    is_tall = update.shape[0] > update.shape[1]
    x = update.T if is_tall else update
    x = x / (jnp.linalg.norm(x) + 1e-15)
    for _ in range(12):
        gram = x @ x.T
        x = 2 * x + (-1.5 * gram + 0.5 * gram @ gram) @ x
    return x.T if is_tall else x
