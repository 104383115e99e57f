"""The real worker process on tiny weights: start, steps, SHUTDOWN, a lost engine, an exception."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipring.shm import control, wire
from slipring.shm import spec as worker_spec
from slipring.shm.control import BuildGrammar, ControlEnd, GrammarBuilt, LoadTokenizer
from slipring.shm.doorbell import Doorbell
from slipring.shm.grammar import Grammar
from slipring.shm.layout import Phase
from slipring.shm.ring import RingReader, RingWriter, create_ring
from slipring.shm.segment import memfd
from slipring.shm.spec import ModelSpec, SpeculationSpec
from slipring.shm.table import BatchTable, TableShape
from slipring.shm.wire import Progress, Ready, SlotKind, StepFlag, StepInputView, StepOutputView, StepShape, WorkerError
from tests.byte_tokenizer import byte_tokenizer
from tests.workers.constrained_rig import json_grammar
from tests.workers.runner_rig import GREEDY, Rig, worker_config
from tests.workers.tiny_models import save_tiny

PROMPT = [5, 9, 200, 31, 77, 12, 140, 66, 3]
START_S = 60.0


class Engine:
    """The engine's side of one worker, by hand."""

    def __init__(
        self,
        spec: ModelSpec,
        parent_pid: int | None = None,
        speculation: SpeculationSpec | None = None,
        **changes: object,
    ) -> None:
        shape = StepShape.of(8, 0 if speculation is None else 1, 8)
        table_shape = TableShape(16, 128, 8)
        self.steps = RingWriter.create("steps", 4, shape.input_bytes, 1)
        output_segment = create_ring("outputs", 4, shape.output_bytes, 1)
        self.outputs = RingReader(output_segment)
        self.table = BatchTable.create(table_shape)
        self.step_bell, self.output_bell = Doorbell(), Doorbell()
        control_ring, reply_ring = (create_ring(name, control.NUM_SLOTS, control.SLOT_BYTES, 1) for name in "cr")
        control_bell, self.reply_bell = Doorbell(), Doorbell()
        self.control = ControlEnd(RingWriter(control_ring), RingReader(reply_ring), control_bell)
        lifeline_read, self.lifeline = os.pipe()
        config = worker_config(
            spec,
            parent_pid=os.getpid() if parent_pid is None else parent_pid,
            step_ring_fd=self.steps.segment.fd,
            step_ring_bytes=self.steps.segment.nbytes,
            output_ring_fd=output_segment.fd,
            output_ring_bytes=output_segment.nbytes,
            control_ring_fd=control_ring.fd,
            control_ring_bytes=control_ring.nbytes,
            reply_ring_fd=reply_ring.fd,
            reply_ring_bytes=reply_ring.nbytes,
            control_doorbell_fd=control_bell.fd,
            reply_doorbell_fd=self.reply_bell.fd,
            table_fd=self.table.segment.fd,
            table_bytes=self.table.segment.nbytes,
            step_doorbell_fd=self.step_bell.fd,
            output_doorbell_fd=self.output_bell.fd,
            lifeline_fd=lifeline_read,
            spin_us=50,
            max_draft=shape.max_draft,
            speculation=speculation,
            **changes,
        )
        data = worker_spec.encode(config)
        config_fd = memfd("config", len(data))
        os.pwrite(config_fd, data, 0)
        fds = [config_fd, config.step_ring_fd, config.output_ring_fd, config.table_fd]
        fds += [config.step_doorbell_fd, config.output_doorbell_fd, lifeline_read]
        fds += [control_ring.fd, reply_ring.fd, control_bell.fd, self.reply_bell.fd]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slipring.workers.main", str(config_fd)],
            pass_fds=fds,
            stderr=subprocess.PIPE,
            env=os.environ | {"OMP_WAIT_POLICY": "passive"},
        )
        for fd in (config_fd, lifeline_read):
            os.close(fd)
        self.inputs = [StepInputView(self.steps.payload(i), shape) for i in range(4)]
        self.views = [StepOutputView(self.outputs.payload(i), shape) for i in range(4)]
        self.progress: list[Progress] = []

    def next_record(self, timeout_s: float = 10.0) -> tuple[SlotKind, int, int]:
        """(kind, slot, length) of the next output record."""
        deadline = time.monotonic() + timeout_s
        while (slot := self.outputs.try_read()) is None:
            assert time.monotonic() < deadline, f"the worker is silent in {self.steps.reader_state(0)}"
            assert self.process.poll() is None or self.outputs.try_read() is not None, "the worker has died"
            time.sleep(0.001)
        kind, length, _, _ = self.outputs.header(slot)
        return SlotKind(kind), slot, length

    def wait_ready(self) -> Ready:
        while True:
            kind, slot, length = self.next_record(START_S)
            payload = self.outputs.payload(slot)
            if kind == SlotKind.PROGRESS:
                self.progress.append(wire.decode(payload, length, Progress))
                self.outputs.advance()
                continue
            assert kind == SlotKind.READY
            ready = wire.decode(payload, length, Ready)
            self.outputs.advance()
            return ready

    def publish(self, step_id: int, start: int, num_tokens: int, flags: StepFlag, generation: int = 1) -> None:
        slot = self.steps.try_claim()
        assert slot is not None
        view = self.inputs[slot]
        view.header[:4] = (1, int(StepFlag.LAST_TOKEN in flags), 0, num_tokens)
        view.rows[0], view.generation[0], view.flags[0] = 3, generation, flags
        view.start[0], view.num_tokens[0], view.num_draft[0] = start, num_tokens, 0
        self.steps.publish(SlotKind.STEP, StepShape.of(8, 0, 8).input_bytes, step_id)
        self.step_bell.ring()

    def take_token(self, step_id: int) -> int:
        kind, slot, _ = self.next_record()
        assert kind == SlotKind.STEP and self.outputs.header(slot)[2] == step_id
        view = self.views[slot]
        assert (view.rows[0], view.generation[0], view.num_accepted[0]) == (3, 1, 1)
        assert view.times_ns[view.PICKED_UP] < view.times_ns[view.PUBLISHED]
        token = int(view.tokens[0, 0])
        self.outputs.advance()
        return token

    def admit(self) -> None:
        table = self.table
        table.token_ids[3, : len(PROMPT)] = PROMPT
        table.block_table[3, :3] = (5, 2, 9)
        table.num_blocks[3], table.num_prompt[3], table.num_known[3] = 3, len(PROMPT), len(PROMPT)
        table.limit[3] = table.shape.max_model_len
        table.write_params(3, GREEDY)


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return save_tiny("llama", tmp_path)[0]


