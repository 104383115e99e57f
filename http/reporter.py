"""`Reporter`: hands the records of ended requests, in batches, to a thread that writes them out (its sink).

The loop only appends to a list; a batch goes over when the list has waited a moment. The thread formats, writes and
exports, and may block for as long as it likes: what it cannot keep up with is dropped and counted, never held.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence

from slipring.http.record import Record

logger = logging.getLogger(__name__)

Sink = Callable[[Sequence[Record]], None]
"""Called on the reporter's thread with one or more records. What it raises is logged."""

_DELAY_S = 0.1
_MAX_BATCH = 512
_MAX_QUEUED = 64


class Reporter:
    def __init__(self, sink: Sink) -> None:
        self.num_dropped = 0
        self._sink = sink
        self._open: list[Record] = []
        self._timer: asyncio.TimerHandle | None = None
        self._batches: queue.Queue[list[Record] | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._run, name="slipring-reporter", daemon=True)
        self._thread.start()

    def add(self, record: Record) -> None:
        """Called on the loop."""
        self._open.append(record)
        if len(self._open) >= _MAX_BATCH:
            self._hand_over()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_DELAY_S, self._hand_over)

    def close(self, timeout_s: float) -> None:
        """Write out what there is; at most so long."""
        self._hand_over()
        with contextlib.suppress(queue.Full):
            self._batches.put_nowait(None)
        self._thread.join(timeout_s)

    def _hand_over(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch, self._open = self._open, []
        if not batch:
            return
        try:
            self._batches.put_nowait(batch)
        except queue.Full:
            self.num_dropped += len(batch)

    def _run(self) -> None:
        while (batch := self._batches.get()) is not None:
            try:
                self._sink(batch)
            except Exception:
                logger.exception("requests could not be reported")
