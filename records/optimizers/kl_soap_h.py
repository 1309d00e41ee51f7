"""KL-SOAP: SOAP whose two matrices are fitted together, on a sphere. Lin et al., arXiv:2509.03378;
the sphere ("hyperball") as on upstream's board.

L = average of g R^-1 g^T / outputs, R = average of g^T L^-1 g / inputs (b2): the Kronecker product
of them is the nearest to the covariance of g in KL divergence, where SOAP's is not
P, Q = eigenvectors of L and R: a step of power iteration from the last ones, and QR
l, r = averages of the diagonals of P^T (g R^-1 g^T) P / outputs and Q^T (g^T L^-1 g) Q / inputs;
R^-1 is taken as Q diag(1 / r) Q^T, and L^-1 likewise
The rest is soap_h.py: m = average of g (b1); v = average of (P^T g Q)^2 (b2);
u = P ((P^T m Q) / sqrt(v)) Q^T; w = w - lr |w| u / |u|, scaled back to its first norm.
"""

import jax
import jax.numpy as jnp
import optax
from muonh import hyperball, initial_value  # noqa: F401 - it replaces the plain one
from soap_h import rotated, start
from train_gpt_simple import beside_adam, cooldown

SETTINGS = {
    "tiny": dict(steps=1275, lr=0.018, b2=0.95),
    "124m": dict(steps=3125, lr=0.018, b1=0.95, b2=0.9),
}


def optimizer(params, total_steps, lr=0.018, b1=0.95, b2=0.9):
    """KL-SOAP on a sphere for the matrices of the blocks, AdamW for everything else. The rate falls
    from the first step on."""

    def start_near_gradients(param):
        inputs, outputs = param.shape
        return start(param) | {"l": jnp.full(inputs, 1e-4), "r": jnp.full(outputs, 1e-4)}

    def average(old, new):
        return b2 * old + (1 - b2) * new

    def advance(g, s):
        inputs, outputs = g.shape
        in_P_and_Q = s["P"].T @ g @ s["Q"]
        for_left = in_P_and_Q * inverse_sqrt(s["r"])
        for_right = in_P_and_Q * inverse_sqrt(s["l"])[:, None]
        left = s["P"] @ for_left
        right = for_right @ s["Q"].T
        L = average(s["L"], left @ left.T / outputs)
        R = average(s["R"], right.T @ right / inputs)
        return {
            "m": s["m"] + (1 - b1) * (g - s["m"]),
            "v": average(s["v"], in_P_and_Q**2),
            "L": L,
            "R": R,
            "P": jnp.linalg.qr(L @ s["P"])[0],
            "Q": jnp.linalg.qr(R @ s["Q"])[0],
            "l": average(s["l"], jnp.mean(for_left**2, axis=1)),
            "r": average(s["r"], jnp.mean(for_right**2, axis=0)),
        }

    soap = rotated(start_near_gradients, advance)
    sphere = hyperball(cooldown(lr, total_steps, start=0.0))
    return beside_adam(optax.chain(soap, sphere), params, total_steps)


def inverse_sqrt(values):
    """values^(-1/2). Values below a millionth of the largest are noise: they count as that."""
    return jax.lax.rsqrt(jnp.maximum(values, 1e-6 * jnp.max(values) + 1e-30))
