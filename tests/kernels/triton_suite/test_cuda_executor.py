"""The CUDA worker's start, loop and completion thread over real rings, with `HostDevice` for CUDA."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from slipring.shm.doorbell import Doorbell
from slipring.shm.layout import Phase
from slipring.shm.ring import RingReader, RingWriter, create_ring
from slipring.shm.spec import ModelSpec, WorkerConfig
from slipring.shm.table import BatchTable, TableShape
from slipring.shm.wire import SlotKind, StepFlag, StepInputView, StepOutputView, StepShape
from slipring.workers.cuda.device import HostDevice
from slipring.workers.cuda.edits import Edits
from slipring.workers.cuda.executor import CudaExecutor
from slipring.workers.cuda.startup import build_executor
from slipring.workers.grammar import GrammarStore
from slipring.workers.kv_cache import MemoryShortageError, block_bytes
from slipring.workers.link import Link
from slipring.workers.main import serve
from slipring.workers.reports import RESERVE_BYTES
from slipring.workers.startup_clock import PhaseClock
from tests.kernels.on_gpu import OnGpu
from tests.workers.runner_rig import GREEDY, Rig, worker_config
from tests.workers.tiny_models import save_tiny

PROMPT = [5, 9, 200, 31, 77, 12, 140, 66, 3]
SHAPE = StepShape.of(2, 0, 8)
TABLE = TableShape(4, 64, 8)
DECODE = StepFlag.SAMPLE | StepFlag.LAST_TOKEN
EVENTS_S = 20.0


class SlowDevice(HostDevice):
    """Its work is done once `finish` is set, and `fault` is what the wait for it raises."""

    def __init__(self, memory_bytes: int = 1 << 30) -> None:
        super().__init__(memory_bytes=memory_bytes)
        self.finish = threading.Event()
        self.finish.set()
        self.fault: Exception | None = None

    def record(self) -> Any:
        event, device = super().record(), self

        class Late:
            def synchronize(self) -> None:
                assert device.finish.wait(EVENTS_S)
                if device.fault is not None:
                    raise device.fault

            def elapsed_time(self, end_event: Any) -> float:
                return event.elapsed_time(end_event.event)

        late = Late()
        late.event = event  # pyright: ignore[reportAttributeAccessIssue]
        return late


class Worker:
    """Link, executor and loop on a thread of this process; the engine's side by hand."""

    def __init__(self, spec: ModelSpec, device: HostDevice, **changes: object) -> None:
        self.steps = RingWriter.create("steps", 4, SHAPE.input_bytes, 1)
        output_segment = create_ring("outputs", 4, SHAPE.output_bytes, 1)
        self.outputs = RingReader(output_segment)
        self.table = BatchTable.create(TABLE)
        self.bell, output_bell = Doorbell(), Doorbell()
        lifeline, self.lifeline = os.pipe()
        segments = {"step_ring": self.steps.segment, "output_ring": output_segment, "table": self.table.segment}
        sizes = {f"{name}_bytes": segment.nbytes for name, segment in segments.items()}
        fds = {f"{name}_fd": os.dup(segment.fd) for name, segment in segments.items()}
        small = {"max_num_seqs": 2, "num_rows": 4, "max_model_len": 64, "max_num_batched_tokens": 12}
        bells = {"step_doorbell_fd": self.bell.fd, "output_doorbell_fd": output_bell.fd, "lifeline_fd": lifeline}
        config = worker_config(spec, **(small | sizes | fds | bells | changes))  # pyright: ignore[reportArgumentType]
        self.inputs = [StepInputView(self.steps.payload(i), SHAPE) for i in range(4)]
        self.views = [StepOutputView(self.outputs.payload(i), SHAPE) for i in range(4)]
        self.device = device
        self.error: BaseException | None = None
        self.ready = threading.Event()
        self.executor: CudaExecutor | None = None
        self.thread = threading.Thread(target=self._run, args=(config,), daemon=True)
        self.thread.start()

    def _run(self, config: WorkerConfig) -> None:
        try:
            with OnGpu():
                link = Link(config)
                grammars = GrammarStore(config.model)
                self.executor, self.kv = build_executor(config, link, self.device, PhaseClock(), grammars)
                self.registered = list(self.device.registered)
                self.ready.set()
                serve(link, self.executor)
        except BaseException as error:
            self.error = error
        self.ready.set()

    def admit(self) -> None:
        table = self.table
        table.token_ids[3, : len(PROMPT)] = PROMPT
        table.block_table[3, :3] = (5, 2, 9)
        table.num_blocks[3], table.num_prompt[3], table.num_known[3] = 3, len(PROMPT), len(PROMPT)
        table.write_params(3, GREEDY)

    def publish(self, step_id: int, start: int, num_tokens: int, flags: StepFlag) -> None:
        slot = self.steps.try_claim()
        assert slot is not None
        view = self.inputs[slot]
        view.header[:4] = (1, int(StepFlag.LAST_TOKEN in flags), 0, num_tokens)
        view.rows[0], view.generation[0], view.flags[0] = 3, 1, flags
        view.start[0], view.num_tokens[0], view.num_draft[0] = start, num_tokens, 0
        self.steps.publish(SlotKind.STEP, SHAPE.input_bytes, step_id)
        self.bell.ring()

    def publish_three(self) -> None:
        self.publish(1, 0, len(PROMPT), StepFlag.NEW | StepFlag.SAMPLE)
        for i in range(2):
            self.publish(2 + i, len(PROMPT) + i, 1, DECODE)

    def take_token(self, step_id: int) -> int:
        while True:
            wait_until(lambda: self.outputs.try_read() is not None or self.error is not None)
            assert self.error is None, self.error
            slot = self.outputs.try_read()
            assert slot is not None
            kind, _, ours, _ = self.outputs.header(slot)
            token = int(self.views[slot].tokens[0, 0])
            self.outputs.advance()
            if kind != SlotKind.PROGRESS:
                assert (kind, ours) == (SlotKind.STEP, step_id)
                return token

    def shut_down(self) -> None:
        assert self.steps.try_claim() is not None
        self.steps.publish(SlotKind.SHUTDOWN, 0, 0)
        self.bell.ring()
        self.thread.join(EVENTS_S)
        assert not self.thread.is_alive()


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + EVENTS_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    return save_tiny("llama", tmp_path_factory.mktemp("tiny"))[0]


