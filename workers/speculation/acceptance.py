"""How far a head's chains would be accepted, when held-out texts are served greedily."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def served_chains(right: NDArray[np.bool_], begin: int) -> NDArray[np.int64]:
    """Accepted drafts of each step, [steps]: right [n, K]: whether the k-th draft of a chain that begins at position p
    is the text's token. The first step begins at `begin`, each later one behind what was accepted and the token that
    the target adds. A mean over these is what a server counts; one over all positions would flatter the head, since
    it steps fast where it is right.
    """
    num_positions = len(right)
    run = np.cumprod(right, axis=1).sum(1)
    steps, at = [], begin
    while at < num_positions:
        steps.append(min(int(run[at]), num_positions - at))
        at += steps[-1] + 1
    return np.array(steps, np.int64)


def shares(steps: NDArray[np.int64], length: int) -> list[float]:
    """Of all steps, the share in which the first, second, ... of `length` drafts was accepted; 1 + their sum is the
    mean accepted length, the bonus token counted."""
    if not len(steps):
        return [0.0] * length
    return [round(float((steps > place).mean()), 4) for place in range(length)]
