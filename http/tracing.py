"""`SpanExporter`: one OpenTelemetry span for each request that makes the model work, by the GenAI conventions.

A span is made when its request has ended, on a reporter's thread, from readings that the engine took anyway: nothing
is done for each token, and nothing waits for a collector. A caller's `traceparent` decides parent and sampling; else
the ratio does. Names are copied from the conventions, which still move; the `gen_ai.latency.*` ones are vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from slipring.http.record import Record
from slipring.http.reply import Work
from slipring.http.served import VERSION

_PATH = "/v1/traces"
_TIMEOUT_S = 5.0
_ASKED = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty")
"""Fields of bodies that spans tell when they were given."""


class TracingError(Exception):
    """Traces cannot be sent; the message says what is missing."""


class SpanExporter:
    """A `reporter.Sink`. Imports OpenTelemetry when it is made."""

    def __init__(self, endpoint: str, ratio: float = 1.0) -> None:
        """`endpoint`: URL of an OTLP/HTTP collector; without a path, /v1/traces. Raises TracingError."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
            from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise TracingError(f"--otlp-traces-endpoint needs slipring[otel] to be installed ({error})") from None

        ended: list[ReadableSpan] = []

        class Collect(SpanProcessor):
            def on_end(self, span: ReadableSpan) -> None:
                ended.append(span)

        name = OTELResourceDetector().detect().attributes.get(SERVICE_NAME, "slipring")
        provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(ratio),
            resource=Resource.create({SERVICE_NAME: str(name)}),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(Collect())
        self._ended = ended
        self._tracer = provider.get_tracer("slipring", VERSION)
        self._propagator = TraceContextTextMapPropagator()
        self._exporter = OTLPSpanExporter(endpoint=_with_path(endpoint), timeout=_TIMEOUT_S)
        self._server, self._error = trace.SpanKind.SERVER, trace.Status(trace.StatusCode.ERROR)

    def __call__(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.operation is not None:
                self._make(record)
        spans = self._ended.copy()
        self._ended.clear()
        if spans:
            self._exporter.export(spans)  # logs what it cannot send

    def _make(self, record: Record) -> None:
        parent = self._propagator.extract({"traceparent": record.traceparent}) if record.traceparent else None
        model = record.work.head.model if record.work is not None else ""
        span = self._tracer.start_span(
            f"{record.operation} {model}".rstrip(),
            context=parent,
            kind=self._server,
            attributes=attributes(record),
            start_time=record.began_ns,
        )
        if record.failed:
            span.set_status(self._error)
        span.end(record.began_ns + int(record.duration_s * 1e9))


def attributes(record: Record) -> dict[str, Any]:
    found: dict[str, Any] = {
        "gen_ai.operation.name": record.operation,
        "gen_ai.provider.name": "slipring",
        "http.request.method": record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "slipring.request.id": record.request_id,
    }
    if record.failed or record.status >= 400:
        found["error.type"] = str(record.status) if record.status >= 400 else "stream_error"
    if record.work is not None:
        found |= _asked(record.work) | _answered(record.work) | _latencies(record, record.work)
    return found


def _asked(work: Work) -> dict[str, Any]:
    body = work.body
    found: dict[str, Any] = {
        "gen_ai.request.model": work.head.model,
        "gen_ai.request.stream": bool(body.stream),
        "gen_ai.request.choice.count": body.n or 1,
    }
    if work.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = work.max_tokens
    if body.stop:
        found["gen_ai.request.stop_sequences"] = [body.stop] if isinstance(body.stop, str) else list(body.stop)
    for name in _ASKED:
        if (value := getattr(body, name)) is not None:
            found[f"gen_ai.request.{name}"] = value
    return found


def _answered(work: Work) -> dict[str, Any]:
    usage = work.usage
    return {
        "gen_ai.response.id": work.head.id,
        "gen_ai.response.model": work.head.model,
        "gen_ai.response.finish_reasons": list(usage.finish_reasons),
        "gen_ai.usage.input_tokens": usage.num_prompt,
        "gen_ai.usage.output_tokens": usage.num_generated,
        "gen_ai.usage.cache_read.input_tokens": usage.num_cached,
    }


def _latencies(record: Record, work: Work) -> dict[str, float]:
    """Seconds. Of several completions: the first to begin, the last to end."""
    found = {"gen_ai.latency.e2e": record.duration_s}
    if record.ttft_s is not None:
        found["gen_ai.response.time_to_first_chunk"] = found["gen_ai.latency.time_to_first_token"] = record.ttft_s
    timings = [timing for timing in work.usage.timings if timing.scheduled and timing.first_token]
    if timings:
        scheduled, first = min(t.scheduled for t in timings), min(t.first_token for t in timings)
        last = max(t.last_token for t in timings)
        found["gen_ai.latency.time_in_queue"] = scheduled - min(t.arrival for t in timings)
        found["gen_ai.latency.time_in_model_prefill"] = first - scheduled
        found["gen_ai.latency.time_in_model_decode"] = last - first
        found["gen_ai.latency.time_in_model_inference"] = last - scheduled
    return found


def _with_path(endpoint: str) -> str:
    return endpoint if urlsplit(endpoint).path not in ("", "/") else endpoint.rstrip("/") + _PATH
