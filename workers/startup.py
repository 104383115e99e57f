"""From a `WorkerConfig` to a warm `Runner`, phase by phase; the first module of the worker that imports torch."""

from __future__ import annotations

import gc
import os
import time

import torch

from slipring.shm.layout import Phase
from slipring.shm.spec import WorkerConfig
from slipring.shm.wire import Ready
from slipring.workers.kv_cache import DTYPES, KvCache
from slipring.workers.link import Link
from slipring.workers.loader import Weights
from slipring.workers.models.registry import build_model
from slipring.workers.runner import Runner


class PhaseClock:
    """Seconds of each start-up phase, in order. The first one began when the process did."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"import": _process_age_s()}
        self._last = time.monotonic()

    def lap(self, phase: str) -> None:
        now = time.monotonic()
        self.seconds[phase] = now - self._last
        self._last = now


def build_runner(config: WorkerConfig, link: Link) -> Runner:
    """Load, warm up, publish READY. Raises what loading raises; the caller turns it into an ERROR record."""
    if config.device != "cpu":
        raise ValueError(f"device {config.device!r} is not supported yet; only cpu is")
    clock = PhaseClock()
    torch.set_num_threads(config.num_threads)
    link.beat(Phase.LOADING)
    weights = Weights(config.model, DTYPES[config.dtype], link.progress)
    with torch.inference_mode():
        model = build_model(config.model, weights, config.max_model_len)
    weights.close()
    # After the weights: what is still available then is what the pool may have.
    kv = KvCache.for_worker(config)
    clock.lap("load")
    runner = Runner(config, model, kv, link.table)
    link.beat(Phase.COMPILING)
    runner.warm_up()
    # Everything so far lives as long as the process: keep it out of every later collection.
    gc.collect()
    gc.freeze()
    clock.lap("warm up")
    link.beat(Phase.WAITING)
    link.publish_ready(Ready(num_blocks=kv.num_blocks, block_bytes=kv.block_bytes, phase_seconds=clock.seconds))
    return runner


def _process_age_s() -> float:
    """Seconds since this process was started."""
    with open("/proc/self/stat") as file:
        started_ticks = int(file.read().rsplit(")", 1)[1].split()[19])
    with open("/proc/uptime") as file:
        uptime = float(file.read().split()[0])
    return max(0.0, uptime - started_ticks / os.sysconf("SC_CLK_TCK"))