@pytest.fixture
def worker(spec: ModelSpec) -> Iterator[Worker]:
    made = Worker(spec, SlowDevice())
    assert made.ready.wait(60) and made.error is None, made.error
    yield made
    os.close(made.lifeline)
    made.thread.join(EVENTS_S)


def test_steps_are_submitted_ahead_and_published_in_order(spec: ModelSpec, worker: Worker) -> None:
    assert worker.registered == [worker.steps.segment.nbytes, worker.table.segment.nbytes]
    worker.device.finish.clear()  # pyright: ignore[reportAttributeAccessIssue]
    worker.admit()
    worker.publish_three()
    executor = worker.executor
    assert executor is not None
    wait_until(lambda: executor._num_in_flight == 3)
    assert worker.steps.reader_state(0).read == 0, "no slot goes back before its output is published"
    assert worker.steps.reader_state(0).phase == Phase.RUNNING
    worker.device.finish.set()  # pyright: ignore[reportAttributeAccessIssue]
    tokens = [worker.take_token(step_id) for step_id in (1, 2, 3)]
    rig = Rig(spec)
    sequence = rig.admit(PROMPT)
    rig.generate([sequence], 3)
    assert tokens == sequence.outputs
    wait_until(lambda: worker.steps.reader_state(0).read == 3)
    worker.shut_down()
    assert worker.error is None and worker.device.registered == []


def test_buckets_are_captured_while_the_worker_is_idle(spec: ModelSpec, worker: Worker) -> None:
    executor = worker.executor
    assert executor is not None
    decode = executor._runner.decode
    wait_until(lambda: decode.uncaptured() == [])
    worker.admit()
    worker.publish_three()
    tokens = [worker.take_token(step_id) for step_id in (1, 2, 3)]
    rig = Rig(spec)
    sequence = rig.admit(PROMPT)
    rig.generate([sequence], 3)
    assert tokens == sequence.outputs


def test_a_step_ends_a_capture_and_a_refused_one_is_the_last(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = worker.executor
    assert executor is not None
    decode = executor._runner.decode
    wait_until(lambda: decode.uncaptured() == [])
    decode._graphs.clear()
    # The null twin runs a body at its replay only; one that runs it at once meets the step as a capture would.
    monkeypatch.setattr(worker.device, "capture", lambda body: body())
    with OnGpu():
        assert executor._capture_next(lambda: True)
    assert len(decode.uncaptured()) == len(decode.buckets), "left at the first layer"
    assert worker.steps.reader_state(0).phase == Phase.WAITING

    def refused(body: Callable[[], None]) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(worker.device, "capture", refused)
    with OnGpu():
        assert not executor._capture_next(lambda: False)
    assert executor.meanwhile is None, "not tried again"
    assert worker.thread.is_alive()


def test_a_device_fault_ends_the_loop_with_its_words(worker: Worker) -> None:
    worker.device.fault = RuntimeError("an illegal memory access")  # pyright: ignore[reportAttributeAccessIssue]
    worker.admit()
    worker.publish(1, 0, len(PROMPT), StepFlag.NEW | StepFlag.SAMPLE)
    worker.thread.join(EVENTS_S)
    assert not worker.thread.is_alive() and "illegal memory access" in str(worker.error)


def test_a_pool_that_cannot_hold_one_context_is_refused_with_the_largest_that_fits(spec: ModelSpec) -> None:
    changes: dict[str, object] = {"num_blocks": None, "kv_cache_bytes": 0}
    config = worker_config(spec)
    each = block_bytes(spec, config.block_size, torch.float32)
    fixed = RESERVE_BYTES + Edits.reserve_bytes(4, 2, 260) + 2 * (2 << 20)  # two buckets' graphs
    worker = Worker(spec, HostDevice(memory_bytes=int((fixed + 5 * each) / 0.98) + 64), **changes)
    assert worker.ready.wait(60)
    assert isinstance(worker.error, MemoryShortageError)
    assert "--max-model-len 40" in str(worker.error) and "edited draws" in str(worker.error)
    os.close(worker.lifeline)