@pytest.fixture
def engine(spec: ModelSpec) -> Iterator[Engine]:
    made = Engine(spec)
    yield made
    made.process.kill()
    made.process.wait()


def test_steps_run_ahead_of_the_reader_and_shutdown_ends_well(spec: ModelSpec, engine: Engine) -> None:
    ready = engine.wait_ready()
    assert ready.num_blocks == 64 and ready.block_bytes == 2 * 2 * 8 * 2 * 16 * 4
    assert list(ready.phase_seconds) == ["import", "load", "warm up"]
    assert engine.progress[-1].done == engine.progress[-1].total > 0
    engine.admit()
    n = len(PROMPT)
    engine.publish(1, 0, n, StepFlag.NEW | StepFlag.SAMPLE)
    for i in range(2):
        engine.publish(2 + i, n + i, 1, StepFlag.SAMPLE | StepFlag.LAST_TOKEN)
    tokens = [engine.take_token(step_id) for step_id in (1, 2, 3)]
    rig = Rig(spec)
    sequence = rig.admit(PROMPT)
    rig.generate([sequence], 3)
    assert tokens == sequence.outputs
    engine.process.send_signal(signal.SIGINT)  # Ctrl-C reaches the whole terminal; the engine drains
    slot = engine.steps.try_claim()
    assert slot is not None
    engine.steps.publish(SlotKind.SHUTDOWN, 0, 0)
    engine.step_bell.ring()
    assert engine.process.wait(10) == 0


