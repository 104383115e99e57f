"""An engine with tiers in a process of its own, that kills itself (SIGKILL) at one exact point.

    python -m tests.e2e.tier_child '{"settings": {...}, "prompts": [[...]], "die": "page" | "store" | null}'

It computes the prompts, waits until the tiers have them, prints READY, and serves until its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import Any

import uvloop

from slipring.runtime.tiers import file_store, peer
from tests.e2e.tier_rig import ask, finished, started
from tests.waits import settled

_PAGES_BEFORE = 5
_HEADER_BYTES = 200
"""No page is as short as what comes before it."""


def die_while_a_page_is_sent() -> None:
    """The sixth page that a peer asks for: half of it, then nothing any more."""
    give, given = peer.PeerServer._give, 0

    async def half(self: peer.PeerServer, key: Any, writer: asyncio.StreamWriter) -> None:
        nonlocal given
        given += 1
        if given <= _PAGES_BEFORE:
            await give(self, key, writer)
            return
        write = writer.write
        writer.write = lambda data: write(data if len(data) < _HEADER_BYTES else bytes(data)[: len(data) // 2])
        await give(self, key, writer)
        await writer.drain()
        os.kill(os.getpid(), signal.SIGKILL)

    peer.PeerServer._give = half  # type: ignore[method-assign]


def die_while_a_file_is_written() -> None:
    """The sixth page: half of its bytes, and the process is gone with the lock on its temporary file."""
    write, written = file_store._write_fully, 0

    def half(fd: int, buffers: list[memoryview]) -> None:
        nonlocal written
        written += 1
        if written <= _PAGES_BEFORE:
            write(fd, buffers)
            return
        write(fd, [buffers[0], buffers[1][: buffers[1].nbytes // 2]])
        os.kill(os.getpid(), signal.SIGKILL)

    file_store._write_fully = half


DEATHS = {"page": die_while_a_page_is_sent, "store": die_while_a_file_is_written, None: lambda: None}


async def main(settings: dict[str, Any], prompts: list[list[int]], die: str | None) -> None:
    DEATHS[die]()
    engine = await started(**settings)
    try:
        for number, prompt in enumerate(prompts):
            await finished(ask(engine, f"prompt-{number}", prompt, 1))
        await settled(engine)
        print("READY", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await engine.stop()


if __name__ == "__main__":
    uvloop.run(main(**json.loads(sys.argv[1])))
