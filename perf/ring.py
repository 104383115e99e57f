"""A 256-row step to a worker process and back: by spinning, through the doorbell, and through the event loop.

The worker answers each StepInput with a StepOutput at once. `--compare` runs the same payload, the other way that
engines do it, in the same run: ZeroMQ over ipc with msgpack, and `multiprocessing.Queue`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import msgspec
import numpy as np
import uvloop

from perf.figure import ROOT, Measurement, Options, percentile
from slipring.shm.doorbell import Doorbell, LoopWaiter, Waiter
from slipring.shm.ring import RingReader, RingWriter, create_ring
from slipring.shm.segment import Segment
from slipring.shm.wire import SlotKind, StepInputView, StepOutputView, StepShape

DESCRIPTION = "engine to worker and back with a 256-row step: microseconds"
ROWS = 256
SHAPE = StepShape.of(ROWS, 0, 16)


def measure(options: Options) -> Measurement:
    count = 500 if options.quick else 20_000
    runs = {
        "spin": _spin(count),
        "doorbell": _doorbell(count),
        "loop": asyncio.Runner(loop_factory=uvloop.new_event_loop).run(_loop(count)),
    }
    if options.compare:
        runs["zmq"] = _zmq(count)
        runs["mpqueue"] = _mpqueue(count // 4)
    names = {
        "spin": "ring, both sides spin",
        "doorbell": "ring, caller sleeps on its doorbell",
        "loop": "ring, caller is the uvloop event loop",
        "zmq": "ZeroMQ ipc, msgpack",
        "mpqueue": "multiprocessing.Queue, pickle",
    }
    table = [
        {"path": names[key], "p50_us": round(percentile(us, 50), 2), "p99_us": round(percentile(us, 99), 2)}
        for key, us in runs.items()
    ]
    summary = {f"{key}_rtt_p50_us": row["p50_us"] for key, row in zip(runs, table, strict=True)}
    return Measurement(summary, table, {key: [round(float(x), 2) for x in us[:500]] for key, us in runs.items()})


class Link:
    """The two rings of a replica, and an echo worker at the other end."""

    def __init__(self, worker_spin_us: int) -> None:
        self.steps = RingWriter.create("step ring", 4, SHAPE.input_bytes, 1)
        self.outputs = RingReader(create_ring("output ring", 4, SHAPE.output_bytes, 1))
        self.bells = (Doorbell(), Doorbell())
        self.inputs = [StepInputView(self.steps.payload(i), SHAPE) for i in range(4)]
        self.results = [StepOutputView(self.outputs.payload(i), SHAPE) for i in range(4)]
        self.rows = np.arange(ROWS, dtype=np.int32)
        fds = (self.steps.segment.fd, self.outputs.segment.fd, self.bells[0].fd, self.bells[1].fd)
        sizes = (self.steps.segment.nbytes, self.outputs.segment.nbytes)
        arguments = [str(value) for value in (*fds, *sizes, worker_spin_us)]
        command = [sys.executable, "-m", "perf.echo_worker", *arguments]
        self.worker = subprocess.Popen(command, pass_fds=fds, cwd=ROOT)
        self._round_trip(lambda: self.outputs.try_read() is not None)  # the worker is up

    def send(self, step_id: int) -> None:
        slot = self.steps.try_claim()
        assert slot is not None
        view = self.inputs[slot]
        view.header[0] = ROWS
        view.rows[:] = self.rows
        view.generation[:] = step_id
        view.start[:] = step_id
        self.steps.publish(SlotKind.STEP, SHAPE.input_bytes, step_id)
        self.bells[0].ring()

    def receive(self, step_id: int) -> None:
        """Check that the answer is right, and give the slot back."""
        slot = self.outputs.try_read()
        assert slot is not None and self.outputs.header(slot)[2] == step_id
        view = self.results[slot]
        assert view.tokens[0, 0] == step_id and view.tokens[ROWS - 1, 0] == step_id + ROWS - 1
        self.outputs.advance()

    def _round_trip(self, wait: Callable[[], bool]) -> None:
        self.send(0)
        while not wait():
            pass
        self.receive(0)

    def close(self) -> None:
        slot = self.steps.try_claim()
        assert slot is not None
        self.steps.publish(SlotKind.SHUTDOWN, 0, 0)
        self.bells[0].ring()
        assert self.worker.wait(10) == 0


def _time(link: Link, count: int, wait: Callable[[], object]) -> np.ndarray:
    times = np.zeros(count)
    for index in range(count):
        began = time.perf_counter_ns()
        link.send(index)
        wait()
        link.receive(index)
        times[index] = (time.perf_counter_ns() - began) / 1e3
    link.close()
    return times


def _spin(count: int) -> np.ndarray:
    link = Link(worker_spin_us=100_000)

    def wait() -> None:
        while link.outputs.try_read() is None:
            pass

    return _time(link, count, wait)


def _doorbell(count: int) -> np.ndarray:
    link = Link(worker_spin_us=100)
    waiter = Waiter(link.bells[1], 0)
    return _time(link, count, lambda: waiter.wait(lambda: link.outputs.try_read() is not None))


async def _loop(count: int) -> np.ndarray:
    """The engine's own way: the loop sees the answer in one of its turns, or its doorbell wakes it."""
    link = Link(worker_spin_us=100)
    loop = asyncio.get_running_loop()
    times = np.zeros(count)
    done = loop.create_future()
    index, began = 0, time.perf_counter_ns()

    def on_outputs() -> None:
        nonlocal index, began
        if link.outputs.try_read() is None:
            return
        link.receive(index)
        times[index] = (time.perf_counter_ns() - began) / 1e3
        index += 1
        if index == count:
            done.set_result(None)
            return
        began = time.perf_counter_ns()
        link.send(index)
        waiter.expect()

    waiter = LoopWaiter(loop, link.bells[1], lambda: link.outputs.try_read() is not None, on_outputs, max_spin_us=50)
    began = time.perf_counter_ns()
    link.send(0)
    waiter.expect()
    await done
    waiter.close()
    link.close()
    return times


