"""From a `WorkerConfig` to a warm `Executor`, phase by phase; the first module of the worker that imports torch."""

from __future__ import annotations

import gc

import torch

from slipring.shm.layout import Phase
from slipring.shm.spec import WorkerConfig
from slipring.shm.wire import Ready
from slipring.workers.constraints import Constraints
from slipring.workers.control import ControlThread
from slipring.workers.executor import Executor, InlineExecutor
from slipring.workers.grammar import GrammarStore
from slipring.workers.kv_cache import DTYPES, KvCache
from slipring.workers.link import Link
from slipring.workers.loader import Weights
from slipring.workers.models.registry import build_model
from slipring.workers.runner import Runner
from slipring.workers.speculation.build import build_proposer
from slipring.workers.startup_clock import PhaseClock


def build_executor(config: WorkerConfig, link: Link) -> Executor:
    """Load, warm up, publish READY. Raises what loading raises; the caller turns it into an ERROR record."""
    clock = PhaseClock()
    torch.set_num_threads(config.num_threads)
    grammars = GrammarStore(config.model)
    executor, kv = _for_device(config, link, clock, grammars)
    ControlThread(*link.open_control(), grammars.handle, link.fail)
    # Everything so far lives as long as the process: keep it out of every later collection.
    gc.collect()
    gc.freeze()
    link.beat(Phase.WAITING)
    link.publish_ready(Ready(num_blocks=kv.num_blocks, block_bytes=kv.block_bytes, phase_seconds=clock.seconds))
    return executor


def _for_device(
    config: WorkerConfig, link: Link, clock: PhaseClock, grammars: GrammarStore
) -> tuple[Executor, KvCache]:
    if config.device == "cpu":
        return _for_cpu(config, link, clock, grammars)
    if config.device.startswith("cuda"):
        # Only here: the CPU's worker has no use for Triton, nor time to import it.
        from slipring.workers.cuda.device import CudaDevice
        from slipring.workers.cuda.startup import build_executor as build_cuda_executor

        return build_cuda_executor(config, link, CudaDevice(config.device), clock, grammars)
    raise ValueError(f"device {config.device!r} is not supported; cpu and cuda:N are")


def _for_cpu(config: WorkerConfig, link: Link, clock: PhaseClock, grammars: GrammarStore) -> tuple[Executor, KvCache]:
    link.beat(Phase.LOADING)
    weights = Weights(config.model, DTYPES[config.dtype], link.progress)
    with torch.inference_mode():
        model = build_model(config.model, weights, config.max_model_len)
    weights.close()
    # After the weights: what is still available then is what the pool may have.
    kv = KvCache.for_worker(config)
    clock.lap("load")
    # One thread: the others are the forward pass's.
    constraints = Constraints(link.table, config.model, grammars, config.max_draft)
    runner = Runner(config, model, kv, link.table, constraints)
    link.beat(Phase.COMPILING)
    runner.warm_up()
    runner.proposer = build_proposer(config, runner)
    clock.lap("warm up")
    return InlineExecutor(link, runner), kv
