"""The access log: one line for each request, written when its last byte is out.

    2026-11-30T12:00:00.250Z 200 POST /v1/chat/completions id=4f.. duration=0.412s ttft=0.018s tokens=31+64 stop

Health checks and scrapes that went well, or came while the server started, are left out. What clients chose stands in
there without anything but printable ASCII, and shortened.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TextIO

from slipring.http.record import Record

_QUIET = frozenset({"/health", "/health/live", "/health/ready", "/ping", "/metrics"})
_MAX_PATH = 200


class AccessLog:
    def __init__(self, out: TextIO | None = None) -> None:
        self._out = out or sys.stdout

    def __call__(self, records: Sequence[Record]) -> None:
        """A `reporter.Sink`."""
        lines = [line(record) for record in records if not _is_quiet(record)]
        if lines:
            self._out.write("\n".join(lines) + "\n")
            self._out.flush()


def _is_quiet(record: Record) -> bool:
    return record.route in _QUIET and not record.failed and not 400 <= record.status < 500


def line(record: Record) -> str:
    seconds, rest = divmod(record.began_ns, 10**9)
    when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    words = [
        f"{when}.{rest // 10**6:03d}Z {record.status} {_plain(record.method)} {_plain(record.path)}",
        f"id={record.request_id} duration={record.duration_s:.3f}s",
    ]
    if record.ttft_s is not None:
        words.append(f"ttft={record.ttft_s:.4f}s")
    if record.work is not None:
        usage = record.work.usage
        words.append(f"tokens={usage.num_prompt}+{usage.num_generated}")
        words += sorted(set(usage.finish_reasons))
    if record.failed:
        words.append("failed")
    return " ".join(words)


def _plain(text: str) -> str:
    return "".join(letter if "!" <= letter <= "~" else "?" for letter in text[:_MAX_PATH])
