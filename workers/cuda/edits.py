"""`Edits`: what some rows do to their logits before a draw: `RowEdits` and penalties, on the device.

The host knows which rows edit, so a step without such rows pays nothing. Penalty counts are [num_rows, vocab], as
many as rows, made when the first row asks for them (`reserve_bytes` keeps the room free); they follow the tokens as
they are drawn, on the device, and never wait for the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipring.kernels.sampling import apply_penalties
from slipring.shm.table import BatchTable
from slipring.workers.cuda.device import Device
from slipring.workers.row_edits import RowEdits

IntArray = NDArray[np.int64]
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_NEUTRAL = (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _Counts:
    prompt_mask: Tensor
    """[num_rows, vocab] bool"""
    output_counts: Tensor
    """[num_rows, vocab] int32"""


class Edits:
    def __init__(self, table: BatchTable, vocab_size: int, device: Device) -> None:
        num_rows = table.shape.num_rows
        self._table = table
        self._vocab_size = vocab_size
        self._device = device
        self._tokens = torch.from_numpy(table.token_ids)
        self._row_edits = RowEdits(table, device.upload)
        self._penalties = np.tile(np.array(_NEUTRAL, np.float32), (num_rows, 1))
        self._penalised = np.zeros(num_rows, bool)
        self._edited = np.zeros(num_rows, bool)
        self._counts: _Counts | None = None

    @staticmethod
    def reserve_bytes(num_rows: int, max_num_seqs: int, vocab_size: int) -> int:
        """What the counts take once a row has penalties, and an edited draw of all rows beyond a plain one."""
        of_a_count = torch.bool.itemsize + torch.int32.itemsize
        # Penalised scores, counts gathered, raw scores for log-probabilities and what topk makes of them.
        of_a_draw = of_a_count + 3 * torch.float32.itemsize
        return vocab_size * (num_rows * of_a_count + max_num_seqs * of_a_draw)

    def admit(self, row: int) -> None:
        """Load what the row's admission asks for; counts are those of its prompt and its outputs so far."""
        self._row_edits.admit(row)
        self._penalties[row] = [getattr(self._table, name)[row] for name in _PENALTIES]
        self._penalised[row] = (self._penalties[row] != _NEUTRAL).any()
        self._edited[row] = self._penalised[row] or self._row_edits.edited[row]
        if self._penalised[row]:
            self._recount(row)

    def any(self, rows: IntArray) -> bool:
        """Whether a draw for these rows is edited."""
        return bool(self._edited[rows].any())

    def apply(self, scores: Tensor, rows: IntArray, num_outputs: IntArray) -> None:
        """In place; scores [S, V] float32 of rows [S]."""
        self._row_edits.apply(scores, rows, num_outputs)
        if len(at := np.flatnonzero(self._penalised[rows])):
            self._penalise(scores, at, rows[at])

    def count(self, rows: IntArray, tokens: Tensor, ok: Tensor) -> None:
        """tokens [S] were drawn for rows [S], except where not ok."""
        self._row_edits.count(rows, tokens)
        at = np.flatnonzero(self._penalised[rows])
        if not len(at) or self._counts is None:
            return
        index = self._device.upload(at)
        where = (self._device.upload(rows[at]), tokens.index_select(0, index))
        self._counts.output_counts.index_put_(where, ok.index_select(0, index).int(), accumulate=True)

    def _penalise(self, scores: Tensor, at: IntArray, rows: IntArray) -> None:
        counts = self._counts
        assert counts is not None, "made when the first of these rows was admitted"
        index, rows_there = self._device.upload(at), self._device.upload(rows)
        penalised = scores.index_select(0, index)
        columns = self._device.upload(np.ascontiguousarray(self._penalties[rows].T))
        # Tensors of their own begin aligned, as the kernel was compiled for.
        repetition, presence, frequency = (column.clone() for column in columns)
        apply_penalties(
            penalised,
            counts.prompt_mask.index_select(0, rows_there),
            counts.output_counts.index_select(0, rows_there),
            repetition=repetition,
            presence=presence,
            frequency=frequency,
        )
        scores.index_copy_(0, index, penalised)

    def _recount(self, row: int) -> None:
        if self._counts is None:
            shape, where = (len(self._edited), self._vocab_size), self._device.torch
            self._counts = _Counts(
                torch.zeros(shape, dtype=torch.bool, device=where), torch.zeros(shape, dtype=torch.int32, device=where)
            )
        num_prompt, num_known = int(self._table.num_prompt[row]), int(self._table.num_known[row])
        known = self._tokens[row, :num_known].to(self._device.torch, non_blocking=True).long()
        prompt_mask, output_counts = self._counts.prompt_mask[row], self._counts.output_counts[row]
        prompt_mask.zero_().index_fill_(0, known[:num_prompt], True)
        outputs = known[num_prompt:]
        output_counts.zero_().index_add_(0, outputs, torch.ones_like(outputs, dtype=torch.int32))
