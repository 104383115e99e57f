"""`CudaRunner`: StepInputs to device work, and device results to StepOutputs. See `runner.py` for the contract.

`submit` enqueues a step and returns; `write_output` (`results.py`) waits for it, on whichever thread. Steps run in
the order of their submission, on one stream, so a step may be submitted while those before it are still under way:
its input tokens are in row state when it gets there. Order within a step: the mirror, new rows and block appends, the
forward pass, the draw, row state moved on, results to pinned memory. Blocks need no cleaning here (`kv_cache.py`).
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from slipring.shm.spec import WorkerConfig
from slipring.shm.table import BatchTable
from slipring.shm.wire import StepFlag, StepInputView, StepOutputView, StepShape
from slipring.workers.constraints import Constraints
from slipring.workers.cuda.decode import DecodeStep
from slipring.workers.cuda.device import Device, Event
from slipring.workers.cuda.edits import IntArray
from slipring.workers.cuda.general import Forwarded, GeneralStep
from slipring.workers.cuda.results import (
    BufferPool,
    DrawBuffers,
    Flight,
    ResultBuffers,
    send_draws,
    send_failures,
    send_logprobs,
    send_reports,
    write_output,
)
from slipring.workers.cuda.rows import DeviceRows
from slipring.workers.cuda.sampler import Asked, DeviceSampler, Drawn
from slipring.workers.cuda.step_mirror import StepMirror
from slipring.workers.grammar import GrammarStore
from slipring.workers.kv_cache import KvCache
from slipring.workers.models.llama import Llama
from slipring.workers.reports import Reporter


class CudaRunner:
    """One thread submits. Owns model, KV pool, row state, sampler and graphs of this worker."""

    def __init__(
        self,
        device: Device,
        config: WorkerConfig,
        model: Llama,
        kv: KvCache,
        table: BatchTable,
        grammars: GrammarStore,
    ) -> None:
        shape = StepShape.of(config.max_num_seqs, config.max_draft, config.block_size)
        self.kv = kv
        self.rows = rows = DeviceRows(table, device.torch)
        self._device = device
        self._mirror = mirror = StepMirror(shape, device.torch)
        constraints = Constraints(table, config.model, grammars, num_threads=config.num_threads)
        self._sampler = sampler = DeviceSampler(table, config.model.vocab_size, device, constraints)
        self.decode = DecodeStep(device, model, kv, rows, sampler, mirror, config.max_model_len)
        self._general = GeneralStep(device, model, rows, mirror, self.decode, table, config.max_num_batched_tokens)
        self._reporter = Reporter(model, table)
        self._buffers = BufferPool(lambda: ResultBuffers(config.max_num_seqs, device))
        self._draw_buffers = BufferPool(lambda: DrawBuffers(config.max_num_seqs, device))

    def exchange_pool(self, kv: KvCache) -> None:
        """Go on with another pool. While nothing is in flight or captured."""
        self.kv = self.decode.kv = kv

    @torch.inference_mode()
    def submit(self, step: StepInputView) -> Flight:
        """Enqueue the step. `step` must not change until the flight's output is written."""
        buffers, began = self._buffers.take(), self._device.record()
        num_rows = int(step.header[step.NUM_ROWS])
        self._update_rows(step, num_rows)
        sampled = np.flatnonzero(step.flags[:num_rows] & StepFlag.SAMPLE)
        sampled_rows = step.rows[sampled].astype(np.int64)
        asked = self._sampler.asked(sampled_rows)
        reported: list[tuple[int, int]] = []
        if int(step.header[step.NUM_DECODE]) == num_rows == len(sampled):
            forwarded, drawn = self._run_decode(step, asked, buffers)
        else:
            forwarded, drawn, reported = self._run_general(step, sampled, asked, buffers)
        self.rows.host.num_outputs[sampled_rows] += 1
        masks = None if drawn is None else drawn.masks
        copied = self._copy_for_grammars(drawn)
        done = self._device.record()
        if copied is not None:
            self._sampler.constraints.accept(sampled_rows, partial(self._landed, copied, len(sampled), done))
        return Flight(step, sampled, asked, masks, buffers, began, forwarded, done, reported)

    def land(self, flight: Flight, output: StepOutputView) -> None:
        """Wait for the flight and fill `output`; any thread, flights in order."""
        write_output(flight, output)
        self._buffers.give_back(flight.buffers)

    def run(self, step: StepInputView, output: StepOutputView) -> None:
        """Submit and wait: the CPU runner's contract."""
        self.land(self.submit(step), output)

    def _update_rows(self, step: StepInputView, num_rows: int) -> None:
        self._mirror.load(step)
        new = np.flatnonzero(step.flags[:num_rows] & StepFlag.NEW).tolist()
        self.rows.update(step, self._mirror, new)
        self._sampler.admit(step.rows[new].tolist())

    def _run_decode(self, step: StepInputView, asked: Asked | None, buffers: ResultBuffers) -> tuple[Event, Drawn]:
        num_rows = int(step.header[step.NUM_ROWS])
        logits = self.decode.forward(num_rows)
        forwarded = self._device.record()
        rows = step.rows[:num_rows].astype(np.int64)
        if self._sampler.is_edited(rows):
            drawn = self._draw_edited(logits, *self.decode.rows_and_positions(num_rows), rows)
            self.decode.commit(drawn.tokens)
        else:
            drawn = self.decode.draw(num_rows)
        self._send(logits, drawn, asked, buffers)
        return forwarded, drawn

    def _run_general(
        self, step: StepInputView, sampled: IntArray, asked: Asked | None, buffers: ResultBuffers
    ) -> tuple[Event, Drawn | None, list[tuple[int, int]]]:
        result = self._general.forward(step, sampled, self.kv)
        forwarded = self._device.record()
        drawn = None
        if len(sampled):
            drawn = self._draw_general(step, sampled, result, asked, buffers)
        else:
            self._general.commit(result, result.sampled)
        return forwarded, drawn, send_reports(self._reporter.reports(step, result.hidden), buffers)

    def _draw_general(
        self, step: StepInputView, sampled: IntArray, result: Forwarded, asked: Asked | None, buffers: ResultBuffers
    ) -> Drawn:
        rows = step.rows[sampled].astype(np.int64)
        if self._sampler.is_edited(rows):
            drawn = self._draw_edited(result.logits, result.rows, result.positions, rows)
        else:
            drawn = self._sampler.draw(result.logits, result.rows, result.positions)
        self._general.commit(result, drawn.tokens)
        self._send(result.logits, drawn, asked, buffers)
        return drawn

    def _copy_for_grammars(self, drawn: Drawn | None) -> DrawBuffers | None:
        """Enqueue a copy of the draws that is the grammars' own, since a flight's is gone once it has landed."""
        if drawn is None or drawn.masks is None or not len(drawn.masks.at):
            return None
        buffers = self._draw_buffers.take()
        send_draws(drawn, buffers)
        return buffers

    def _landed(self, buffers: DrawBuffers, num: int, done: Event) -> tuple[np.ndarray, np.ndarray]:
        """On the mask thread: wait for a step's draws, and take them."""
        done.synchronize()
        tokens, ok = buffers.tokens.numpy()[:num].copy(), buffers.ok.numpy()[:num].copy()
        self._draw_buffers.give_back(buffers)
        return tokens, ok

    def _draw_edited(self, logits: Tensor, rows: Tensor, positions: Tensor, host_rows: IntArray) -> Drawn:
        num_outputs = self.rows.host.num_outputs[host_rows].astype(np.int64)
        return self._sampler.draw_edited(logits, rows, positions, host_rows, num_outputs)

    def _send(self, logits: Tensor, drawn: Drawn, asked: Asked | None, buffers: ResultBuffers) -> None:
        send_draws(drawn, buffers)
        send_failures(drawn, buffers)
        if asked is not None:
            send_logprobs(logits, drawn, asked, self._device, buffers)
