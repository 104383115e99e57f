"""What a step sends back: pinned buffers that the device fills, and how they become a StepOutput.

A `Flight` is a step between its submission and its publication. It owns one set of pinned buffers, which go back to
their pool when the output is written; a set is never shared, so results of several steps can be under way.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipring.kernels.logprobs import top_logprobs
from slipring.shm.params import MAX_LOGPROBS
from slipring.shm.wire import NO_MATCH, NO_TOKEN, NON_FINITE, REPORT_WORDS, StepInputView, StepOutputView
from slipring.workers.constraints import Masks
from slipring.workers.cuda.device import Device, Event
from slipring.workers.cuda.sampler import Asked, Drawn
from slipring.workers.reports import EntryReport

IntArray = NDArray[np.int64]


class DrawBuffers:
    """Room for one step's draws in pinned memory."""

    def __init__(self, max_rows: int, device: Device) -> None:
        self.tokens = device.pinned(max_rows, torch.int64)
        self.ok = device.pinned(max_rows, torch.bool)


class ResultBuffers(DrawBuffers):
    """Room for one step's results in pinned memory."""

    def __init__(self, max_rows: int, device: Device) -> None:
        super().__init__(max_rows, device)
        self.barred = device.pinned(max_rows, torch.bool)
        self.logprob = device.pinned(max_rows, torch.float32)
        self.rank = device.pinned(max_rows, torch.int64)
        self.top_ids = device.pinned(max_rows * MAX_LOGPROBS, torch.int64)
        self.top_logprobs = device.pinned(max_rows * MAX_LOGPROBS, torch.float32)
        self.report = device.pinned(REPORT_WORDS, torch.int32)
        self.report_ok = device.pinned(max_rows, torch.bool)


Buffers = TypeVar("Buffers", bound=DrawBuffers)


class BufferPool(Generic[Buffers]):
    """Sets of buffers, as many as steps were ever in flight at once. Taken by one thread, given back by another."""

    def __init__(self, make: Callable[[], Buffers]) -> None:
        self._make = make
        self._free: queue.SimpleQueue[Buffers] = queue.SimpleQueue()

    def take(self) -> Buffers:
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return self._make()

    def give_back(self, buffers: Buffers) -> None:
        self._free.put(buffers)


@dataclass(frozen=True, slots=True)
class Flight:
    """A submitted step."""

    step: StepInputView
    sampled: IntArray
    """[S]: entries of the step that drew."""
    asked: Asked | None
    masks: Masks | None
    """What grammars allowed."""
    buffers: ResultBuffers
    began: Event
    forwarded: Event
    done: Event
    """Behind the copies into `buffers`."""
    reported: list[tuple[int, int]]
    """(entry, words) of the reports in `buffers`."""


def send_draws(drawn: Drawn, buffers: DrawBuffers) -> None:
    """Enqueue the copies of tokens and their validity."""
    buffers.tokens[: len(drawn.tokens)].copy_(drawn.tokens, non_blocking=True)
    buffers.ok[: len(drawn.ok)].copy_(drawn.ok, non_blocking=True)


def send_failures(drawn: Drawn, buffers: ResultBuffers) -> None:
    """Enqueue the copy of what tells restrictions that left no token from logits that were not finite."""
    if drawn.barred is None:
        buffers.barred[: len(drawn.ok)] = False  # no step in flight has these buffers
    else:
        buffers.barred[: len(drawn.ok)].copy_(drawn.barred, non_blocking=True)


def send_logprobs(logits: Tensor, drawn: Drawn, asked: Asked, device: Device, buffers: ResultBuffers) -> None:
    """Enqueue log-probabilities of the raw `logits` [S, V]."""
    index = device.upload(asked.at)
    raw = logits.index_select(0, index).float()
    found = top_logprobs(raw, drawn.tokens.index_select(0, index), asked.count)
    num = len(asked.at)
    buffers.logprob[:num].copy_(found.logprob, non_blocking=True)
    buffers.rank[:num].copy_(found.rank, non_blocking=True)
    buffers.top_ids[: num * asked.count].copy_(found.top_ids.reshape(-1), non_blocking=True)
    buffers.top_logprobs[: num * asked.count].copy_(found.top_logprobs.reshape(-1), non_blocking=True)


def send_reports(reports: Iterable[EntryReport], buffers: ResultBuffers) -> list[tuple[int, int]]:
    """Enqueue the copies of what entries report; returns (entry, words) of each."""
    sent: list[tuple[int, int]] = []
    begin = 0
    for report in reports:
        size = len(report.words)
        buffers.report[begin : begin + size].copy_(report.words, non_blocking=True)
        buffers.report_ok[len(sent) : len(sent) + 1].copy_(report.ok.reshape(1), non_blocking=True)
        sent.append((report.entry, size))
        begin += size
    return sent


def write_output(flight: Flight, output: StepOutputView) -> None:
    """Wait for the step, then fill `output`, device times included. Any thread; reads pinned memory alone."""
    flight.done.synchronize()
    step, buffers, sampled = flight.step, flight.buffers, flight.sampled
    output.answer(step)
    ok, barred = (flags.numpy()[: len(sampled)] for flags in (buffers.ok, buffers.barred))
    output.num_accepted[sampled] = np.where(ok, 1, np.where(barred, NO_TOKEN, NON_FINITE))
    if flight.masks is not None:
        output.num_accepted[sampled[flight.masks.failed]] = NO_MATCH
    output.tokens[sampled, 0] = buffers.tokens.numpy()[: len(sampled)]
    if flight.asked is not None:
        _write_logprobs(sampled[flight.asked.at], flight.asked.count, buffers, output)
    if flight.reported:
        _write_reports(flight.reported, buffers, output)
    output.times_ns[output.FORWARD] = int(flight.began.elapsed_time(flight.forwarded) * 1e6)
    output.times_ns[output.SAMPLE] = int(flight.forwarded.elapsed_time(flight.done) * 1e6)


def _write_logprobs(at: IntArray, count: int, buffers: ResultBuffers, output: StepOutputView) -> None:
    num = len(at)
    output.header[output.NUM_LOGPROBS] = count
    output.logprob[at] = buffers.logprob.numpy()[:num]
    output.rank[at] = buffers.rank.numpy()[:num]
    output.top_ids[at, :count] = buffers.top_ids.numpy()[: num * count].reshape(num, count)
    output.top_logprobs[at, :count] = buffers.top_logprobs.numpy()[: num * count].reshape(num, count)


def _write_reports(reported: list[tuple[int, int]], buffers: ResultBuffers, output: StepOutputView) -> None:
    words, ok, begin = buffers.report.numpy(), buffers.report_ok.numpy(), 0
    for i, (entry, size) in enumerate(reported):
        output.add_report(entry, words[begin : begin + size])
        if not ok[i]:
            output.num_accepted[entry] = NON_FINITE
        begin += size
