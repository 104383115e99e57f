"""`DeviceSampler`: the stateless sampler of `workers/sampler.py` on a device, with the same order and the same draws.

Parameters of every row lie in one int32 table on the device, a column a row, written at admission; a draw gathers
what its rows need, so it may be captured. Rows that edit their logits, count their tokens or report
log-probabilities are known to the host (`edits.py`, `asked`), and what they need is enqueued beside the graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipring.kernels.sampling import DrawParams, draw
from slipring.kernels.token_mask import apply_token_mask
from slipring.shm.params import MAX_LOGPROBS
from slipring.shm.table import BatchTable
from slipring.workers.constraints import Constraints, Masks
from slipring.workers.cuda.device import Device
from slipring.workers.cuda.edits import Edits, IntArray

_INTEGERS = ("top_k", "choice")
_FLOATS = ("temperature", "top_p", "min_p")
_SEED_LOW, _SEED_HIGH = (len(_INTEGERS) + len(_FLOATS) + i for i in range(2))
_NUM_WORDS = _SEED_HIGH + 1


@dataclass(frozen=True, slots=True)
class Asked:
    """Rows of a draw that report log-probabilities."""

    at: IntArray
    """[L]: indices into the sampled rows."""
    count: int
    """Alternatives reported for each."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Of S sampled rows, in order, on the device."""

    tokens: Tensor
    """[S] int64"""
    ok: Tensor
    """[S] bool; False where the logits held NaN or infinity, or masks left no token: the token means nothing."""
    masks: Masks | None = None
    """What grammars allowed."""
    barred: Tensor | None = None
    """[S] bool: of those that are not ok, whose masks left no token; None: no row had any."""


class DeviceSampler:
    def __init__(self, table: BatchTable, vocab_size: int, device: Device, constraints: Constraints) -> None:
        num_rows = table.shape.num_rows
        self._table = table
        self._device = device
        self.constraints = constraints
        # One row more than the table: padding draws like a greedy row.
        self._words = torch.zeros((_NUM_WORDS, num_rows + 1), dtype=torch.int32, device=device.torch)
        self._words[len(_INTEGERS) + _FLOATS.index("top_p")].view(torch.float32).fill_(1.0)
        self.edits = Edits(table, vocab_size, device)
        self._vocab_size = vocab_size
        self._logprobs = np.full(num_rows, -1, np.int32)

    def admit(self, rows: list[int]) -> None:
        """Load the parameters of rows whose admission begins."""
        if not rows:
            return
        index, table = np.array(rows, np.int64), self._table
        words = np.empty((_NUM_WORDS, len(rows)), np.int32)
        for i, name in enumerate(_INTEGERS):
            words[i] = getattr(table, name)[index]
        for i, name in enumerate(_FLOATS, len(_INTEGERS)):
            words[i] = getattr(table, name)[index].view(np.int32)
        words[_SEED_LOW:] = table.seed[index].view("<i4").reshape(-1, 2).T
        self._words.index_copy_(1, self._device.upload(index), self._device.upload(words))
        self._logprobs[index] = table.logprobs[index]
        for row in rows:
            self.edits.admit(row)
            self.constraints.admit(row)

    def is_edited(self, rows: IntArray) -> bool:
        """Whether a draw for these rows is `draw_edited`'s."""
        return self.edits.any(rows) or self.constraints.any(rows)

    def asked(self, rows: IntArray) -> Asked | None:
        """Which of these rows report log-probabilities; None for none."""
        at = np.flatnonzero(self._logprobs[rows] >= 0)
        if not len(at):
            return None
        return Asked(at, min(MAX_LOGPROBS, self._vocab_size, int(self._logprobs[rows[at]].max())))

    def draw(self, logits: Tensor, rows: Tensor, position: Tensor) -> Drawn:
        """logits [S, V]; rows [S] int64, num_rows for padding; position [S] int64 of the drawn token. Capturable."""
        scores, ok = self._finite(logits)
        return Drawn(self._draw(scores, rows, position), ok)

    def draw_edited(
        self, logits: Tensor, rows: Tensor, position: Tensor, host_rows: IntArray, num_outputs: IntArray
    ) -> Drawn:
        """As `draw`, for any rows; num_outputs [S]: outputs before this one. Counts what was drawn."""
        scores, ok = self._finite(logits)
        self.edits.apply(scores, host_rows, num_outputs)
        # Waits until the rows' last tokens are here and their masks are filled; the forward pass runs meanwhile.
        masks = self.constraints.masks(host_rows)
        if len(masks.at):
            apply_token_mask(scores, self._device.upload(masks.at), self._device.upload(masks.allowed))
        some_left = scores.amax(1).isfinite()
        scores.masked_fill_(~some_left.unsqueeze(1), 0.0)
        barred = ok & ~some_left
        ok &= some_left
        drawn = Drawn(self._draw(scores, rows, position), ok, masks, barred)
        self.edits.count(host_rows, drawn.tokens, ok)
        return drawn

    def _finite(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(float32 scores, a copy with zeros for rows that cannot be drawn from; which rows can)."""
        scores = logits.float()
        ok = scores.amax(1).isfinite()
        return scores.masked_fill(~ok.unsqueeze(1), 0.0), ok

    def _draw(self, scores: Tensor, rows: Tensor, position: Tensor) -> Tensor:
        """Gathered columns are new tensors, so that the kernel sees the same alignment at every batch size."""
        taken = [column.index_select(0, rows) for column in self._words]
        top_k, choice = (column.long() for column in taken[: len(_INTEGERS)])
        temperature, top_p, min_p = (column.view(torch.float32) for column in taken[len(_INTEGERS) : _SEED_LOW])
        seed = torch.stack(taken[_SEED_LOW:], 1).long() & 0xFFFFFFFF
        return draw(scores, DrawParams(temperature, top_k, top_p, min_p, seed, position, choice))
