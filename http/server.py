"""The aiohttp face: carries `ApiRequest`s to the API and its answers to sockets.

A streamed answer is written by the engine's own call: `_ChunkWriter` puts each frame, already in chunked framing,
straight into the transport (uvloop gathers what one loop turn wrote into one system call). The handler's task sleeps
until the stream ends or the client stops reading. "Stops reading" is the transport's own mark: more than
`write_buffer_bytes` unsent. Then the stream merges, the task waits for room, and a client that takes nothing for
`stall_timeout_s` is dropped.

A client that goes away cancels its handler (`handler_cancellation`), streaming or not, and with it the work.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import urlsplit

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import ContentEncodingError

from slipring.http.api import Api
from slipring.http.config import ServerConfig
from slipring.http.errors import ApiError, bad_request, internal_error
from slipring.http.exchange import ApiRequest, ApiResponse
from slipring.http.listeners import BACKLOG
from slipring.http.stream import FrameStream

logger = logging.getLogger(__name__)

_SERVER = "slipring"
_LINGER_S = 2.0
"""After an answer that came before the whole body: how long the rest is still read, so that the answer arrives."""
_DECODED = ("", "identity", "gzip", "deflate")
"""Content encodings that aiohttp undoes; it would pass others through as they are."""


class HttpServer:
    def __init__(self, api: Api) -> None:
        self._api = api
        self._config = api.config
        self._protocols: _Server | None = None
        self._listeners: list[asyncio.Server] = []

    async def start(self, sockets: list[socket.socket], tls: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._protocols = _Server(
            self._handle,
            self._config.max_body_bytes,
            self._config.write_buffer_bytes,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=self._config.keep_alive_timeout_s,
            lingering_time=_LINGER_S,
            logger=logger,
        )
        for listener in sockets:
            listen = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
            self._listeners.append(await listen(self._protocols, sock=listener, backlog=BACKLOG, ssl=tls))

    async def stop(self, timeout_s: float) -> None:
        """Close the listeners; answers still being written have `timeout_s` before their connections are cut."""
        for listener in self._listeners:
            listener.close()
        if self._protocols is not None:
            self._protocols.pre_shutdown()
            await self._protocols.shutdown(timeout_s)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        asked, response = _api_request(request, self._config), None
        try:
            response = await self._api.handle(asked)
            return await self._send(request, response)
        finally:
            self._api.ended(asked, response)

    async def _send(self, request: web.BaseRequest, response: ApiResponse) -> web.StreamResponse:
        response.headers["Server"] = _SERVER
        if isinstance(response.body, FrameStream):
            return await self._stream(request, response, response.body)
        reply = web.Response(status=response.status, body=response.body, headers=response.headers)
        if self._api.draining or response.status in (408, 413):
            reply.force_close()
        await reply.prepare(request)
        await self._while_it_reads(request, reply.write_eof)
        return reply

    async def _stream(self, request: web.BaseRequest, response: ApiResponse, stream: FrameStream) -> web.StreamResponse:
        reply = web.StreamResponse(status=response.status, headers=response.headers)
        chunked = request.version >= HttpVersion11
        if chunked:
            reply.enable_chunked_encoding()
        else:
            reply.force_close()
        try:
            await reply.prepare(request)
            await self._pump(request, stream, chunked)
        finally:
            stream.cancel()  # does nothing when the stream has ended
        if stream.failed or self._api.draining:
            reply.force_close()
        await self._make_room(request)
        await reply.write_eof()
        return reply

    async def _pump(self, request: web.BaseRequest, stream: FrameStream, chunked: bool) -> None:
        stream.attach(_ChunkWriter(request, chunked))
        while True:
            await stream.wait()
            if stream.ended:
                return
            await self._make_room(request)
            stream.resume()

    async def _make_room(self, request: web.BaseRequest) -> None:
        """Wait until the client has read enough. Raises ConnectionResetError when it has gone, or reads nothing."""
        _open_transport(request)
        if not request.protocol.writing_paused:
            return
        await self._while_it_reads(request, request.writer.drain)

    async def _while_it_reads(self, request: web.BaseRequest, write: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Await `write` for as long as the client takes something. Raises ConnectionResetError when it does not."""
        transport = _open_transport(request)
        task = asyncio.ensure_future(write())
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        while True:
            unsent = transport.get_write_buffer_size()
            # Not wait_for: cancelling a drain would leave aiohttp with a dead waiter for the next one.
            done, _ = await asyncio.wait({task}, timeout=self._config.stall_timeout_s)
            if done:
                task.result()
                return
            if transport.get_write_buffer_size() >= unsent > 0:
                transport.abort()
                raise ConnectionResetError(f"the client read nothing for {self._config.stall_timeout_s:g} s")


