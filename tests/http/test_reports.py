"""What is told of a request after its end: the access log's line and the trace's span, through a real server."""

from __future__ import annotations

import asyncio
import io
import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from slipring.http.access_log import AccessLog, line
from slipring.http.record import Record
from slipring.http.reporter import Reporter
from slipring.http.tracing import SpanExporter
from slipring.runtime.engine import HealthState
from tests.http.calls import CHAT, COMPLETIONS, HELLO
from tests.http.engine_double import EngineDouble
from tests.http.test_server import on_uvloop, raw_post, serving_api, until
from tests.serving import Server

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{sampled}"


def record(**fields: Any) -> Record:
    known: dict[str, Any] = {
        "request_id": "r1", "method": "GET", "path": "/v1/models", "route": "/v1/models", "operation": None,
        "status": 200, "failed": False, "began_ns": 1_700_000_000_250_000_000, "began": 1.0, "ended": 1.5,
        "traceparent": "", "work": None,
    }  # fmt: skip
    return Record(**{**known, **fields})


def told(talk: Callable[[int], Any], count: int, **config: Any) -> list[Record]:
    """The records of what `talk` (given a port) does to a server over the double."""
    records: list[Record] = []

    async def main() -> None:
        async with serving_api(EngineDouble(), **config) as (api, port):
            reporter = Reporter(records.extend)
            api.reporters = (reporter,)
            await talk(port)
            await until(lambda: len(records) >= count, "told")
            reporter.close(1)

    on_uvloop(main)
    return records


def test_a_stream_is_told_with_its_tokens() -> None:
    async def talk(port: int) -> None:
        body = {"messages": HELLO, "stream": True, "n": 2}
        headers = {"x-request-id": "mine", "traceparent": PARENT.format(sampled="01")}
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"http://127.0.0.1:{port}{CHAT}", json=body, headers=headers) as response,
        ):
            await response.read()

    (found,) = told(talk, 1)
    assert (found.request_id, found.route, found.status, found.operation) == ("mine", CHAT, 200, "chat")
    assert found.work is not None and found.work.usage.num_generated == 12 and not found.failed
    assert found.work.usage.finish_reasons == ["stop", "stop"] and found.ended >= found.began
    assert "id=mine" in line(found) and "tokens=" in line(found) and line(found).endswith(" stop")


