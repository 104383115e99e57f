"""Times on the device, and the roofs that they are measured against. Nothing here runs without a CUDA device.

An operation is timed as a captured graph (where it can be captured), between events, after a write that is larger
than the L2 cache: neither launches from Python nor a warm cache flatter it. The median of many runs counts.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

FLUSH_BYTES = 256 << 20
"""Larger than any L2 (H200: 50 MiB), and long enough on the device to hide the launch of what is timed."""
MAX_RUNS = 50


@functools.cache
def _flush() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def time_us(run: Callable[[], Any], budget_s: float = 0.3) -> tuple[float, str]:
    """(median microseconds, `graph` or `eager`). `run` has been run before: everything is compiled and loaded."""
    launch, how = captured(run), "graph"
    if launch is None:
        launch, how = run, "eager"
    times: list[float] = []
    deadline = time.monotonic() + budget_s
    while len(times) < MAX_RUNS and (len(times) < 5 or time.monotonic() < deadline):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        _flush().zero_()
        begin.record()
        launch()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times), how


def captured(run: Callable[[], Any]) -> Callable[[], None] | None:
    """A replay of `run`, or None where it cannot be captured."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            run()
        graph.replay()
        torch.cuda.synchronize()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def measure_roof() -> dict[str, float]:
    """What this device does at best: copied bytes (read and written) a second, and products of 8192-wide matrices."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_us, _ = time_us(lambda: target.copy_(source), 1.0)
    source = target = torch.empty(0)
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.mm(a, b)
    product_us, _ = time_us(lambda: torch.mm(a, b), 1.0)
    roof = {"memory_gb_per_s": 2 * (2 << 30) / copy_us / 1e3, "bf16_tflops": 2 * size**3 / product_us / 1e6}
    return {name: round(value, 1) for name, value in (roof | _fp8_roof(a)).items()}


def _fp8_roof(a: torch.Tensor) -> dict[str, float]:
    """Empty where torch cannot multiply fp8 on this device; shares of that roof are then not reported."""
    codes, one = a.to(torch.float8_e4m3fn), torch.ones((), device="cuda")

    def product() -> torch.Tensor:
        return torch._scaled_mm(codes, codes.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)  # pyright: ignore

    try:
        product()
    except RuntimeError:
        return {}
    product_us, _ = time_us(product, 1.0)
    return {"fp8_tflops": 2 * a.shape[0] ** 3 / product_us / 1e6}


def rates(us: float, nbytes: int, flops: int, roof: str, roofs: dict[str, float]) -> dict[str, float]:
    """What a time means: rates, and the share of the roof that bounds the operation, where that roof is known."""
    found = {"us": round(us, 2)}
    if roof == "none":
        return found
    if roof == "memory":
        found["gb_per_s"] = rate = round(nbytes / us / 1e3, 1)
        best = roofs.get("memory_gb_per_s")
    else:
        found["tflops"] = rate = round(flops / us / 1e6, 1)
        best = roofs.get(f"{roof}_tflops")
    if best:
        found["share_of_roof"] = round(rate / best, 3)
    return found


def num_processors() -> int:
    """Of the device; an H200's where there is none."""
    return torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 132


def describe_device() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "processors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda or torch.version.hip or "",
    }
