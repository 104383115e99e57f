"""`CudaExecutor`: steps are submitted by the worker's loop and published, in order, by a completion thread.

The loop enqueues step N + 1 while the device runs step N. The completion thread waits for N's last event (without the
interpreter's lock), writes its StepOutput from pinned memory, publishes it and gives the ring slot back; only then may
the scheduler overwrite what the device was still reading. When it fails, the loop's next look at the ring raises what
it raised.

While no step is in flight and none has come for a while, `meanwhile` captures one bucket's graphs. A step that comes
during a capture ends it at the next layer; the bucket is captured another time.
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable

import torch

from slipring.shm.layout import Phase
from slipring.workers.cuda.device import Device
from slipring.workers.cuda.results import Flight
from slipring.workers.cuda.runner import CudaRunner
from slipring.workers.executor import Meanwhile
from slipring.workers.link import Link, Step


class _Interrupted(Exception):
    """A step has come; the capture must go."""


class CudaExecutor:
    """`submit`, `meanwhile` and `close` are for the loop's thread."""

    def __init__(self, link: Link, runner: CudaRunner, device: Device) -> None:
        self.meanwhile: Meanwhile | None = self._capture_next
        self._link, self._runner, self._device = link, runner, device
        self._num_in_flight = 0
        self._state = threading.Lock()
        """Held while `_num_in_flight` and the phase that the engine sees disagree."""
        self._flights: queue.SimpleQueue[tuple[Step, Flight] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._complete, name="completion", daemon=True)
        self._thread.start()

    def submit(self, step: Step) -> None:
        with self._state:
            self._num_in_flight += 1
            self._link.beat(Phase.RUNNING)
        self._flights.put((step, self._runner.submit(step.view)))

    def close(self) -> None:
        self._flights.put(None)
        self._thread.join()
        self._device.close()

    def _complete(self) -> None:
        self._device.activate()
        try:
            while (landing := self._flights.get()) is not None:
                self._publish(*landing)
        except BaseException as error:
            self._link.fail(error)

    def _publish(self, step: Step, flight: Flight) -> None:
        output = self._link.claim_output()
        self._runner.land(flight, output)
        self._link.publish_step(step, output)
        with self._state:
            self._num_in_flight -= 1
            self._link.beat(Phase.RUNNING if self._num_in_flight else Phase.WAITING)

    @torch.inference_mode()
    def _capture_next(self, step_has_come: Callable[[], bool]) -> bool:
        """One bucket. Returns whether any is left."""
        if not (buckets := self._runner.decode.uncaptured()):
            return False
        if self._num_in_flight:
            return True
        self._link.beat(Phase.CAPTURING)
        try:
            self._runner.decode.capture(buckets[0], lambda: self._go_on_unless(step_has_come))
        except _Interrupted:
            return True
        except RuntimeError as error:
            # Slower is better than gone.
            print(f"decode steps of up to {buckets[0]} rows run without graphs: {error}", file=sys.stderr)
            self.meanwhile = None
            return False
        finally:
            self._link.beat(Phase.WAITING)
        return len(self._runner.decode.uncaptured()) > 0

    @staticmethod
    def _go_on_unless(step_has_come: Callable[[], bool]) -> None:
        if step_has_come():
            raise _Interrupted