def test_a_block_is_as_large_as_the_budget_takes_it_for(spec: ModelSpec) -> None:
    """With its drafts' keys and values: what a longer context needs is reckoned from it."""
    each = 2 * 2 * 8 * 2 * 16 * 4
    drafts = SpeculationSpec(method="draft_model", draft=spec)
    engine = Engine(spec, speculation=drafts, num_blocks=None, kv_cache_bytes=10 * 2 * each)
    try:
        ready = engine.wait_ready()
        assert (ready.num_blocks, ready.block_bytes) == (10, 2 * each)
    finally:
        engine.process.kill()
        engine.process.wait()


def test_control_messages_are_answered_without_a_step(spec: ModelSpec, engine: Engine) -> None:
    engine.wait_ready()
    engine.control.send(LoadTokenizer(byte_tokenizer().to_str().encode()))
    engine.control.send(BuildGrammar(5, json_grammar({"type": "integer"})))
    engine.control.send(BuildGrammar(6, Grammar("no grammar at all", "lark")))
    answers, deadline = [], time.monotonic() + 60
    while len(answers) < 2 and time.monotonic() < deadline:
        answers += engine.control.receive()
        time.sleep(0.005)
    good, bad = answers
    assert good == GrammarBuilt(5)
    assert isinstance(bad, GrammarBuilt) and bad.grammar_id == 6 and bad.error


def test_an_idle_worker_sleeps(engine: Engine) -> None:
    engine.wait_ready()
    time.sleep(0.3)
    before = _cpu_ticks(engine.process.pid)
    time.sleep(1.0)
    assert _cpu_ticks(engine.process.pid) - before <= 1
    assert engine.steps.reader_state(0).phase == Phase.WAITING


def test_the_end_of_the_lifeline_ends_the_worker(engine: Engine) -> None:
    engine.wait_ready()
    os.close(engine.lifeline)
    assert engine.process.wait(5) == 0


def test_an_exception_becomes_an_error_record(engine: Engine) -> None:
    engine.wait_ready()
    engine.admit()
    engine.publish(7, 0, 1, StepFlag.SAMPLE, generation=4)
    kind, slot, length = engine.next_record()
    assert kind == SlotKind.ERROR
    error = wire.decode(engine.outputs.payload(slot), length, WorkerError)
    assert "generation 4" in error.message and "check" in error.traceback and error.step_id == 7
    assert engine.process.wait(10) == 1
    assert engine.process.stderr is not None and b"generation 4" in engine.process.stderr.read()


def test_a_bad_checkpoint_becomes_an_error_record(tmp_path: Path) -> None:
    spec, _ = save_tiny("llama", tmp_path)
    os.truncate(spec.files[0], os.path.getsize(spec.files[0]) - 100)
    engine = Engine(spec)
    kind = SlotKind.PROGRESS
    while kind == SlotKind.PROGRESS:
        kind, slot, length = engine.next_record(START_S)
        payload = bytes(engine.outputs.payload(slot)[:length])
        engine.outputs.advance()
    assert kind == SlotKind.ERROR
    message = wire.decode(memoryview(payload), length, WorkerError).message
    assert "model.safetensors" in message and "cut off" in message
    assert engine.process.wait(10) == 1


def test_a_worker_whose_engine_is_gone_never_starts(spec: ModelSpec) -> None:
    engine = Engine(spec, parent_pid=1)
    assert engine.process.wait(10) == 0


def test_a_start_by_hand_says_what_is_wrong() -> None:
    done = subprocess.run([sys.executable, "-m", "slipring.workers.main"], capture_output=True, text=True)
    assert done.returncode == 2 and "usage" in done.stderr


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])
