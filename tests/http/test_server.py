"""The aiohttp face over real sockets and the double: framing, limits, disconnects and slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from slipring.http.api import Api
from slipring.http.exchange import ApiRequest, ApiResponse
from slipring.http.listeners import BindError, bind, bind_unix, tls_context
from slipring.http.server import HttpServer
from tests.http.calls import CHAT, COMPLETIONS, HELLO, make_api
from tests.http.engine_double import EngineDouble


@contextlib.asynccontextmanager
async def serving_api(engine: EngineDouble, **config: Any) -> AsyncIterator[tuple[Api, int]]:
    sockets = bind("127.0.0.1", 0)
    api = make_api(engine, **config)
    server = HttpServer(api)
    await server.start(sockets)
    try:
        yield api, sockets[0].getsockname()[1]
    finally:
        await server.stop(0.1)


@contextlib.asynccontextmanager
async def serving(engine: EngineDouble, **config: Any) -> AsyncIterator[int]:
    async with serving_api(engine, **config) as (_, port):
        yield port


def on_uvloop(test: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(test(), 120))  # type: ignore[arg-type]


async def until(condition: Callable[[], Any], what: str) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never: {what}")


def raw_post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if not any(line.lower().startswith(("content-length", "transfer-encoding")) for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


async def exchange(port: int, data: bytes, timeout: float = 5) -> bytes:
    """Send, and read until the server closes (or nothing comes any more)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    received = b""
    with contextlib.suppress(asyncio.TimeoutError, ConnectionError):
        while piece := await asyncio.wait_for(reader.read(65536), timeout):
            received += piece
    writer.close()
    return received


JSON = {"Content-Type": "application/json"}
CHAT_BODY = json.dumps({"messages": HELLO, "stream": True}).encode()


def test_a_stream_on_the_wire() -> None:
    async def main() -> None:
        async with serving(EngineDouble()) as port, aiohttp.ClientSession() as client:
            async with client.post(f"http://127.0.0.1:{port}{CHAT}", data=CHAT_BODY, headers=JSON) as response:
                assert response.status == 200
                assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
                assert response.headers["Cache-Control"] == "no-cache"
                assert response.headers["X-Accel-Buffering"] == "no"
                assert response.headers["x-request-id"] and response.headers["Transfer-Encoding"] == "chunked"
                data = await response.read()
            assert data.endswith(b"data: [DONE]\n\n") and data.count(b'"content":"') == 1 + len("Hello!")
            # The connection is kept: a second request goes over it.
            async with client.get(f"http://127.0.0.1:{port}/health") as response:
                assert response.status == 200

    on_uvloop(main)


def test_http_1_0_gets_the_bare_stream_and_a_close() -> None:
    async def main() -> None:
        async with serving(EngineDouble()) as port:
            request = raw_post(CHAT, CHAT_BODY).replace(b"HTTP/1.1", b"HTTP/1.0")
            head, _, body = (await exchange(port, request)).partition(b"\r\n\r\n")
            assert b"chunked" not in head and body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n")

    on_uvloop(main)


