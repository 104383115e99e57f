"""What a decode step costs by its number of tokens: measured before the first request, corrected by every step.

A step of few tokens reads all weights whatever their number, so the first drafts cost little; how little, only this
machine knows. The shape is measured once (`Runner.warm_up`). What steps take later moves it as a whole (other load on
the machine, longer contexts) and, where steps differ from the shape, at their number of tokens, which is forgotten
again when no steps of that size come by.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

_LEARN = 0.1
_FORGET = 0.01
_WORST = 3.0
"""A step that took longer than so many times what was expected counts as if it had taken that."""


class StepCosts:
    def __init__(self, num_tokens: Sequence[int], seconds: Sequence[float]) -> None:
        """`seconds` [n] were measured for steps of `num_tokens` [n], which grow."""
        self._at = [float(size) for size in num_tokens]
        # More tokens never cost less. What says so is noise, and noise only adds.
        self._shape = np.minimum.accumulate(np.asarray(seconds, np.float64)[::-1])[::-1]
        self._ratio = np.ones(len(self._at))
        self._scale = 1.0
        self._curve = self._shape.tolist()

    def of(self, num_tokens: np.ndarray) -> np.ndarray:
        """Seconds of steps of so many tokens; beyond the largest that was measured they grow in proportion."""
        inside = np.interp(num_tokens, self._at, self._curve) * self._scale
        return inside * np.maximum(1.0, num_tokens / self._at[-1])

    def at(self, num_tokens: int) -> float:
        """Seconds of one step, as `of` has it, without numpy's overhead: it is asked for in every step."""
        at, curve = self._at, self._curve
        right = bisect_left(at, num_tokens)
        if right == len(at):
            return curve[-1] * self._scale * num_tokens / at[-1]
        if right == 0:
            return curve[0] * self._scale
        share = (num_tokens - at[right - 1]) / (at[right] - at[right - 1])
        return (curve[right - 1] + (curve[right] - curve[right - 1]) * share) * self._scale

    def observe(self, num_tokens: int, seconds: float) -> None:
        error = min(seconds / self.at(num_tokens), _WORST) - 1.0
        self._ratio += (1.0 - self._ratio) * _FORGET
        self._ratio[self._nearest(num_tokens)] *= 1.0 + _LEARN * error
        self._scale *= 1.0 + _LEARN * error
        self._curve = (self._shape * self._ratio).tolist()

    def _nearest(self, num_tokens: int) -> int:
        """The measured size that is nearest."""
        right = min(bisect_left(self._at, num_tokens), len(self._at) - 1)
        left = max(0, right - 1)
        return left if num_tokens - self._at[left] <= self._at[right] - num_tokens else right
