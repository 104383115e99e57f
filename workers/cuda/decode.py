"""`DecodeStep`: a step of decode rows alone, as two bodies for each batch bucket: forward pass, and plain draw.

Both read and write static buffers and take every count from the step's mirror, so they may be captured; until a
bucket is, its bodies are simply called, which gives the same kernels the same shapes. Buckets are 1, 2, 4, ... and
max_num_seqs. Padding entries name row -1, which every kernel skips: nothing is stored, committed or counted for them,
and what is drawn for them is not sent.

The draw is a body of its own because the rows of some steps edit their logits: such a step replays the forward pass
and draws without a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slipring.kernels.paged_decode import choose_num_splits
from slipring.kernels.row_state import DecodeInputs, commit_tokens, decode_inputs
from slipring.shm.wire import StepInputView
from slipring.workers.batch import Batch
from slipring.workers.cuda.attention import DecodeTokens, DeviceAttention
from slipring.workers.cuda.device import Device, Graph
from slipring.workers.cuda.rows import DeviceRows
from slipring.workers.cuda.sampler import DeviceSampler, Drawn
from slipring.workers.cuda.step_mirror import StepMirror
from slipring.workers.kv_cache import KvCache
from slipring.workers.models.llama import Llama


def batch_buckets(max_num_seqs: int) -> list[int]:
    """1, 2, 4, ... below max_num_seqs, and max_num_seqs."""
    return [1 << i for i in range((max_num_seqs - 1).bit_length())] + [max_num_seqs]


@dataclass(frozen=True, slots=True)
class Captured:
    forward: Graph
    draw: Graph


class DecodeStep:
    """Owns the static buffers and the graphs. `kv` may be exchanged only while nothing is captured."""

    def __init__(
        self,
        device: Device,
        model: Llama,
        kv: KvCache,
        rows: DeviceRows,
        sampler: DeviceSampler,
        mirror: StepMirror,
        max_model_len: int,
    ) -> None:
        max_batch, where = len(mirror.rows), device.torch
        self.kv = kv
        self.buckets = batch_buckets(max_batch)
        self._device, self._model, self._state, self._sampler, self._mirror = device, model, rows, sampler, mirror
        self._max_model_len = max_model_len
        self._graphs: dict[int, Captured] = {}
        self._before_layer: Callable[[], None] | None = None
        self._inputs = DecodeInputs.empty(max_batch, where)
        self._rows = torch.full((max_batch,), -1, dtype=torch.int32, device=where)
        self._places = torch.arange(max_batch, device=where)
        self._one_each = torch.ones(max_batch, dtype=torch.int32, device=where)
        vocab_size = model.embedding.shape[0]
        self._logits = torch.zeros((max_batch, vocab_size), dtype=model.embedding.dtype, device=where)
        self._tokens = torch.zeros(max_batch, dtype=torch.int64, device=where)
        self._ok = torch.zeros(max_batch, dtype=torch.bool, device=where)

    def num_splits(self, batch: int) -> int:
        """Fixed for a bucket, since a graph bakes it in: for the longest context that may come."""
        num_kv_heads = self.kv.pools[0][0].shape[2]
        return choose_num_splits(batch, num_kv_heads, self._max_model_len, self._device.num_processors)

    def bucket(self, num_decode: int) -> int:
        """The smallest that holds so many rows."""
        return next(bucket for bucket in self.buckets if bucket >= num_decode)

    def forward(self, num_decode: int) -> Tensor:
        """Run the mirror's decode rows up to their logits, [num_decode, V]; valid until the next step."""
        bucket = self.bucket(num_decode)
        if (graphs := self._graphs.get(bucket)) is not None:
            graphs.forward.replay()
        else:
            self._forward(bucket)
        return self._logits[:num_decode]

    def draw(self, num_decode: int) -> Drawn:
        """Draw from the logits of `forward` for rows that edit nothing, and move their state on."""
        bucket = self.bucket(num_decode)
        if (graphs := self._graphs.get(bucket)) is not None:
            graphs.draw.replay()
        else:
            self._draw(bucket)
        return Drawn(self._tokens[:num_decode], self._ok[:num_decode])

    def rows_and_positions(self, num_decode: int) -> tuple[Tensor, Tensor]:
        """After `forward`: ([num_decode] int64 rows, position of the token to draw)."""
        return self._rows[:num_decode].long(), self._inputs.context_lens[:num_decode].long()

    def commit(self, tokens: Tensor) -> None:
        """tokens [n] were drawn for the first n rows by other means than `draw`."""
        num = len(tokens)
        commit_tokens(self._rows[:num], tokens, self._one_each[:num], self._state.last_token, self._state.num_computed)

    def run_empty(self, bucket: int) -> None:
        """Both bodies with padding alone: compiles and loads what the bucket needs, and changes no row."""
        self._mirror.clear()
        self._forward(bucket)
        self._draw(bucket)

    def replay_empty(self, bucket: int) -> None:
        """As `run_empty`, by the bucket's graphs."""
        self._mirror.clear()
        self._graphs[bucket].forward.replay()
        self._graphs[bucket].draw.replay()

    def uncaptured(self) -> list[int]:
        """From the largest down: the order in which they are captured, so that the smaller ones' activations find room
        where the largest one's are."""
        return [bucket for bucket in reversed(self.buckets) if bucket not in self._graphs]

    def drop_graphs(self) -> None:
        """While nothing is in flight."""
        self._graphs.clear()

    def capture(self, bucket: int, before_layer: Callable[[], None]) -> None:
        """Record the bucket's bodies, which enqueues nothing, or raise what `before_layer` raises.

        Both must have run before (`run_empty`): modules and workspaces may not be loaded and made in a capture.
        """
        self._before_layer = before_layer
        try:
            forward = self._device.capture(partial(self._forward, bucket))
            self._graphs[bucket] = Captured(forward, self._device.capture(partial(self._draw, bucket)))
        finally:
            self._before_layer = None

    def _forward(self, bucket: int) -> None:
        mirror, inputs, rows, state = self._mirror, self._inputs, self._rows[:bucket], self._state
        is_padding = self._places[:bucket] >= mirror.header[StepInputView.NUM_DECODE]
        rows.copy_(mirror.rows[:bucket].masked_fill(is_padding, -1))
        inputs = DecodeInputs(*(getattr(inputs, name)[:bucket] for name in DecodeInputs.__slots__))
        decode_inputs(rows, state.last_token, state.num_computed, state.block_table, self.kv.block_size, inputs)
        tokens = DecodeTokens(rows, inputs.context_lens, self.num_splits(bucket))
        attention = DeviceAttention(
            state.block_table, inputs.positions, inputs.slot_mapping, tokens, None, self._before_layer
        )
        batch = Batch(inputs.input_ids, inputs.positions, attention, self._places[:bucket])
        self._logits[:bucket].copy_(self._model.forward(batch, self.kv))

    def _draw(self, bucket: int) -> None:
        rows = self._rows[:bucket]
        index = rows.masked_fill(rows < 0, self._state.num_rows).long()
        drawn = self._sampler.draw(self._logits[:bucket], index, self._inputs.context_lens[:bucket].long())
        self._tokens[:bucket].copy_(drawn.tokens)
        self._ok[:bucket].copy_(drawn.ok)
        self.commit(self._tokens[:bucket])