def test_head_sends_no_body() -> None:
    async def main() -> None:
        async with serving(EngineDouble()) as port:
            answer = await exchange(port, b"HEAD /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\n")

    on_uvloop(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_takes_its_work_along(stream: bool) -> None:
    async def main() -> None:
        engine = EngineDouble(script=None)
        async with serving(engine) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps({"messages": HELLO, "stream": stream}).encode()
            writer.write(raw_post(CHAT, body))
            await until(lambda: engine.sinks, "submitted")
            if stream:
                engine.say("a")
                await reader.readuntil(b'"content":"a"')
            writer.transport.abort()
            await until(lambda: engine.aborted, "aborted")
            assert engine.sinks == {}

    on_uvloop(main)


@pytest.mark.filterwarnings("error")
def test_a_client_that_has_left_before_its_answer_is_no_failure_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        sockets, api = bind("127.0.0.1", 0), make_api(EngineDouble())
        server, inner = HttpServer(api), api.handle

        async def while_the_connection_closes(asked: ApiRequest) -> ApiResponse:
            response = await inner(asked)
            assert server._protocols is not None
            for connection in server._protocols.connections:
                assert connection.transport is not None
                connection.transport.close()
            return response

        api.handle = while_the_connection_closes  # type: ignore[method-assign]
        await server.start(sockets)
        answer = await exchange(sockets[0].getsockname()[1], b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        await server.stop(0.1)
        assert answer == b"" and not caplog.records

    on_uvloop(main)


def test_a_failure_in_mid_stream_ends_the_connection_after_its_event() -> None:
    async def main() -> None:
        engine = EngineDouble(script=None)
        async with serving(engine) as port:
            reading = asyncio.ensure_future(exchange(port, raw_post(CHAT, CHAT_BODY)))
            await until(lambda: engine.sinks, "submitted")
            await asyncio.sleep(0.05)
            engine.say("a")
            engine.end(reason="error", error="the worker died")
            data = await reading  # the server closed
        assert data.endswith(b"0\r\n\r\n") and b"the worker died" in data
        assert b"[DONE]" not in data and b'"finish_reason":"' not in data

    on_uvloop(main)


def _slow_socket(port: int, data: bytes) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    client.connect(("127.0.0.1", port))
    client.sendall(data)
    return client


def _texts(data: bytes) -> str:
    """The text of a chunked stream of chat events."""
    _, _, rest = data.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    events = [json.loads(block[6:]) for block in body.split(b"\n\n") if block.startswith(b"data: {")]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


def test_a_slow_reader_gets_the_exact_text_in_bounded_memory() -> None:
    async def main() -> None:
        engine = EngineDouble(script=None)
        async with serving(engine, write_buffer_bytes=32 << 10) as port:
            client = await asyncio.to_thread(_slow_socket, port, raw_post(CHAT, CHAT_BODY))
            await until(lambda: engine.sinks, "submitted")
            await asyncio.sleep(0.05)
            said = []
            for i in range(60_000):  # some 11 MB of frames, had each been written
                said.append(f" {i}")
                engine.say(said[-1])
                if i % 5000 == 0:
                    await asyncio.sleep(0)
            engine.end("!")
            client.settimeout(10)

            def drain() -> bytes:
                data = b""
                while not data.endswith(b"0\r\n\r\n"):
                    data += client.recv(1 << 20)
                return data

            data = await asyncio.to_thread(drain)
            client.close()
        assert _texts(data) == "".join(said) + "!"
        assert len(data) < 9_000_000, "most of it was merged"

    on_uvloop(main)


def test_a_client_that_reads_nothing_is_dropped() -> None:
    async def main() -> None:
        engine = EngineDouble(script=None)
        async with serving(engine, write_buffer_bytes=32 << 10, stall_timeout_s=0.3) as port:
            client = await asyncio.to_thread(_slow_socket, port, raw_post(CHAT, CHAT_BODY))
            await until(lambda: engine.sinks, "submitted")
            await asyncio.sleep(0.05)
            while engine.sinks:
                for _ in range(2000):
                    engine.say("x" * 50)
                await asyncio.sleep(0.01)
            assert engine.aborted
            client.close()

    on_uvloop(main)


def test_a_body_over_the_limit_is_413_in_json() -> None:
    async def main() -> None:
        async with serving(EngineDouble(), max_body_bytes=1 << 20) as port, aiohttp.ClientSession() as client:
            url = f"http://127.0.0.1:{port}{CHAT}"

            async def chunked() -> AsyncIterator[bytes]:
                for _ in range(20):
                    yield b" " * (1 << 16)

            bomb = gzip.compress(b" " * (64 << 20))
            for data, headers in (
                (b" " * ((1 << 20) + 1), {}),
                (chunked(), {}),
                (bomb, {"Content-Encoding": "gzip"}),
            ):
                headers = {**JSON, **headers}
                async with client.post(url, data=data, headers=headers) as response:
                    assert response.status == 413
                    assert (await response.json())["error"]["code"] == "body_too_large"
            url = f"http://127.0.0.1:{port}/v1/messages"
            async with client.post(url, data=b" " * ((1 << 20) + 1), headers=JSON) as response:
                assert response.status == 413
                assert (await response.json())["error"]["type"] == "request_too_large"

    on_uvloop(main)


@pytest.mark.parametrize(
    ("encoding", "data", "status"),
    [
        ("gzip", gzip.compress(json.dumps({"messages": HELLO}).encode(), mtime=0), 200),
        ("identity", json.dumps({"messages": HELLO}).encode(), 200),
        ("gzip", gzip.compress(CHAT_BODY, mtime=0)[:-12], 400),
        ("gzip", b"not gzip", 400),
        ("foo", CHAT_BODY, 415),
        ("br", CHAT_BODY, 415),
        ("zstd", CHAT_BODY, 415),
    ],
)
def test_content_encodings(encoding: str, data: bytes, status: int) -> None:
    async def main() -> None:
        async with serving(EngineDouble()) as port:
            answer = await exchange(port, raw_post(CHAT, data, f"Content-Encoding: {encoding}", "Connection: close"))
            head, _, body = answer.partition(b"\r\n\r\n")
            assert int(head.split()[1]) == status, answer
            if status != 200:
                assert json.loads(body)["error"]["message"]

    on_uvloop(main)


def test_the_key_is_checked_before_the_body_is_read() -> None:
    async def main() -> None:
        async with serving(EngineDouble(), api_keys=("K",)) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw_post(CHAT, b"", "Content-Length: 50000000"))
            assert b"401" in await asyncio.wait_for(reader.readline(), 20)
            writer.close()

    on_uvloop(main)


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        + SMUGGLED,
        b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: +5\r\n\r\nhello" + SMUGGLED,
        b"POST /health HTTP/1.1\r\nHost: x\r\nContent-Length: 0x5\r\n\r\nhello",
        b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        b"POST /health HTTP/1.1\r\nHost: x\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\rTransfer-Encoding: chunked\r\n\r\n",
        b"\x16\x03\x01\x02\x00garbage\r\n\r\n",
        b"GET / HTTP/9.9 what\r\n\r\n",
    ],
)
def test_malformed_http_is_400_in_json_and_a_close(data: bytes) -> None:
    async def main() -> None:
        async with serving(EngineDouble()) as port:
            answer = await exchange(port, data, timeout=2)
            assert answer.count(b"HTTP/1.") == 1 and answer.split()[1] == b"400", answer
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"

    on_uvloop(main)


