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
from slipring.shm.spec import WorkerConfig
from slipring.workers.link import EngineGone, Link, StartRefused

if TYPE_CHECKING:
    from slipring.workers.executor import Executor

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
    except StartRefused as error:
        link.publish_error(error)
        return 1
    except BaseException as error:
        traceback.print_exc()
        link.publish_error(error)
        return 1
    return 0


def start(config: WorkerConfig, link: Link) -> Executor:
    """Import torch, load the model, make the pool, warm up, and say READY."""
    # The first import of torch in this process, 1.8 s: the engine sees STARTING and then LOADING meanwhile.
    from slipring.workers.startup import build_executor

    return build_executor(config, link)


def serve(link: Link, executor: Executor) -> None:
    """Run steps until SHUTDOWN. A step's slot is given back only after its output is published."""
    try:
        while (step := link.next_step(executor.meanwhile)) is not None:
            executor.submit(step)
    finally:
        executor.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv))
