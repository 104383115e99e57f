"""`PromptLogprobs`: log-probabilities of a prompt's tokens, kept as the worker's words until somebody reads them.

A long prompt has thousands; as objects they would take the loop milliseconds, so whoever wants objects makes them
where that does no harm (`Engine.text_work`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from slipring.runtime.request import TokenLogprob
from slipring.shm.wire import score_words


class PromptLogprobs:
    """Of the prompt's tokens from the second on; the first follows nothing, so it has none."""

    __slots__ = ("_num_top", "_records")

    def __init__(self, parts: Sequence[NDArray[np.int32]], num_alternatives: int) -> None:
        """`parts`: SCORE reports (`wire.py`) in order; owned from now on."""
        words = np.concatenate(parts) if parts else np.empty(0, np.int32)
        self._num_top = num_alternatives
        self._records = words.reshape(-1, score_words(num_alternatives))

    def __len__(self) -> int:
        return len(self._records)

    def entries(self, token_ids: Sequence[int] | NDArray[np.int64], num_alternatives: int) -> list[TokenLogprob]:
        """token_ids: the whole prompt's. `num_alternatives`: at most as many as were asked of the engine."""
        top, words = self._num_top, self._records
        floats = words.view(np.float32)
        columns = (
            np.asarray(token_ids)[1:],
            floats[:, 0],
            words[:, 1],
            words[:, 2 : 2 + num_alternatives],
            floats[:, 2 + top : 2 + top + num_alternatives],
        )
        return [
            TokenLogprob(token, logprob, rank, tuple(zip(ids, values, strict=True)))
            for token, logprob, rank, ids, values in zip(*(column.tolist() for column in columns), strict=True)
        ]