def test_expect_continue_and_absolute_targets() -> None:
    async def main() -> None:
        async with serving(EngineDouble()) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = json.dumps({"prompt": "x"}).encode()
            request = raw_post(COMPLETIONS, body, "Expect: 100-continue")
            writer.write(request[: -len(body)])
            assert await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20) == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body)
            assert b"200 OK" in await asyncio.wait_for(reader.readline(), 20)
            writer.close()
            proxied = b"GET http://x/health?a=b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            assert (await exchange(port, proxied)).startswith(b"HTTP/1.1 200")

    on_uvloop(main)


def test_a_thousand_streams_at_once() -> None:
    async def main() -> None:
        async with serving(EngineDouble()) as port:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as client:

                async def one() -> bool:
                    async with client.post(f"http://127.0.0.1:{port}{CHAT}", data=CHAT_BODY, headers=JSON) as response:
                        return (await response.read()).endswith(b"[DONE]\n\n")

                assert all(await asyncio.gather(*(one() for _ in range(1000))))

    on_uvloop(main)


def test_a_taken_port_names_the_fix() -> None:
    taken = bind("127.0.0.1", 0)[0]
    with pytest.raises(BindError, match=r"--port"):
        bind("127.0.0.1", taken.getsockname()[1])
    taken.close()
    with pytest.raises(BindError, match="--host"):
        bind("no.such.host.invalid", 8000)
    with pytest.raises(BindError):
        bind("192.0.2.1", 8000)


def test_a_body_that_does_not_arrive_is_408_and_a_close() -> None:
    async def main() -> None:
        async with serving(EngineDouble(), stall_timeout_s=0.3) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 1000\r\n\r\n"
            writer.write(head.encode() + b"{")
            answer = await asyncio.wait_for(reader.read(), 5)
            assert answer.startswith(b"HTTP/1.1 408") and b"request_timeout" in answer
            writer.close()

    on_uvloop(main)


def test_a_client_that_does_not_read_a_plain_answer_is_dropped() -> None:
    async def main() -> None:
        engine = EngineDouble(script=None, max_model_len=10_000_000)
        async with serving(engine, write_buffer_bytes=32 << 10, stall_timeout_s=0.3) as port:
            body = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
            client = await asyncio.to_thread(_slow_socket, port, raw_post(CHAT, body))
            await until(lambda: engine.sinks, "submitted")
            engine.say("x" * 20_000_000)
            engine.end()
            await asyncio.sleep(1.5)
            client.settimeout(5)

            def rest() -> int:
                count = 0
                try:
                    while data := client.recv(1 << 20):
                        count += len(data)
                except ConnectionError:
                    pass
                return count

            assert await asyncio.to_thread(rest) < 20_000_000, "it was cut off, not waited for"
            client.close()

    on_uvloop(main)