# --- the same step, the other way ---------------------------------------------------------------------------------


class Rows(msgspec.Struct, array_like=True):
    """What crosses when a step is an object: the same 256 entries."""

    step_id: int
    rows: list[int]
    generation: list[int]
    start: list[int]


def _zmq(count: int) -> np.ndarray:
    import zmq

    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/ring"
        process = multiprocessing.get_context("spawn").Process(target=zmq_worker, args=(address,), daemon=True)
        process.start()
        socket = zmq.Context.instance().socket(zmq.PAIR)
        socket.connect(address)
        times = np.zeros(count)
        encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Rows)
        rows = list(range(ROWS))
        for index in range(-1, count):
            began = time.perf_counter_ns()
            socket.send(encoder.encode(Rows(index, rows, [index] * ROWS, [index] * ROWS)), copy=False)
            answer = decoder.decode(socket.recv())
            times[max(index, 0)] = (time.perf_counter_ns() - began) / 1e3
            assert answer.step_id == index and answer.start[-1] == index + ROWS - 1
        socket.send(b"")
        process.join(10)
        socket.close()
    return times


def zmq_worker(address: str) -> None:
    import zmq

    socket = zmq.Context.instance().socket(zmq.PAIR)
    socket.bind(address)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Rows)
    while data := socket.recv():
        step = decoder.decode(data)
        step.start = [step.step_id + row for row in step.rows]
        socket.send(encoder.encode(step), copy=False)
    socket.close()


def _mpqueue(count: int) -> np.ndarray:
    context = multiprocessing.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=mpqueue_worker, args=(there, back), daemon=True)
    process.start()
    times = np.zeros(count)
    rows = list(range(ROWS))
    for index in range(-1, count):
        began = time.perf_counter_ns()
        there.put((index, rows, [index] * ROWS, [index] * ROWS))
        step_id, _, _, start = back.get()
        times[max(index, 0)] = (time.perf_counter_ns() - began) / 1e3
        assert step_id == index and start[-1] == index + ROWS - 1
    there.put(None)
    process.join(10)
    return times


def mpqueue_worker(there, back) -> None:
    while (step := there.get()) is not None:
        step_id, rows, generation, _ = step
        back.put((step_id, rows, generation, [step_id + row for row in rows]))


def attach(arguments: list[str]) -> tuple[RingReader, RingWriter, Waiter, Doorbell]:
    """The worker's end, from the command line that `Link` made."""
    step_fd, output_fd, step_bell, output_bell, step_bytes, output_bytes, spin_us = map(int, arguments)
    reader = RingReader(Segment.attach(step_fd, step_bytes))
    writer = RingWriter(Segment.attach(output_fd, output_bytes))
    return reader, writer, Waiter(Doorbell(step_bell), spin_us), Doorbell(output_bell)
