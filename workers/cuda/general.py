"""`GeneralStep`: any step with prompt chunks in it, up to its logits. Its tensors are made on the device as well.

Entries come as in the StepInput: decode rows, then chunks. What the forward pass needs is worked out from the step's
mirror and row state by small device operations; the host only knows sizes, and sends each chunk's token ids straight
from the batch table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipring.kernels.row_state import commit_tokens
from slipring.shm.table import BatchTable
from slipring.shm.wire import StepInputView
from slipring.workers.batch import Batch
from slipring.workers.cuda.attention import ChunkTokens, DecodeTokens, DeviceAttention
from slipring.workers.cuda.decode import DecodeStep
from slipring.workers.cuda.device import Device
from slipring.workers.cuda.edits import IntArray
from slipring.workers.cuda.rows import DeviceRows
from slipring.workers.cuda.step_mirror import StepMirror
from slipring.workers.kv_cache import KvCache
from slipring.workers.models.llama import Llama


@dataclass(frozen=True, slots=True)
class Entries:
    """A step's entries on the device, [n] each."""

    rows: Tensor
    """int32"""
    counts: Tensor
    """int32: positions computed."""
    starts: Tensor
    """int32: first of them."""
    ends: Tensor
    """int64: tokens of the batch up to and with the entry's."""


@dataclass(frozen=True, slots=True)
class Forwarded:
    """What a step's draw needs. S sampled entries."""

    logits: Tensor
    """[S, V]"""
    rows: Tensor
    """[S] int64"""
    positions: Tensor
    """[S] int64: of the tokens to draw."""
    entries: Entries
    sampled: Tensor
    """[S] int64: indices of the sampled entries."""
    hidden: Tensor
    """[T, hidden], of all tokens."""


class GeneralStep:
    def __init__(
        self,
        device: Device,
        model: Llama,
        rows: DeviceRows,
        mirror: StepMirror,
        decode: DecodeStep,
        table: BatchTable,
        max_num_batched_tokens: int,
    ) -> None:
        self._device, self._model, self._state, self._mirror, self._decode = device, model, rows, mirror, decode
        self._shared_tokens = torch.from_numpy(table.token_ids)
        self._chunk_ids = torch.zeros(max_num_batched_tokens, dtype=torch.int32, device=device.torch)

    def forward(self, step: StepInputView, sampled: IntArray, kv: KvCache) -> Forwarded:
        """Run the mirror's step, which is also `step`, up to the logits of the entries `sampled` [S]."""
        num_rows, num_decode = int(step.header[step.NUM_ROWS]), int(step.header[step.NUM_DECODE])
        num_tokens = int(step.num_tokens[:num_rows].sum())
        entries = self._entries(num_rows)
        counts = entries.counts.long()
        # The output's size is told, or the host would have to wait for the device to know it.
        token_rows = torch.repeat_interleave(entries.rows, counts, output_size=num_tokens).long()
        begins = entries.starts - (entries.ends - counts)
        places = torch.arange(num_tokens, device=self._device.torch)
        positions = places + torch.repeat_interleave(begins, counts, output_size=num_tokens)
        index = self._device.upload(sampled)
        last_at = (entries.ends - 1).index_select(0, index)
        batch = Batch(
            self._input_ids(step, token_rows, num_decode, num_tokens),
            positions,
            self._attention(step, entries, token_rows, positions, kv.block_size),
            last_at,
        )
        hidden = self._model.hidden(batch, kv)
        logits = self._model.logits(hidden, last_at)
        rows = entries.rows.long().index_select(0, index)
        return Forwarded(logits, rows, positions.index_select(0, last_at) + 1, entries, index, hidden)

    def commit(self, forwarded: Forwarded, tokens: Tensor) -> None:
        """Move row state on: every entry's positions are computed, and `tokens` [S] were drawn."""
        entries = forwarded.entries
        drawn = torch.full(entries.rows.shape, -1, dtype=torch.int64, device=self._device.torch)
        drawn.index_copy_(0, forwarded.sampled, tokens)
        commit_tokens(entries.rows, drawn, entries.counts, self._state.last_token, self._state.num_computed)

    def _entries(self, num_rows: int) -> Entries:
        rows, counts = self._mirror.rows[:num_rows], self._mirror.num_tokens[:num_rows]
        starts = self._state.num_computed.index_select(0, rows)
        return Entries(rows, counts, starts, counts.cumsum(0))

    def _input_ids(self, step: StepInputView, token_rows: Tensor, num_decode: int, num_tokens: int) -> Tensor:
        ids = torch.empty(num_tokens, dtype=torch.int64, device=self._device.torch)
        ids[:num_decode] = self._state.last_token.index_select(0, token_rows[:num_decode])
        chunk_ids = self._chunk_ids[: num_tokens - num_decode]
        begin = 0
        for i in range(num_decode, int(step.header[step.NUM_ROWS])):
            row, start, count = int(step.rows[i]), int(step.start[i]), int(step.num_tokens[i])
            ours = self._shared_tokens[row, start : start + count]
            chunk_ids[begin : begin + count].copy_(ours, non_blocking=True)
            begin += count
        ids[num_decode:] = chunk_ids
        return ids

    def _attention(
        self, step: StepInputView, entries: Entries, token_rows: Tensor, positions: Tensor, block_size: int
    ) -> DeviceAttention:
        num_rows, num_decode = int(step.header[step.NUM_ROWS]), int(step.header[step.NUM_DECODE])
        block = self._state.block_table[token_rows, positions // block_size].long()
        decode = chunks = None
        if num_decode:
            context_lens = entries.starts[:num_decode] + 1
            num_splits = self._decode.num_splits(self._decode.bucket(num_decode))
            decode = DecodeTokens(entries.rows[:num_decode], context_lens, num_splits)
        if num_decode < num_rows:
            cu_seqlens = torch.zeros(num_rows - num_decode + 1, dtype=torch.int32, device=self._device.torch)
            cu_seqlens[1:] = entries.ends[num_decode:] - num_decode
            longest = int(np.max(step.num_tokens[num_decode:num_rows]))
            chunks = ChunkTokens(entries.rows[num_decode:], cu_seqlens, entries.starts[num_decode:], longest)
        slots = block * block_size + positions % block_size
        return DeviceAttention(self._state.block_table, positions, slots, decode, chunks)
