"""A worker that returns tokens at once: `python -m perf.instant_worker FD`. What is left is the engine's own cost.

The token drawn after position p of a row is `FIRST + (p * 7 + num_prompt) % SPAN`, so a client can check its text.
`INSTANT_STEP_MS` makes each step last so long (a paced stream), `INSTANT_TOKEN_US` adds that for each prompt token.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import numpy as np

from slipring.shm import spec
from slipring.shm.layout import Phase
from slipring.shm.wire import Ready, StepFlag, StepInputView, StepOutputView
from slipring.workers.link import EngineGone, Link

FIRST, SPAN = 1000, 2000


def drawn(position, num_prompt):
    """The token at `position`, of a request whose prompt had `num_prompt` tokens."""
    return FIRST + (position * 7 + num_prompt) % SPAN


def main() -> int:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(int(sys.argv[1]), "rb") as source:
        config = spec.decode(source.read())
    step_s = float(os.environ.get("INSTANT_STEP_MS", "0")) / 1e3
    token_s = float(os.environ.get("INSTANT_TOKEN_US", "0")) / 1e6
    link = Link(config)
    link.publish_ready(Ready(num_blocks=config.num_blocks or 65536, block_bytes=1, phase_seconds={}))
    link.beat(Phase.WAITING)
    try:
        while (step := link.next_step()) is not None:
            link.beat(Phase.RUNNING)
            output = link.claim_output()
            num_tokens = _run(step.view, output, link.table.num_prompt)
            if (pause := step_s + token_s * num_tokens) > 0:
                time.sleep(pause)
            link.publish_step(step, output)
            link.beat(Phase.WAITING)
    except EngineGone:
        pass
    return 0


def _run(step: StepInputView, output: StepOutputView, num_prompt: np.ndarray) -> int:
    """Answer a step; returns its prompt tokens."""
    num = output.answer(step)
    rows = step.rows[:num]
    output.num_accepted[:num] = (step.flags[:num] & int(StepFlag.SAMPLE)) > 0
    output.tokens[:num, 0] = drawn(step.start[:num] + step.num_tokens[:num], num_prompt[rows])
    return int(step.header[step.NUM_TOKENS]) - int(step.header[step.NUM_DECODE])


if __name__ == "__main__":
    sys.exit(main())
