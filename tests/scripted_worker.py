"""A worker process with real rings and no model: `python -m tests.scripted_worker FD`.

It draws tokens as `SimulatedDevice` does. The environment variable SCRIPT (JSON) makes it misbehave on purpose:

    step_s       seconds that each step takes
    crash_at     step at which it kills itself
    raise_at     step at which it reports an error and exits
    never_ready  it never says that it is ready
    exit_at_start  exit status, right after a line on stderr
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time

from slipring.shm import spec, wire
from slipring.shm.doorbell import Doorbell, Waiter
from slipring.shm.layout import Phase
from slipring.shm.ring import RingReader, RingWriter
from slipring.shm.segment import Segment
from slipring.shm.table import BatchTable, TableShape
from slipring.shm.wire import SlotKind, StepInputView, StepOutputView, StepShape
from tests.simulated_device import SimulatedDevice


def main() -> int:
    script = json.loads(os.environ.get("SCRIPT", "{}"))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(int(sys.argv[1]), "rb") as source:
        config = spec.decode(source.read())
    if "exit_at_start" in script:
        print("the scripted worker gives up", file=sys.stderr)
        return int(script["exit_at_start"])
    steps = RingReader(Segment.attach(config.step_ring_fd, config.step_ring_bytes), config.reader_index)
    outputs = RingWriter(Segment.attach(config.output_ring_fd, config.output_ring_bytes))
    bell = Doorbell(config.output_doorbell_fd)
    waiter = Waiter(Doorbell(config.step_doorbell_fd), config.spin_us, config.lifeline_fd)
    shape = TableShape(config.num_rows, config.max_model_len, config.block_size)
    table = BatchTable(Segment.attach(config.table_fd, config.table_bytes), shape)
    num_blocks = config.num_blocks or 4096
    device = SimulatedDevice(table, num_blocks, config.model.vocab_size)
    step_shape = StepShape.of(config.max_num_seqs, config.max_draft, config.block_size)
    if script.get("never_ready"):
        waiter.wait(lambda: False)
        return 1
    _control(outputs, bell, SlotKind.PROGRESS, wire.Progress(done=1, total=1))
    _control(outputs, bell, SlotKind.READY, wire.Ready(num_blocks=num_blocks, block_bytes=1, phase_seconds={"load": 0}))
    while True:
        steps.beat(Phase.WAITING)
        if not waiter.wait(lambda: steps.try_read() is not None):
            return 1
        slot = steps.try_read()
        assert slot is not None
        kind, _, step_id, _ = steps.header(slot)
        if kind == SlotKind.SHUTDOWN:
            return 0
        if step_id == script.get("crash_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if step_id == script.get("raise_at"):
            _control(outputs, bell, SlotKind.ERROR, wire.WorkerError(message="scripted fault", traceback=""))
            return 1
        time.sleep(script.get("step_s", 0))
        out = outputs.try_claim()
        assert out is not None
        view = StepOutputView(outputs.payload(out), step_shape)
        device.run(StepInputView(steps.payload(slot), step_shape), view)
        outputs.publish(SlotKind.STEP, step_shape.output_bytes, step_id)
        bell.ring()
        steps.advance()


def _control(outputs: RingWriter, bell: Doorbell, kind: SlotKind, message: wire.Ready | wire.Progress) -> None:
    slot = outputs.try_claim()
    assert slot is not None
    data = wire.encode(message)
    outputs.payload(slot)[: len(data)] = data
    outputs.publish(kind, len(data), 0)
    bell.ring()


if __name__ == "__main__":
    sys.exit(main())
