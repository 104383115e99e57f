"""`update()` for a returned step, and then what each of its tokens costs until it is an SSE frame."""

from __future__ import annotations

import gc
import json
import statistics
import time

import numpy as np

from perf.control_plane import ControlPlane
from perf.figure import Measurement, Options, percentile
from slipring.http.frames import ChatRenderer
from slipring.http.reply import ReplyHead, Usage
from slipring.http.stream import FrameStream
from slipring.runtime.completion import Completion
from slipring.runtime.detokenizer import Detokenizer
from slipring.runtime.metrics import Metrics
from slipring.runtime.model import open_model
from slipring.runtime.request import GenerationRequest
from slipring.scheduler.request import Request
from slipring.shm.params import SamplingParams

DESCRIPTION = "one returned step: update() alone, and per token with detokenizing and frame building"
ROWS = (1, 64, 256, 1024)


def measure(options: Options) -> Measurement:
    steps = 500 if options.quick else 10_000
    runs = 1 if options.quick else 5
    table, summary = [], {}
    for rows in ROWS:
        times = [_update(rows, steps if rows <= 256 else steps // 4, options.seed + run) for run in range(runs)]
        row = {
            "step": f"update, {rows} rows",
            "p50_us": round(statistics.median(percentile(run, 50) for run in times), 2),
            "p99_us": round(statistics.median(percentile(run, 99) for run in times), 2),
        }
        table.append(row)
        if rows == 256:
            summary["update_p50_us_256"] = row["p50_us"]
    per_token = round(statistics.median(_text_and_frame(256, steps // 10) for _ in range(runs)), 2)
    table.append({"step": "text and SSE frame, per token, 256 streams", "p50_us": per_token})
    summary["update_detok_us_per_token"] = round(summary["update_p50_us_256"] / 256 + per_token, 2)
    return Measurement(summary, table)


def _update(rows: int, steps: int, seed: int) -> np.ndarray:
    plane = ControlPlane(rows, max_model_len=4096, seed=seed, max_tokens=4000)
    plane.decode_until_steady(rows)
    times = np.zeros(steps)
    gc.collect()
    gc.freeze()
    gc.disable()
    for index in range(steps):
        if int(plane.scheduler.decode.start[:rows].max()) >= 4000:
            plane = ControlPlane(rows, max_model_len=4096, seed=seed + index, max_tokens=4000)
            plane.decode_until_steady(rows)
        step = plane.schedule()
        assert step is not None
        plane.answer(step)
        began = time.perf_counter_ns()
        returned = plane.update(step)
        times[index] = (time.perf_counter_ns() - began) / 1e3
        assert len(returned.requests) == len(returned.tokens) == rows and not returned.finished
        plane.scheduler.settle()
    gc.enable()
    gc.unfreeze()
    plane.scheduler.check_integrity()
    return times


def _text_and_frame(num_streams: int, num_steps: int) -> float:
    """Microseconds from a drawn token to the bytes that a connection would be given, mean over all tokens."""
    tokenizer = open_model("smollm2").tokenizer()
    written: list[list[bytes]] = [[] for _ in range(num_streams)]
    completions = [_stream(tokenizer, frames) for frames in written]
    tokens = np.random.default_rng(1).integers(1000, 3000, (num_steps, num_streams)).tolist()
    gc.collect()
    gc.disable()
    began = time.perf_counter_ns()
    for row in tokens:
        now = time.monotonic()
        for completion, token in zip(completions, row, strict=True):
            completion.push(token, None, None, None, now)
    spent = (time.perf_counter_ns() - began) / 1e3
    gc.enable()
    assert all(len(frames) == num_steps for frames in written)
    text = tokenizer.decode([row[0] for row in tokens])
    assert "".join(_content(frame) for frame in written[0]) == text
    return spent / (num_streams * num_steps)


def _stream(tokenizer, written: list[bytes]) -> Completion:
    params = SamplingParams(max_tokens=10**6)
    request = Request(np.array([1], np.int32), params)
    head = ReplyHead("chatcmpl-0", 0, "m", "f")
    renderer = ChatRenderer(head, Usage([1], 1), None, [""])  # type: ignore[arg-type]  # nobody asks for logprobs
    stream = FrameStream(renderer, 1, lambda: None)

    def write(frame: bytes) -> bool:
        written.append(frame)
        return True

    stream.attach(write)
    generation = GenerationRequest(request_id="r", prompt_token_ids=[1], params=params)
    return Completion(generation, 0, request, Detokenizer(tokenizer), frozenset(), stream.push, Metrics())


def _content(frame: bytes) -> str:
    events = [json.loads(line[6:]) for line in frame.split(b"\n") if line.startswith(b"data: ")]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)