class _ChunkWriter:
    """Called by the engine's sink with frames; False when the client should be waited for."""

    __slots__ = ("_chunked", "_protocol", "_transport")

    def __init__(self, request: web.BaseRequest, chunked: bool) -> None:
        self._transport = _open_transport(request)
        self._protocol = request.protocol
        self._chunked = chunked

    def __call__(self, frames: bytes) -> bool:
        transport = self._transport
        if transport.is_closing():
            return False  # nobody is there to read: the handler is about to be cancelled
        transport.write(b"%x\r\n%b\r\n" % (len(frames), frames) if self._chunked else frames)
        return not self._protocol.writing_paused


class _Server(web.Server):
    """Makes connections whose limits and error bodies are ours."""

    def __init__(self, handler: Any, max_body_bytes: int, write_buffer_bytes: int, **kwargs: Any) -> None:
        super().__init__(handler, request_factory=self._request, **kwargs)
        self._max_body_bytes = max_body_bytes
        self.write_buffer_bytes = write_buffer_bytes

    def __call__(self) -> _Connection:
        return _Connection(self, loop=self._loop, **self._kwargs)

    def _request(self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        limit = self._max_body_bytes
        return web.BaseRequest(message, payload, protocol, writer, task, self._loop, client_max_size=limit)


class _Connection(web.RequestHandler):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if isinstance(self._manager, _Server) and self.transport is not None:
            high = self._manager.write_buffer_bytes
            self.transport.set_write_buffer_limits(high=high, low=high // 4)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What never reached the API: HTTP that cannot be parsed (4xx), and bugs of this file (5xx)."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client has gone: aiohttp lets the connection end
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has already begun")
        if status >= 500:
            logger.error("%s failed", request.method, exc_info=exc)
        if status >= 500:
            error = internal_error()
        elif isinstance(exc, ContentEncodingError):
            error = _wrong_encoding()  # one that the parser knows and has no library for
        else:
            error = ApiError(status, "The request is not valid HTTP.")
        status, answer = error.status, error.response()
        assert isinstance(answer.body, bytes)
        reply = web.Response(status=status, body=answer.body, headers={**answer.headers, "Server": _SERVER})
        reply.force_close()
        return reply


def _api_request(request: web.BaseRequest, config: ServerConfig) -> ApiRequest:
    target = request.raw_path
    if not target.startswith("/") and "://" in target:  # absolute form, as sent to proxies
        parts = urlsplit(target)
        target = f"{parts.path or '/'}?{parts.query}"
    path, _, query = target.partition("?")
    reader = functools.partial(_read_body, request, config)
    return ApiRequest(request.method, path, request.headers, query=query, reader=reader)


def _wrong_encoding() -> ApiError:
    return ApiError(415, "The Content-Encoding must be gzip, deflate or none.", code="unsupported_media_type")


async def _read_body(request: web.BaseRequest, config: ServerConfig) -> bytes:
    """The decoded body. Raises ApiError."""
    encoding = request.headers.get("content-encoding", "").strip().lower()
    if encoding not in _DECODED:
        raise _wrong_encoding()
    too_large = ApiError(413, f"The body is larger than {config.max_body_bytes} bytes.", code="body_too_large")
    if (request.content_length or 0) > config.max_body_bytes:
        raise too_large
    if request.headers.get("expect", "").lower() == "100-continue":
        _open_transport(request).write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = bytearray()
    try:
        while data := await asyncio.wait_for(request.content.readany(), config.stall_timeout_s):
            body += data
            if len(body) > config.max_body_bytes:
                raise too_large
        return bytes(body)
    except TimeoutError:
        raise ApiError(408, "The body did not arrive in time.", code="request_timeout") from None
    except web.RequestPayloadError as error:
        logger.debug("a body that cannot be read: %s", error)
        what = (
            f"it is not valid {encoding}"
            if encoding not in ("", "identity")
            else "it broke off, or its framing is wrong"
        )
        raise bad_request(f"The body cannot be read: {what}.", code="invalid_body") from None


def _open_transport(request: web.BaseRequest) -> asyncio.Transport:
    """Raises ConnectionResetError when the client has gone."""
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the client has gone")
    return transport
