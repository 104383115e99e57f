"""What a step's chunks report of their prompts: log-probabilities of the prompt's tokens, and last hidden states.

Logits of a whole prompt would be gigabytes, so they are made and read in slices (`_SLICE`). The words of a report
are laid out as `wire.py` says. The same code serves every device: reports are tensors where the model is, and their
owner takes them to the output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipring.kernels.logprobs import top_logprobs
from slipring.shm.table import BatchTable
from slipring.shm.wire import StepFlag, StepInputView
from slipring.workers.models.llama import Llama

_SLICE = 4 << 20
"""Logits held at once."""
_BYTES_EACH = 16
"""Of a logit in a slice: raw, float32, compared, and what finding the best takes."""
RESERVE_BYTES = _SLICE * _BYTES_EACH
"""What a report takes beyond the forward pass."""


@dataclass(frozen=True, slots=True)
class EntryReport:
    entry: int
    words: Tensor
    """[n] int32"""
    ok: Tensor
    """bool, one: it holds numbers."""


class Reporter:
    """`num_prompt` and `prompt_logprobs` of a row are read from the table, where they stay while the row lives."""

    def __init__(self, model: Llama, table: BatchTable) -> None:
        self._model = model
        self._table = table
        self._tokens = torch.from_numpy(table.token_ids)

    def reports(self, step: StepInputView, hidden: Tensor) -> Iterator[EntryReport]:
        """hidden [T, hidden] of the step's tokens: those of decode rows, then chunks in their order."""
        num_rows, num_decode = int(step.header[step.NUM_ROWS]), int(step.header[step.NUM_DECODE])
        flags = step.flags[num_decode:num_rows]
        wanted = np.flatnonzero(flags & (StepFlag.SCORE | StepFlag.EMBED))
        if not len(wanted):
            return
        num_tokens = step.num_tokens[num_decode:num_rows]
        ends = len(hidden) - int(num_tokens.sum()) + np.cumsum(num_tokens)
        for i in wanted.tolist():
            entry, end = num_decode + i, int(ends[i])
            if flags[i] & StepFlag.SCORE:
                yield self._score(step, entry, hidden, end - int(step.num_tokens[entry]))
            else:
                yield self._embed(entry, hidden, end - 1)

    def _embed(self, entry: int, hidden: Tensor, at: int) -> EntryReport:
        last = torch.full((1,), at, dtype=torch.int64, device=hidden.device)
        state = self._model.normed(hidden, last)[0].float()
        return EntryReport(entry, state.view(torch.int32), state.isfinite().all())

    def _score(self, step: StepInputView, entry: int, hidden: Tensor, begin: int) -> EntryReport:
        """`begin`: the entry's first token in the batch."""
        row, start = int(step.rows[entry]), int(step.start[entry])
        last = min(start + int(step.num_tokens[entry]), int(self._table.num_prompt[row]) - 1)
        tokens = self._tokens[row, start + 1 : last + 1].to(hidden.device, non_blocking=True).long()
        at = torch.arange(begin, begin + last - start, device=hidden.device)
        count, size = int(self._table.prompt_logprobs[row]), max(1, _SLICE // self._model.embedding.shape[0])
        parts = [
            self._records(hidden, at[i : i + size], tokens[i : i + size], count) for i in range(0, last - start, size)
        ]
        words = torch.cat(parts)
        return EntryReport(entry, words.reshape(-1), ~words[:, 0].view(torch.float32).isnan().any())

    def _records(self, hidden: Tensor, at: Tensor, tokens: Tensor, count: int) -> Tensor:
        """[n, 2 + 2 * count] int32"""
        found = top_logprobs(self._model.logits(hidden, at).float(), tokens, count)
        columns = (found.logprob.view(torch.int32), found.rank.int())
        return torch.cat((torch.stack(columns, 1), found.top_ids.int(), found.top_logprobs.view(torch.int32)), 1)