def test_who_leaves_is_told_as_such() -> None:
    async def talk(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        body = json.dumps({"messages": HELLO, "stream": True}).encode()
        writer.write(raw_post(CHAT, body + b" " * 9, f"Content-Length: {len(body) + 99}"))  # and never the rest
        await writer.drain()
        await asyncio.sleep(0.1)
        writer.close()

    (found,) = told(talk, 1)
    assert found.status == 499 and found.work is None


def test_refusals_are_told() -> None:
    async def talk(port: int) -> None:
        async with aiohttp.ClientSession() as client:
            await client.post(f"http://127.0.0.1:{port}{COMPLETIONS}", json={"prompt": "x", "n": 0})
            await client.get(f"http://127.0.0.1:{port}/nowhere")

    refused, lost = told(talk, 2)
    assert (refused.status, refused.route) == (400, COMPLETIONS) and (lost.status, lost.route) == (404, "unmatched")


def test_a_line_of_the_access_log() -> None:
    out = io.StringIO()
    AccessLog(out)([record(), record(route="/health"), record(route="/health", status=503, failed=True)])
    first, second = out.getvalue().splitlines()
    assert first == "2023-11-14T22:13:20.250Z 200 GET /v1/models id=r1 duration=0.500s"
    assert " 503 " in second and second.endswith("failed")


def test_probes_while_the_server_starts_are_no_failures() -> None:
    records: list[Record] = []

    async def main() -> None:
        engine = EngineDouble()
        engine.state = HealthState.STARTING
        async with serving_api(engine) as (api, port), aiohttp.ClientSession() as client:
            api.reporters = (Reporter(records.extend),)
            for path in ("/health", "/v1/models"):
                async with client.get(f"http://127.0.0.1:{port}{path}") as response:
                    assert response.status in (200, 503)
            await until(lambda: len(records) == 2, "both are told")

    on_uvloop(main)
    out = io.StringIO()
    AccessLog(out)(records)
    probe = next(found for found in records if found.route == "/health")
    assert (probe.status, probe.failed) == (503, False) and "/health" not in out.getvalue()


def test_no_client_can_forge_a_line() -> None:
    forged = line(record(method="GE\x1bT", path="/a\r\n200 é" + "x" * 10_000))
    assert re.fullmatch(r"[ -~]{1,400}", forged)


def test_a_sink_that_hangs_or_fails_costs_nothing() -> None:
    gate = threading.Event()

    def sink(batch: Sequence[Record]) -> None:
        gate.wait(200)
        raise RuntimeError("never mind")

    async def main() -> None:
        reporter = Reporter(sink)
        began = time.monotonic()
        for _ in range(512 * 80):
            reporter.add(record())
        assert reporter.num_dropped > 0 and time.monotonic() - began < 100
        gate.set()
        reporter.close(5)

    asyncio.run(main())


# Traces: a collector that understands the real protocol.


class Collector(ThreadingHTTPServer):
    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[Any] = []
        self.paths: list[str] = []
        super().__init__(("127.0.0.1", 0), _Receive)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Receive(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"]))
        found = ExportTraceServiceRequest.FromString(data)
        self.server.paths.append(self.path)
        for group in found.resource_spans:
            self.server.resources.append(_values(group.resource.attributes))
            for scope in group.scope_spans:
                self.server.spans += scope.spans
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        return


def _values(attributes: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(item) for item in found.values] if kind == "array_value" else found

    return {attribute.key: plain(attribute.value) for attribute in attributes}


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.shutdown()
    found.server_close()


def test_a_span_for_each_request(collector: Collector, small_model: str) -> None:
    """Through a real server: what the span says is what the answer said."""
    body = {"prompt": "Say something:", "max_tokens": 4, "temperature": 0.5, "seed": 3, "stop": ["zzz"], "n": 2}
    named = {"OTEL_SERVICE_NAME": "here"}
    flags = ("--otlp-traces-endpoint", collector.url, "--served-model-name", "m", "--cpu-threads", "1")
    with Server(*flags, model=small_model, environment=named) as server:
        answer = server.post("/v1/completions", body)
        server.get("/v1/models")
        server.get("/health")
        _until(lambda: collector.spans)
    (span,) = collector.spans
    found = _values(span.attributes)
    assert span.name == "text_completion m" and span.kind == 2
    assert found["gen_ai.operation.name"] == "text_completion" and found["gen_ai.response.id"] == answer["id"]
    assert found["gen_ai.usage.input_tokens"] == answer["usage"]["prompt_tokens"]
    assert found["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    reasons = sorted(choice["finish_reason"] for choice in answer["choices"])
    assert sorted(found["gen_ai.response.finish_reasons"]) == reasons
    assert (found["gen_ai.request.temperature"], found["gen_ai.request.seed"]) == (0.5, 3)
    assert (found["gen_ai.request.choice.count"], found["gen_ai.request.stop_sequences"]) == (2, ["zzz"])
    parts = [found[f"gen_ai.latency.{part}"] for part in ("time_in_queue", "time_in_model_inference")]
    assert all(part >= 0 for part in parts) and sum(parts) <= found["gen_ai.latency.e2e"]
    assert 0 < found["gen_ai.response.time_to_first_chunk"] <= found["gen_ai.latency.e2e"]
    length = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert length == pytest.approx(found["gen_ai.latency.e2e"], abs=1e-3)
    assert collector.paths == ["/v1/traces"] and collector.resources[0]["service.name"] == "here"


def _until(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_caller_decides_parent_and_sampling(collector: Collector) -> None:
    export = SpanExporter(collector.url, ratio=0.0)
    export([record(operation="chat"), record(operation="chat", traceparent=PARENT.format(sampled="01"))])
    (span,) = collector.spans
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c" and span.parent_span_id.hex() == "b7ad6b7169203331"
    collector.spans.clear()
    everything = SpanExporter(collector.url, ratio=1.0)
    everything([record(operation="chat", traceparent=PARENT.format(sampled="00"))])
    assert not collector.spans
    everything([record(operation="chat", traceparent="nonsense")])
    assert len(collector.spans) == 1


def test_a_failure_is_marked(collector: Collector) -> None:
    SpanExporter(collector.url)([record(operation="chat", status=504, failed=True)])
    (span,) = collector.spans
    assert span.status.code == 2 and _values(span.attributes)["error.type"] == "504"


def test_without_a_collector_nothing_breaks() -> None:
    SpanExporter("http://127.0.0.1:9")([record(operation="chat")])