# Other ways in: TLS and unix sockets.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A self-signed certificate for localhost, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = str(folder / "certificate.pem"), str(folder / "key.pem")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*make, "-out", certificate, "-keyout", key], check=True, capture_output=True)
    return certificate, key


async def over_tls(context: ssl.SSLContext, client_context: ssl.SSLContext) -> bytes:
    sockets = bind("127.0.0.1", 0)
    server = HttpServer(make_api(EngineDouble()))
    await server.start(sockets, context)
    try:
        url = f"https://127.0.0.1:{sockets[0].getsockname()[1]}{CHAT}"
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=client_context)) as client,
            client.post(url, data=CHAT_BODY, headers=JSON) as response,
        ):
            return await response.read()
    finally:
        await server.stop(0.1)


def test_a_stream_over_tls(certificate: tuple[str, str]) -> None:
    async def main() -> None:
        trusting = ssl.create_default_context(cafile=certificate[0])
        data = await over_tls(tls_context(*certificate, None), trusting)
        assert data.endswith(b"data: [DONE]\n\n") and data.count(b'"content":"') == 1 + len("Hello!")

    on_uvloop(main)


def test_clients_must_show_a_certificate_where_authorities_are_named(certificate: tuple[str, str]) -> None:
    async def main() -> None:
        context = tls_context(*certificate, certificate[0])
        trusting = ssl.create_default_context(cafile=certificate[0])
        with pytest.raises((aiohttp.ClientError, ConnectionError)):
            await over_tls(context, trusting)
        trusting.load_cert_chain(*certificate)
        assert (await over_tls(context, trusting)).endswith(b"[DONE]\n\n")

    on_uvloop(main)


def test_plain_http_to_a_tls_port_harms_nobody(certificate: tuple[str, str]) -> None:
    async def main() -> None:
        sockets = bind("127.0.0.1", 0)
        server = HttpServer(make_api(EngineDouble()))
        await server.start(sockets, tls_context(*certificate, None))
        answer = await exchange(sockets[0].getsockname()[1], b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", 2)
        assert b" 200 " not in answer
        await server.stop(0.1)

    on_uvloop(main)


@pytest.mark.parametrize("wrong", ["missing", "not a certificate", "another's key"])
def test_certificates_that_cannot_be_used_are_told(certificate: tuple[str, str], wrong: str, tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    if wrong != "missing":
        other.write_text("nonsense")
    files = (certificate[0], str(other)) if wrong == "another's key" else (str(other), certificate[1])
    with pytest.raises(BindError, match="--ssl-certfile"):
        tls_context(*files, None)
    with pytest.raises(BindError, match="--ssl-ca-certs"):
        tls_context(*certificate, str(other))


def test_over_a_unix_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "s")

    async def main() -> None:
        for _ in range(2):  # the second finds what the first has left
            server = HttpServer(make_api(EngineDouble()))
            await server.start(bind_unix(path))
            with pytest.raises(BindError, match="--uds"):
                bind_unix(path)
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(path)) as client,
                client.post(f"http://localhost{CHAT}", data=CHAT_BODY, headers=JSON) as response,
            ):
                assert (await response.read()).endswith(b"[DONE]\n\n")
            await server.stop(0.1)

    on_uvloop(main)


def test_a_file_that_is_no_socket_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("mine")
    with pytest.raises(BindError):
        bind_unix(str(tmp_path / "s"))
    assert (tmp_path / "s").read_text() == "mine"


@pytest.mark.parametrize("request_line", [b"GET / HTTP/9.9", b"G\x00T / HTTP/1.1", b"GET", b"GET /\x01 HTTP/1.1"])
def test_what_is_no_http_gets_our_error_and_our_name(request_line: bytes) -> None:
    async def main() -> None:
        async with serving(EngineDouble()) as port:
            answer = await exchange(port, request_line + b"\r\nHost: x\r\n\r\n")
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.split(b" ")[1] == b"400" and b"Server: slipring" in head and b"aiohttp" not in answer
            assert json.loads(body)["error"]["type"] == "invalid_request_error"

    on_uvloop(main)
