"""What is in /dev/shm, while other processes of this and other programs come and go."""

from __future__ import annotations

import os
import time


def names() -> set[str]:
    """Of our segments. Each has a name for a moment only, until it is mapped."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("slipring-")}


def assert_nothing_new(before: set[str]) -> None:
    deadline = time.monotonic() + 2
    while left := names() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.001)
