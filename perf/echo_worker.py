"""The other end of `perf.ring`: answers each step at once. Not a benchmark by itself."""

from __future__ import annotations

import sys

import numpy as np

from perf.ring import ROWS, SHAPE, attach
from slipring.shm.wire import SlotKind, StepInputView, StepOutputView


def main() -> int:
    steps, outputs, waiter, bell = attach(sys.argv[1:])
    inputs = [StepInputView(steps.payload(i), SHAPE) for i in range(steps.num_slots)]
    results = [StepOutputView(outputs.payload(i), SHAPE) for i in range(outputs.num_slots)]
    tokens = np.zeros(ROWS, np.int32)

    def ready() -> bool:
        return steps.try_read() is not None

    while True:
        waiter.wait(ready)
        slot = steps.try_read()
        assert slot is not None
        kind, _, step_id, _ = steps.header(slot)
        if kind == SlotKind.SHUTDOWN:
            return 0
        step, out = inputs[slot], outputs.try_claim()
        assert out is not None
        result = results[out]
        result.rows[:] = step.rows
        result.generation[:] = step.generation
        result.num_accepted[:] = 1
        result.tokens[:, 0] = np.add(step.rows, step.start, out=tokens)
        outputs.publish(SlotKind.STEP, SHAPE.output_bytes, step_id)
        bell.ring()
        steps.advance()


if __name__ == "__main__":
    sys.exit(main())
