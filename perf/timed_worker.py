"""The engine's own worker, with every step's times written down: `python -m perf.timed_worker FD`.

TIMED_WORKER_FILE names the file; its first line of JSON says which device the worker was told to use, each further one
is [rows, tokens, forward us, sampling us, all us] of a published step, as the worker itself measured them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from slipring.workers import main as worker
from slipring.workers.link import Link

STEPS = open(os.environ["TIMED_WORKER_FILE"], "a", buffering=1)  # noqa: SIM115  open as long as the process
_publish, _start = Link.publish_step, worker.start


def publish_step(self: Link, step: Any, output: Any) -> None:
    # Before the slot is given back: from then on the engine may write the next step into it.
    num_rows = int(output.header[output.NUM_ROWS])
    num_tokens = int(step.view.num_tokens[:num_rows].sum())
    times = (output.times_ns[output.FORWARD], output.times_ns[output.SAMPLE], time.monotonic_ns() - step.picked_up_ns)
    _publish(self, step, output)
    STEPS.write(json.dumps([num_rows, num_tokens, *(round(int(x) / 1e3, 1) for x in times)]) + "\n")


def start(config: Any, link: Link) -> Any:
    STEPS.write(json.dumps({"device": config.device, "dtype": config.dtype}) + "\n")
    return _start(config, link)


if __name__ == "__main__":
    Link.publish_step, worker.start = publish_step, start
    sys.exit(worker.main(sys.argv))
