"""A prompt of 100,000 tokens arrives while 64 streams decode: how much longer does anybody wait for a token?

The worker takes 5 ms a step and 10 us for each prompt token, so a chunk has a known cost: nobody's gap may grow by
more than one chunk and 10 ms.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.request

from perf.figure import Measurement, Options
from perf.serving import Running, drive, instant_server

DESCRIPTION = "64 decoding streams while a 100,000-token prompt arrives: the longest gap, against without it"
STEP_MS, TOKEN_US, CHUNK = 5.0, 10.0, 512


def measure(options: Options) -> Measurement:
    length = 20_000 if options.quick else 100_000
    with instant_server(max_model_len=131_072, max_num_seqs=96, step_ms=STEP_MS, token_us=TOKEN_US) as server:
        drive(server, 8, 20)
        table = []
        for kind, send in (("none", None), ("token ids", _ids(length)), ("text", _text(length))):
            table.append(_gaps(server, kind, send))
    allowed = table[0]["longest_gap_ms"] + CHUNK * TOKEN_US / 1e3 + 10
    summary = {
        "longest_gap_ms_without": table[0]["longest_gap_ms"],
        "longest_gap_ms_ids": table[1]["longest_gap_ms"],
        "longest_gap_ms_text": table[2]["longest_gap_ms"],
        "allowed_ms": round(allowed, 1),
    }
    return Measurement(summary, table, notes=f"chunk of {CHUNK} tokens: {CHUNK * TOKEN_US / 1e3} ms")


def _ids(length: int) -> bytes:
    return json.dumps({"prompt": [7 + i % 1000 for i in range(length)], "max_tokens": 2}).encode()


def _text(length: int) -> bytes:
    words = ["the", "ocean", "is", "wide", "and", "a", "boat", "goes", "over", "it"]
    text = " ".join(words[i % len(words)] for i in range(length))
    return json.dumps({"prompt": text, "max_tokens": 2}).encode()


def _gaps(server: Running, kind: str, body: bytes | None) -> dict:
    """Streams of 400 tokens; the prompt arrives in their middle."""
    answers: list[dict] = []

    def send() -> None:
        time.sleep(1.0)
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            answers.append(json.loads(response.read()))

    sender = threading.Thread(target=send)
    if body is not None:
        sender.start()
    outcome = drive(server, 64, 600, steady=True)
    if body is not None:
        sender.join()
        assert answers[0]["usage"]["prompt_tokens"] > 10_000
    assert outcome["num_errors"] == 0, outcome["errors"]
    gaps = sorted(outcome["gaps_s"])
    return {
        "long prompt": kind,
        "longest_gap_ms": round(gaps[-1] * 1e3, 1),
        "p999_gap_ms": round(gaps[int(len(gaps) * 0.999)] * 1e3, 1),
        "p50_gap_ms": round(gaps[len(gaps) // 2] * 1e3, 1),
    }
