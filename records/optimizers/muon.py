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
from train_gpt_simple import beside_adam, cooldown

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
