"""What a step costs: one linear model, fitted to measured steps as they return.

    seconds ≈ base + per_row * rows + per_token * prompt tokens + per_context * attended tokens

Recursive least squares with forgetting. It paces the pipeline (when to publish the next step), sizes the chunk of a
mixed step under an inter-token-latency target, and is the yardstick for "this step takes too long".
"""

from __future__ import annotations

import numpy as np

_FORGET = 0.99
_SCALE = np.array([1.0, 1 / 64, 1 / 256, 1 / 16384])
"""Brings the features to about one, so that one bound fits all directions of the covariance."""
_LEAST_SHARE = 0.25
_MOST_UNCERTAIN = 10.0
"""Bound on the covariance's trace: without excitation in a direction forgetting would let it grow for ever."""


class StepCost:
    def __init__(self) -> None:
        self._weights = np.zeros(4)
        self._covariance = np.eye(4) * _MOST_UNCERTAIN / 4
        self.num_observed = 0

    @staticmethod
    def _features(num_rows: int, num_chunk_tokens: int, num_context: int) -> np.ndarray:
        return np.array([1.0, num_rows, num_chunk_tokens, num_context]) * _SCALE

    def observe(self, num_rows: int, num_chunk_tokens: int, num_context: int, seconds: float) -> None:
        """Learn from one returned step."""
        x = self._features(num_rows, num_chunk_tokens, num_context)
        gain = self._covariance @ x
        gain /= _FORGET + x @ gain
        self._weights += gain * (seconds - x @ self._weights)
        covariance = (self._covariance - np.outer(gain, x @ self._covariance)) / _FORGET
        # Symmetric and scaled as a whole, so that it stays positive definite and the gain keeps its sign.
        covariance = (covariance + covariance.T) / 2
        trace = float(np.trace(covariance))
        self._covariance = covariance * (_MOST_UNCERTAIN / trace) if trace > _MOST_UNCERTAIN else covariance
        self.num_observed += 1

    def predict(self, num_rows: int, num_chunk_tokens: int, num_context: int) -> float:
        """Seconds, at least 0; 0 while nothing is known."""
        return max(0.0, float(self._features(num_rows, num_chunk_tokens, num_context) @ self._weights))

    def chunk_within(self, target_s: float, num_rows: int, num_context: int, least: int, most: int) -> int:
        """The longest chunk, in [least, most], that keeps a step with `num_rows` decode rows under `target_s`."""
        per_token = float(self._weights[2] * _SCALE[2])
        if self.num_observed < 8 or per_token <= 0.0:
            return most
        decode_s = self.predict(num_rows, 0, num_context)
        # Where decoding alone misses the target, starving prompts gains nothing: they get a share on top.
        spare = max(target_s - decode_s, _LEAST_SHARE * decode_s)
        return int(min(most, max(least, spare / per_token)))
