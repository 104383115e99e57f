"""What a decode step costs by its number of tokens: measured before the first request, corrected by every step.

A step of few tokens reads all weights whatever their number, so the first drafts cost little; how little, only this
machine knows. The shape is measured once (`Runner.warm_up`). What steps take later moves it as a whole (other load on
the machine, longer contexts) and, where steps differ from the shape, at their number of tokens, which is forgotten
again when no steps of that size come by.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_LEARN = 0.1
_FORGET = 0.01
_WORST = 3.0
"""A step that took longer than so many times what was expected counts as if it had taken that."""


class StepCosts:
    def __init__(self, num_tokens: Sequence[int], seconds: Sequence[float]) -> None:
        """`seconds` [n] were measured for steps of `num_tokens` [n], which grow."""
        self._at = np.asarray(num_tokens, np.float64)
        # More tokens never cost less. What says so is noise, and noise only adds.
        self._shape = np.minimum.accumulate(np.asarray(seconds, np.float64)[::-1])[::-1]
        self._scale = 1.0
        self._ratio = np.ones(len(self._at))

    def of(self, num_tokens: np.ndarray) -> np.ndarray:
        """Seconds of steps of so many tokens; beyond the largest that was measured they grow in proportion."""
        inside = np.interp(num_tokens, self._at, self._shape * self._ratio) * self._scale
        return inside * np.maximum(1.0, num_tokens / self._at[-1])

    def observe(self, num_tokens: int, seconds: float) -> None:
        expected = float(self.of(np.array([num_tokens]))[0])
        error = min(seconds / expected, _WORST) - 1.0
        self._ratio += (1.0 - self._ratio) * _FORGET
        nearest = int(np.abs(self._at - num_tokens).argmin())
        self._ratio[nearest] *= 1.0 + _LEARN * error
        self._scale *= 1.0 + _LEARN * error
