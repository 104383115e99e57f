"""`Executor`: how picked-up steps become published outputs. The seam between the worker's loop and its device.

The CPU's is `InlineExecutor`: a step is run and published before the next one is looked at. A GPU's enqueues a step
and publishes it from a completion thread (`cuda/executor.py`). Either way outputs are published in step order, and a
step's slot is given back only after its output is published.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from slipring.shm.layout import Phase
from slipring.workers.link import Link, Step

if TYPE_CHECKING:
    from slipring.workers.runner import Runner

Meanwhile = Callable[[Callable[[], bool]], bool]
"""A piece of work for an idle worker. Its argument says when a step has come and the piece must be dropped; it
returns whether there is more to do later."""


class Executor(Protocol):
    meanwhile: Meanwhile | None
    """None: nothing to do while no step is there."""

    def submit(self, step: Step) -> None:
        """Run the step, or see to it that it runs; returns when the next one may be taken."""
        ...

    def close(self) -> None:
        """Publish what is in flight, then let go of the device."""
        ...


class InlineExecutor:
    """Run, publish, return."""

    meanwhile: Meanwhile | None = None

    def __init__(self, link: Link, runner: Runner) -> None:
        self._link = link
        self._runner = runner

    def submit(self, step: Step) -> None:
        self._link.beat(Phase.RUNNING)
        output = self._link.claim_output()
        self._runner.run(step.view, output)
        self._link.publish_step(step, output)
        self._link.beat(Phase.WAITING)

    def close(self) -> None:
        """Nothing is ever in flight."""
