"""Records what functions of train_gpt.py compute while its model runs, and how its heads attend."""

from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import jax
import numpy as np

BLOCKS = "block", "mudd_block"
RECORDED = "attend attention in_heads mlp run_net weighted_sum block mudd_block".split()


class Call(NamedTuple):
    """A call of one of the RECORDED functions of train_gpt.py, while the model is traced."""

    name: str
    caller: str  # the recorded function that called it; "": forward() did
    layer: int  # where it ran; between two layers the next one, after all layers their number
    arguments: tuple
    result: Any


def record_calls(code: ModuleType, calls: list[Call]) -> Any:
    """A context in which the RECORDED functions that the script has also append each of their calls
    to `calls`, when it returns: after the calls that it made itself."""
    stack = [""]  # the recorded functions that are running

    def recorded(name):
        function = getattr(code, name)

        def run(*arguments, **options):
            finished_blocks = [call for call in calls if call.name in BLOCKS]
            layer = len(finished_blocks)
            stack.append(name)
            result = function(*arguments, **options)
            stack.pop()
            # A copy of a dict, because forward() later changes its dict of gates.
            copy = dict(result) if isinstance(result, dict) else result
            calls.append(Call(name, stack[-1], layer, arguments, copy))
            return result

        return run

    names = [name for name in RECORDED if hasattr(code, name)]
    return mock.patch.multiple(code, **{name: recorded(name) for name in names})


def attention(q, k, window: int, scale: float, T: int) -> np.ndarray:
    """(B, H / n, T, n, T): the share of each query's attention that each token gets. q and k are
    (B, n T, H / n, K), where n heads are paired: position n t + i is token t of head i. The window
    is in positions; scores are multiplied by the scale."""
    B, P, H, _ = q.shape
    n = P // T
    back = np.arange(P)[:, None] - np.arange(P)
    scores = scale * np.einsum("BPHK,BSHK->BHPS", np.float32(q), np.float32(k))
    is_visible = (0 <= back) & (back <= window)
    attention_BHPS = np.asarray(jax.nn.softmax(np.where(is_visible, scores, -np.inf)))
    # From positions to tokens: T and S are tokens, N is the head of a group.
    return attention_BHPS.reshape(B, H, T, n, T, n).sum(axis=-1)
