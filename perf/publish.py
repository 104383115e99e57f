"""Fan-out: what publishing one 256-row step costs, and how long until the slowest of 1 to 8 readers has it."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np

from perf.figure import ROOT, Measurement, Options, percentile
from perf.ring import ROWS, SHAPE
from slipring.shm.doorbell import Doorbell
from slipring.shm.ring import RingWriter
from slipring.shm.wire import SlotKind, StepInputView

DESCRIPTION = "publishing a step to 1, 2, 4, 8 reader processes: cost to the writer, and until all have read"

READER = """
import sys
import numpy as np
from slipring.shm.doorbell import Doorbell, Waiter
from slipring.shm.ring import RingReader
from slipring.shm.segment import Segment
fd, nbytes, bell, index, count = map(int, sys.argv[1:])
ring = RingReader(Segment.attach(fd, nbytes), index)
waiter = Waiter(Doorbell(bell), 50)
for expected in range(count):
    assert waiter.wait(lambda: ring.try_read() is not None, timeout_s=60)
    slot = ring.try_read()
    assert ring.header(slot)[2] == expected and np.frombuffer(ring.payload(slot), np.int32)[0] == 256
    ring.advance()
"""


def measure(options: Options) -> Measurement:
    count = 300 if options.quick else 5000
    table = [_fan_out(num_readers, count) for num_readers in (1, 2, 4, 8)]
    summary = {f"publish_p50_us_{row['readers']}": row["publish_p50_us"] for row in table}
    return Measurement(summary, table, notes="more readers than cores: the time until all have read is the scheduler's")


def _fan_out(num_readers: int, count: int) -> dict:
    ring = RingWriter.create("step ring", 4, SHAPE.input_bytes, num_readers)
    views = [StepInputView(ring.payload(slot), SHAPE) for slot in range(4)]
    bells = [Doorbell() for _ in range(num_readers)]
    fd = ring.segment.fd
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, *map(str, (fd, ring.segment.nbytes, bell.fd, index, count))],
            pass_fds=(fd, bell.fd),
            cwd=ROOT,
        )
        for index, bell in enumerate(bells)
    ]
    rows = np.arange(ROWS, dtype=np.int32)
    publish, until_read = np.zeros(count), np.zeros(count)
    for step_id in range(count):
        began = time.perf_counter_ns()
        slot = ring.try_claim()
        assert slot is not None
        view = views[slot]
        view.header[0] = ROWS
        view.rows[:] = view.start[:] = rows
        ring.publish(SlotKind.STEP, SHAPE.input_bytes, step_id)
        for bell in bells:
            bell.ring()
        publish[step_id] = (time.perf_counter_ns() - began) / 1e3
        while ring.lagging()[0].read <= step_id:
            pass
        until_read[step_id] = (time.perf_counter_ns() - began) / 1e3
    assert [reader.wait(20) for reader in readers] == [0] * num_readers
    steady = slice(count // 10, None)  # the first ones wait for the readers to start
    return {
        "readers": num_readers,
        "publish_p50_us": round(percentile(publish[steady], 50), 2),
        "all_have_read_p50_us": round(percentile(until_read[steady], 50), 2),
    }
