"""`Runner`: one StepInput to one StepOutput. Owns model, KV pool, row state and sampler of this worker.

Order within a step: block appends and new rows first (everything after reads row state), then index tensors, blocks
cleaned, forward pass, sampling, row state moved on, output written. An entry whose logits were not finite reports
num_accepted = NON_FINITE and draws nothing; its neighbours are not touched.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

from slipring.shm.spec import WorkerConfig
from slipring.shm.table import BatchTable
from slipring.shm.wire import StepFlag, StepInputView, StepOutputView, StepShape
from slipring.workers.batch_builder import BatchBuilder
from slipring.workers.kv_cache import DTYPES, KvCache
from slipring.workers.link import StartRefused
from slipring.workers.models.llama import Llama
from slipring.workers.rows import Rows
from slipring.workers.sampler import Draws, Sampler

NON_FINITE = -1
"""`num_accepted` of an entry whose logits held NaN or infinity: the request cannot go on."""
_WARM_UP_TOKENS = 32


class Runner:
    """Runs steps in order. Not thread-safe."""

    def __init__(self, config: WorkerConfig, model: Llama, kv: KvCache, table: BatchTable) -> None:
        spec = config.model
        dtype = DTYPES[config.dtype]
        layer_block_bytes = config.block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize
        self.kv = kv
        self._config = config
        self._model = model
        self._rows = Rows(table)
        self._sampler = Sampler(table, spec.vocab_size)
        self._builder = BatchBuilder(table, self._rows, config.block_size, layer_block_bytes, dtype)

    @torch.inference_mode()
    def run(self, step: StepInputView, output: StepOutputView) -> None:
        """Run the step and fill `output`, device times included; PICKED_UP and PUBLISHED are the caller's."""
        began = time.monotonic_ns()
        self._update_rows(step)
        batch = self._builder.build(step)
        if len(entered := self._builder.entered_blocks(step)):
            self.kv.clear(entered)
        logits = self._model.forward(batch, self.kv)
        forwarded = time.monotonic_ns()
        sampled = np.flatnonzero(step.flags[: step.header[step.NUM_ROWS]] & StepFlag.SAMPLE)
        draws = self._sample(step, sampled, logits) if len(sampled) else None
        self._write(step, output, sampled, draws)
        output.times_ns[output.FORWARD] = forwarded - began
        output.times_ns[output.SAMPLE] = time.monotonic_ns() - forwarded

    def warm_up(self) -> None:
        """One prompt chunk and one decode step on row 0, so that the first request meets no first-time cost."""
        config = self._config
        shape = StepShape.of(config.max_num_seqs, config.max_draft, config.block_size)
        step = StepInputView(memoryview(bytearray(shape.input_bytes)), shape)
        output = StepOutputView(memoryview(bytearray(shape.output_bytes)), shape)
        num_tokens = min(_WARM_UP_TOKENS, config.max_model_len - 1, self.kv.num_blocks * config.block_size - 1)
        self._rows.block_table[0] = np.arange(self._rows.block_table.shape[1]) % self.kv.num_blocks
        self._rows.generation[0] = 0
        step.header[step.NUM_ROWS] = 1
        for is_decode, start, count in ((0, 0, max(1, num_tokens)), (1, num_tokens, 1)):
            step.header[step.NUM_DECODE] = is_decode
            step.start[0], step.num_tokens[0], step.flags[0] = start, count, StepFlag.SAMPLE
            self.run(step, output)
            if output.num_accepted[0] == NON_FINITE:
                raise StartRefused(
                    f"the model in {config.model.path} computes no finite numbers: are its weights whole?"
                )
        self._rows.generation[0] = -1

    def _update_rows(self, step: StepInputView) -> None:
        header = step.header
        num_rows, num_appends = int(header[step.NUM_ROWS]), int(header[step.NUM_APPENDS])
        rows, generation = step.rows[:num_rows], step.generation[:num_rows]
        for i in np.flatnonzero(step.flags[:num_rows] & StepFlag.NEW).tolist():
            self._rows.admit(int(rows[i]), int(generation[i]))
            self._sampler.admit(int(rows[i]))
        if num_appends:
            self._rows.append_blocks(
                step.append_rows[:num_appends], step.append_index[:num_appends], step.append_blocks[:num_appends]
            )
        self._rows.check(rows, generation)

    def _sample(self, step: StepInputView, sampled: NDArray[np.int64], logits: torch.Tensor) -> Draws:
        rows = step.rows[sampled].astype(np.int64)
        position = (step.start[sampled] + step.num_tokens[sampled]).astype(np.int64)
        draws = self._sampler.sample(logits, rows, position, self._rows.num_outputs[rows].astype(np.int64))
        self._rows.last_token[rows] = draws.tokens
        self._rows.num_outputs[rows] += 1
        return draws

    def _write(
        self, step: StepInputView, output: StepOutputView, sampled: NDArray[np.int64], draws: Draws | None
    ) -> None:
        output.answer(step)
        if draws is None:
            return
        output.num_accepted[sampled] = np.where(draws.ok, 1, NON_FINITE)
        output.tokens[sampled, 0] = draws.tokens
        if (logprobs := draws.logprobs) is not None:
            at, count = sampled[logprobs.at], logprobs.top_ids.shape[1]
            output.header[output.NUM_LOGPROBS] = count
            output.logprob[at] = logprobs.logprob
            output.rank[at] = logprobs.rank
            output.top_ids[at, :count] = logprobs.top_ids
            output.top_logprobs[at, :count] = logprobs.top_logprobs
