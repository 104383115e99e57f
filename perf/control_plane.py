"""A scheduler with real shared memory and no worker: the bench of `schedule` and `update`.

The caller plays the device: it fills the output slot by slices, so that the two functions can be timed alone, with
the write into the ring slot and the publication in it.
"""

from __future__ import annotations

import numpy as np

from slipring.scheduler.config import SchedulerConfig
from slipring.scheduler.request import Request
from slipring.scheduler.scheduler import Scheduler
from slipring.scheduler.step import Returned, Step
from slipring.shm.params import SamplingParams
from slipring.shm.ring import RingReader, RingWriter
from slipring.shm.table import BatchTable, TableShape
from slipring.shm.wire import SlotKind, StepInputView, StepOutputView, StepShape

VOCAB = 50_000
PROMPT = 32


class ControlPlane:
    def __init__(self, num_rows: int, max_model_len: int, seed: int, max_tokens: int, block_size: int = 16) -> None:
        blocks = (num_rows + 64) * -(-max_model_len // block_size)
        self.config = SchedulerConfig(
            num_blocks=blocks,
            block_size=block_size,
            max_num_seqs=num_rows,
            max_num_batched_tokens=max(8192, num_rows),
            num_rows=num_rows + max(64, num_rows // 4),
            max_model_len=max_model_len,
        )
        self.rng = np.random.default_rng(seed)
        self.max_tokens = max_tokens
        table = BatchTable.create(TableShape(self.config.num_rows, max_model_len, block_size))
        self.scheduler = Scheduler(self.config, table, VOCAB)
        shape = StepShape.of(num_rows, 0, block_size)
        self.nbytes = shape.input_bytes
        self.ring = RingWriter.create("step ring", 4, shape.input_bytes, 1)
        self.reader = RingReader(self.ring.segment)
        self.views = [StepInputView(self.ring.payload(slot), shape) for slot in range(4)]
        self.output = StepOutputView(memoryview(bytearray(shape.output_bytes)), shape)
        self.tokens = self.rng.integers(100, VOCAB, (64, num_rows), dtype=np.int32)

    def add(self, length: int = PROMPT, max_tokens: int | None = None, stagger: bool = True) -> Request:
        """One request with a random prompt; `stagger` spreads the rows over the positions of a block."""
        length += int(self.rng.integers(self.config.block_size)) if stagger else 0
        prompt = self.rng.integers(0, VOCAB, length, dtype=np.int32)
        params = SamplingParams(max_tokens=max_tokens or self.max_tokens, stop_token_ids=(2,))
        request = Request(prompt, params)
        request.hash_prompt(self.config.block_size)
        self.scheduler.add(request)
        return request

    def schedule(self) -> Step | None:
        """What is timed: decide, write the slot, publish it."""
        slot = self.ring.try_claim()
        assert slot is not None
        step = self.scheduler.schedule(self.views[slot])
        if step is not None:
            self.ring.publish(SlotKind.STEP, self.nbytes, step.step_id)
        return step

    def answer(self, step: Step) -> None:
        """Be the device: every entry that samples draws a token that stops nobody."""
        output, count, view = self.output, step.num_rows, step.view
        output.answer(view)
        output.num_accepted[:count] = (view.flags[:count] & 2) > 0
        output.tokens[:count, 0] = self.tokens[step.step_id % 64, :count]
        self.reader.advance()

    def update(self, step: Step) -> Returned:
        return self.scheduler.update(self.output, step.step_id)

    def decode_until_steady(self, num_rows: int) -> None:
        """Admit `num_rows` requests and run until all of them decode."""
        for _ in range(num_rows):
            self.add()
        while self.scheduler.decode.num < num_rows:
            step = self.schedule()
            assert step is not None
            self.answer(step)
            self.update(step)
            self.scheduler.settle()
