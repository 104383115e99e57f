"""The composition root of `slipring serve`: port, engine and server, and how they live and end together.

    bind → answer 503 "starting" → load the model → serve → SIGTERM: drain, exit 0
                                                          → engine dead: 503 "dead" for a moment, exit 1

The port is taken before the model is touched, so a port in use is told at once. Everything here runs on one uvloop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Coroutine, Sequence
from typing import Any

import uvloop

from slipring.http.access_log import AccessLog
from slipring.http.api import Api
from slipring.http.config import ServerConfig
from slipring.http.console import Console
from slipring.http.listeners import BindError, bind, bind_unix, tls_context
from slipring.http.reporter import Reporter, Sink
from slipring.http.server import HttpServer
from slipring.http.tracing import SpanExporter, TracingError
from slipring.runtime.config import EngineConfig
from slipring.runtime.engine import ConfigError, Engine, ModelError, StartupError

DEAD_NOTICE_S = 1.2
"""How long /health says `dead`, so that probes see it, before the process ends."""
FLUSH_S = 1.0
"""What answers have, once everything is decided, to reach their clients."""
_SWITCH_INTERVAL_S = 0.0005
SHUTTING_DOWN = "The server is shutting down."


def run(engine_config: EngineConfig, server_config: ServerConfig) -> int:
    """Serve until told to stop, then end the process. Returns an exit status only when it never served."""
    raise_descriptor_limit()
    try:
        tls = tls_of(server_config)
        uds = server_config.uds
        sockets = bind_unix(uds) if uds else bind(server_config.host, server_config.port)
        sinks = sinks_of(server_config)
    except (BindError, TracingError) as error:
        return _complain(str(error))
    # Threads that tokenize long texts must give the interpreter back to the loop soon (the default is 5 ms).
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        service = Service(engine_config, server_config, sockets, tls, sinks)
        status = runner.run(service.run())
        service.close()
        # Not by returning: threads that still tokenize a long text would hold up the exit.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def tls_of(config: ServerConfig) -> ssl.SSLContext | None:
    """Raises BindError."""
    if config.ssl_certfile is None:
        return None
    return tls_context(config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs)


def sinks_of(config: ServerConfig) -> list[Sink]:
    """Who is told of requests that have ended. Raises TracingError."""
    sinks: list[Sink] = [AccessLog()] if config.access_log else []
    if config.otlp_traces_endpoint is not None:
        sinks.append(SpanExporter(config.otlp_traces_endpoint, config.otlp_traces_ratio))
    return sinks


def raise_descriptor_limit() -> None:
    """Every connection is a file descriptor: take as many as we may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Service:
    """One life of the server."""

    def __init__(
        self,
        engine_config: EngineConfig,
        config: ServerConfig,
        sockets: list[socket.socket],
        tls: ssl.SSLContext | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self._engine_config = engine_config
        self._config = config
        self._sockets = sockets
        self._console = Console()
        self._tls = tls
        self._api = Api(config)
        self._api.reporters = tuple(map(Reporter, sinks))
        self._server = HttpServer(self._api)
        self._signal: asyncio.Future[int]

    async def run(self) -> int:
        self._listen_for_signals()
        await self._server.start(self._sockets, self._tls)
        self._console.line(f"Loading {self._engine_config.model}")
        try:
            engine = await self._unless_signalled(self._load())
        except (ModelError, ConfigError, StartupError) as error:
            await self._server.stop(0.1)
            return _complain(str(error))
        if engine is None:
            await self._server.stop(0.1)
            return 128 + self._signal.result()
        self._api.serve(engine)
        engine.collect_when_idle()
        self._console.banner(self._config, self._port(), engine.chat_template is not None)
        reason = await self._unless_signalled(engine.wait_dead())
        return await (self._drain(engine) if reason is None else self._die(engine, reason))

    def _port(self) -> int:
        address = self._sockets[0].getsockname()
        return address[1] if isinstance(address, tuple) else 0

    def close(self) -> None:
        """The loop has ended: write out what is still to be told, and leave no socket file."""
        for reporter in self._api.reporters:
            reporter.close(FLUSH_S)
        if self._config.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._config.uds)

    async def _load(self) -> Engine:
        engine = await asyncio.to_thread(Engine, self._engine_config)
        try:
            await engine.start(self._console.on_startup)
        except BaseException:
            await engine.stop()
            raise
        return engine

    async def _drain(self, engine: Engine) -> int:
        """SIGTERM or Ctrl-C: what is in flight may finish, nothing new is taken."""
        self._api.draining = True
        deadline = asyncio.get_running_loop().time() + self._config.shutdown_timeout_s
        num_open = len(self._api.flights)
        if num_open:
            timeout = self._config.shutdown_timeout_s
            self._console.line(f"Shutting down: {num_open} answers have up to {timeout:g} s. Ctrl-C again to stop now.")
        await engine.drain(self._config.shutdown_timeout_s)
        self._api.flights.fail_all(SHUTTING_DOWN)
        # Who reads slowly, but reads, has the rest of the time to get what is written already.
        await self._server.stop(max(FLUSH_S, deadline - asyncio.get_running_loop().time()))
        await engine.stop()
        self._console.line("Stopped.")
        return 0

    async def _die(self, engine: Engine, reason: str) -> int:
        """Streams have had their error frames. Probes get to see `dead`; then everything is cut."""
        await asyncio.sleep(DEAD_NOTICE_S)
        await self._server.stop(0.1)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(engine.stop(), 0.3)
        last = "\n".join(engine.worker_last_lines)
        return _complain(f"{reason}\n{last}".rstrip())

    def _listen_for_signals(self) -> None:
        loop = asyncio.get_running_loop()
        self._signal = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if not self._signal.done():
            self._signal.set_result(number)
        else:
            os._exit(128 + number)  # asked twice; workers notice that their parent is gone

    async def _unless_signalled(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, or None when a signal came first (then it is cancelled)."""
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, self._signal}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return None


def _complain(message: str) -> int:
    print(f"slipring: {message}", file=sys.stderr, flush=True)
    return 1
