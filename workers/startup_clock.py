"""`PhaseClock`: how long each phase of a worker's start takes."""

from __future__ import annotations

import os
import time


class PhaseClock:
    """Seconds of each start-up phase, in order. The first one began when the process did."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"import": _process_age_s()}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now


def _process_age_s() -> float:
    """Seconds since this process was started."""
    with open("/proc/self/stat") as file:
        started_ticks = int(file.read().rsplit(")", 1)[1].split()[19])
    with open("/proc/uptime") as file:
        uptime = float(file.read().split()[0])
    return max(0.0, uptime - started_ticks / os.sysconf("SC_CLK_TCK"))
