"""Drafts from a smaller model with the target's vocabulary.

Its keys and values lie in a pool of their own with the target's block numbers: position p of a row is kept where the
target keeps it, so blocks that the prefix cache shares bring their draft state along. The model runs only when drafts
are asked for. Then it first computes what it has not seen of a row (`catch_up`), a long prompt in slices, and drafts
from there: a row that was not drafted for a while has no hole, only more to catch up with. `_entered` says which blocks
it has seen whole; the target's own steps take that back where they write, and so do KV tiers.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipring.shm.table import BatchTable
from slipring.workers.batch import Batch
from slipring.workers.batch_builder import BatchBuilder
from slipring.workers.entries import Entries, tokens_of
from slipring.workers.kv_cache import KvCache
from slipring.workers.models.llama import Llama
from slipring.workers.rows import Rows
from slipring.workers.sampler import Sampler
from slipring.workers.speculation.proposer import PROPOSAL, Drafts, IntArray, NullProposer
from slipring.workers.speculation.verify import Runs

SLICE = 256
"""Positions that are caught up with in one step, of all rows."""
_SHORT = 8
"""Tokens of a row that are computed like those of a decode step, beside other rows."""


class DraftModelProposer(NullProposer):
    is_free = False

    def __init__(
        self,
        model: Llama,
        kv: KvCache,
        builder: BatchBuilder,
        table: BatchTable,
        rows: Rows,
        sampler: Sampler,
        vocab_size: int,
    ) -> None:
        """`model`, `kv` and `builder` are the draft model's, the rest is the target's."""
        self._model, self._kv, self._builder, self._sampler = model, kv, builder, sampler
        shape = table.shape
        self._block_table = rows.block_table
        self._size = shape.block_size
        self._tokens = np.zeros((shape.num_rows, shape.max_model_len + 1), np.int64)
        self._length = np.zeros(shape.num_rows, np.int64)
        self._computed = np.zeros(shape.num_rows, np.int64)
        """Positions, from the first one on, whose keys and values are those of the row's tokens; -1: not known yet."""
        self._entered: NDArray[np.bool_] = np.zeros(kv.num_blocks, bool)
        self._entered_of = np.zeros(shape.num_rows, np.int64)
        """A row's leading blocks that have been looked at or entered."""
        self._ids = torch.arange(min(len(model.embedding), vocab_size))
        """What both models know; each may have padded its matrices."""

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        self._length[row] = num = len(token_ids)
        self._tokens[row, :num] = token_ids
        self._computed[row] = -1

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        place = np.arange(tokens.shape[1])
        drawn = place < counts[:, None]
        at = self._length[rows, None] + place
        self._tokens[np.repeat(rows, counts), at[drawn]] = tokens[drawn]
        # What was drafted is computed already, as far as it was right; the last token drawn never is.
        self._length[rows] += counts
        self._computed[rows] = np.minimum(self._computed[rows], self._length[rows] - 1)

    def saw(self, entries: Entries, batch: Batch, hidden: Tensor, runs: Runs | None) -> None:
        """Blocks that the target has written belong to these rows now, whatever they held before."""
        first, last = entries.start // self._size, (entries.end - 1) // self._size
        for place in range(int((last - first).max(initial=-1)) + 1):
            here = (first + place <= last) & (entries.num_tokens > 0)
            self._entered[self._block_table[entries.rows[here], (first + place)[here]]] = False

    def overwritten(self, blocks: IntArray) -> None:
        self._entered[blocks] = False

    @torch.inference_mode()
    def catch_up(self, rows: IntArray) -> None:
        """Compute a slice of what is missing. A row that lacks more than a few tokens then has no drafts yet."""
        unknown = rows[self._computed[rows] < 0]
        for row in unknown.tolist():
            blocks = self._block_table[row, : (self._length[row] - 1) // self._size]
            self._entered_of[row] = num_seen = int(self._entered[blocks].cumprod().sum())
            self._computed[row] = num_seen * self._size
        end, room = self._length[rows] - 1, SLICE
        for i in np.flatnonzero(end - self._computed[rows] >= _SHORT).tolist():
            if room <= 0:
                break
            target = min(int(end[i]), int(self._computed[rows[i]]) + room)
            room -= target - int(self._computed[rows[i]])
            self._compute(rows[i : i + 1], np.array([target]))

    @torch.inference_mode()
    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        ready = self._length[rows] - 1 - self._computed[rows] < _SHORT
        num = np.where(ready, most, 0)
        width = int(num.max(initial=0))
        drafts, proposals = Drafts(np.zeros((len(rows), width), np.int64), num), None
        for place in range(width):
            going = np.flatnonzero(num > place)
            of_rows, position = rows[going], self._length[rows[going]] + place
            if place:
                self._tokens[of_rows, position - 1] = drafts.tokens[going, place - 1]
            scores = self._compute(of_rows, position)[:, : len(self._ids)].float()
            guesses = self._sampler.guesses(scores, self._ids, of_rows, position)
            drafts.tokens[going, place] = guesses.at[:, 0].numpy()
            if guesses.proposals is not None:
                if proposals is None:
                    proposals = np.zeros((*drafts.tokens.shape, guesses.proposals.shape[1]), PROPOSAL)
                proposals[going, place] = guesses.proposals
        return replace(drafts, proposals=proposals)

    def _compute(self, rows: IntArray, end: IntArray) -> Tensor:
        """Compute each row's positions up to end [n]; returns the scores of what follows them, [n, V]."""
        start = self._computed[rows]
        num, count = end - start, len(rows)
        is_chunk = bool((num > _SHORT).any())
        drafts = Drafts(np.zeros((count, int(num.max()) - 1), np.int64), num - 1)
        entries = Entries(
            rows, start, num, 0 if is_chunk else count, Drafts.none(0) if is_chunk else drafts, np.ones(count, np.int64)
        )
        batch = self._builder.build_in(entries, self._kv)
        assert batch.entry_at is not None
        entry, place = tokens_of(num)
        ids = np.empty(len(entry), np.int64)
        ids[batch.entry_at[entry] + place] = self._tokens[rows[entry], start[entry] + place]
        batch = replace(batch, input_ids=torch.from_numpy(np.minimum(ids, len(self._ids) - 1)))
        scores = self._model.logits(self._model.hidden(batch, self._kv), batch.sample_at)
        # The block of the last token is not whole for long: the target writes it in this step.
        whole = np.minimum(end, self._length[rows] - 1) // self._size
        for row, stop in zip(rows.tolist(), whole.tolist(), strict=True):
            self._entered[self._block_table[row, self._entered_of[row] : stop]] = True
        self._entered_of[rows] = np.maximum(self._entered_of[rows], whole)
        self._computed[rows] = end
        return scores
