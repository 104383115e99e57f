"""The worker process: `python -m slipring.workers.main FD`, a straight loop of wait, read, run, publish.

FD is an inherited descriptor that holds the msgpack `WorkerConfig`, read to its end. Everything that can be refused
is refused before torch is imported. The process dies with its engine: the kernel's parent-death signal first (set
before anything else, then the parent is compared, since it may have died before), the lifeline pipe as a backstop.
SIGINT is ignored, so that Ctrl-C in a terminal lets the engine drain.

Exit codes: 0 after SHUTDOWN or when the engine is gone, 1 after an ERROR record, 2 when started wrongly.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from typing import TYPE_CHECKING

from slipring.shm import spec as worker_spec
from slipring.shm.layout import Phase
from slipring.shm.spec import WorkerConfig
from slipring.workers.link import EngineGone, Link

if TYPE_CHECKING:
    from slipring.workers.runner import Runner

_PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if len(argv) != 2 or not argv[1].isdigit():
        print("usage: python -m slipring.workers.main FD   (the engine starts this)", file=sys.stderr)
        return 2
    with os.fdopen(int(argv[1]), "rb") as file:
        config = worker_spec.decode(file.read())
    if os.getppid() != config.parent_pid:
        return 0
    link = Link(config)
    try:
        serve(link, start(config, link))
    except EngineGone:
        return 0
    except BaseException as error:
        traceback.print_exc()
        link.publish_error(error)
        return 1
    return 0


def start(config: WorkerConfig, link: Link) -> Runner:
    """Import torch, load the model, make the pool, warm up, and say READY."""
    # The first import of torch in this process, 1.8 s: the engine sees STARTING and then LOADING meanwhile.
    from slipring.workers.startup import build_runner

    return build_runner(config, link)


def serve(link: Link, runner: Runner) -> None:
    """Run steps until SHUTDOWN. A step's slot is given back only after its output is published."""
    while (step := link.next_step()) is not None:
        link.beat(Phase.RUNNING)
        output = link.claim_output()
        runner.run(step.view, output)
        link.publish_step(step, output)
        link.beat(Phase.WAITING)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
