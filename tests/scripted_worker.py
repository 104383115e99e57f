"""A worker process with real rings and no model: `python -m tests.scripted_worker FD`.

It draws tokens as `SimulatedDevice` does. The environment variable SCRIPT (JSON) makes it misbehave on purpose:

    step_s       seconds that each step takes
    crash_at     step at which it kills itself
    raise_at     step at which it reports an error and exits
    exit_at_restart  exit status of every worker after the first, right after a line on stderr
    poison       a token: whoever has it in its prompt ends the worker, by SIGKILL
    never_ready  it never says that it is ready
    exit_at_start  exit status, right after a line on stderr
    epoch        it says that it is of this epoch
    warm_up_s    it says that its warm-up took so long
    failure      `num_accepted` of every entry: nothing could be drawn
    move_s       it answers transfers of blocks, after so many seconds each (and moves nothing)
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time

import msgspec

from slipring.shm import spec
from slipring.shm.control import BlocksMoved, Message, MoveBlocks
from slipring.shm.layout import Phase
from slipring.shm.wire import Ready, StepInputView
from slipring.workers.control import ControlThread
from slipring.workers.link import EngineGone, Link
from tests.simulated_device import SimulatedDevice


def main() -> int:
    script = json.loads(os.environ.get("SCRIPT", "{}"))
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(int(sys.argv[1]), "rb") as source:
        config = spec.decode(source.read())
    if config.epoch > 1 and "exit_at_restart" in script:
        print("the scripted worker gives up", file=sys.stderr)
        return int(script["exit_at_restart"])
    if "exit_at_start" in script:
        print("the scripted worker gives up", file=sys.stderr)
        return int(script["exit_at_start"])
    link = Link(msgspec.structs.replace(config, epoch=script.get("epoch", config.epoch)))
    num_blocks = config.num_blocks or 4096
    device = SimulatedDevice(link.table, num_blocks, config.model.vocab_size, config.model.hidden_size)
    if script.get("never_ready"):
        link.next_step()
    if "move_s" in script:
        ControlThread(*link.open_control(), lambda message: _moved(message, script["move_s"]), link.fail)
    link.progress(1, 1)
    phases = {"load": 0.0, "warm up": float(script.get("warm_up_s", 0))}
    link.publish_ready(Ready(num_blocks=num_blocks, block_bytes=1, phase_seconds=phases))
    try:
        serve(link, device, script)
    except EngineGone:
        return 0
    except RuntimeError as error:
        link.publish_error(error)
        return 1
    return 0


def serve(link: Link, device: SimulatedDevice, script: dict) -> None:
    link.beat(Phase.WAITING)
    while (step := link.next_step()) is not None:
        link.beat(Phase.RUNNING)
        if step.step_id == script.get("crash_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if "poison" in script and _holds(link, step.view, script["poison"]):
            os.kill(os.getpid(), signal.SIGKILL)
        if step.step_id == script.get("raise_at"):
            raise RuntimeError("scripted fault")
        time.sleep(script.get("step_s", 0))
        output = link.claim_output()
        device.run(step.view, output)
        if "failure" in script:
            output.num_accepted[: output.header[output.NUM_ROWS]] = script["failure"]
        link.publish_step(step, output)
        link.beat(Phase.WAITING)


def _moved(message: Message, seconds: float) -> BlocksMoved:
    assert isinstance(message, MoveBlocks)
    time.sleep(seconds)
    return BlocksMoved(message.transfer_id, seconds)


def _holds(link: Link, view: StepInputView, token: int) -> bool:
    table, rows = link.table, view.rows[: int(view.header[view.NUM_ROWS])].tolist()
    return any(token in table.token_ids[row, : table.num_prompt[row]] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
