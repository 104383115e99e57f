"""What a person sees while the server starts, and when it ends: one clear line per phase, then a banner.

On a terminal the loading of weights is a bar that is redrawn in place; elsewhere it is one plain line.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from typing import TYPE_CHECKING, TextIO

from slipring.http.config import ServerConfig
from slipring.http.served import VERSION

if TYPE_CHECKING:
    from slipring.runtime.engine import StartupEvent

_BAR_WIDTH = 30


class Console:
    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._tty = self._out.isatty()
        self._began = time.monotonic()
        self._open_phase: str | None = None
        """The phase whose progress is on the current line (terminal) or was announced (plain)."""

    def line(self, text: str) -> None:
        self._clear_bar()
        print(text, file=self._out, flush=True)

    def on_startup(self, event: StartupEvent) -> None:
        """The engine's `on_event`."""
        if event.note is not None:
            self.line(f"  Note: {event.note}")
        elif event.final:
            self.line(f"  {event.phase:<14} {event.seconds:6.2f} s")
            self._open_phase = None
        elif self._tty:
            self._open_phase = event.phase
            print(f"\r  {event.phase:<14} {_bar(event.done, event.total)}", end="", file=self._out, flush=True)
        elif self._open_phase != event.phase:
            self._open_phase = event.phase
            print(f"  {event.phase}: {event.total / 2**20:.0f} MiB ...", file=self._out, flush=True)

    def banner(self, config: ServerConfig, port: int, can_chat: bool) -> None:
        url = base_url(config, port)
        where = f"{url}/v1" if config.uds is None else f"unix socket {config.uds}"
        seconds = time.monotonic() - self._began
        self.line(f"\nSlipring {VERSION} serves {', '.join(config.served_model_names)} at {where} ({seconds:.1f} s)\n")
        self.line(f"  {_curl(config, url, can_chat)}\n")
        if config.api_keys:
            self.line("  (YOUR_KEY stands for a key given with --api-key)\n")

    def _clear_bar(self) -> None:
        if self._tty and self._open_phase is not None:
            print("\r\x1b[K", end="", file=self._out)


def base_url(config: ServerConfig, port: int) -> str:
    """Where a client on this machine reaches the server."""
    scheme = "http" if config.ssl_certfile is None else "https"
    if config.uds is not None:
        return f"{scheme}://localhost"
    host = config.host
    reachable = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    if ":" in reachable and not reachable.startswith("["):
        reachable = f"[{reachable}]"
    return f"{scheme}://{reachable}:{port}"


def _bar(done: int, total: int) -> str:
    share = min(1.0, done / total) if total else 0.0
    filled = round(share * _BAR_WIDTH)
    return f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {share:4.0%} of {total / 2**20:.0f} MiB"


def _curl(config: ServerConfig, url: str, can_chat: bool) -> str:
    """A command that can be pasted into a shell as it stands."""
    ask = "Write one sentence about the ocean."
    body: dict[str, object] = {"model": config.served_model_names[0]}
    if can_chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": ask}]
    else:
        path, body["prompt"] = "completions", ask
    key = " -H 'Authorization: Bearer YOUR_KEY'" if config.api_keys else ""
    socket = f"--unix-socket {shlex.quote(config.uds)} " if config.uds else ""
    trust = "" if config.ssl_certfile is None else f"--cacert {shlex.quote(config.ssl_certfile)} "
    return (
        f"curl {socket}{trust}{url}/v1/{path} -H 'Content-Type: application/json'{key} "
        f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    )
