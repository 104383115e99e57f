"""From a `WorkerConfig` to a warm `Executor`, phase by phase; the first module of the worker that imports torch."""

from __future__ import annotations

import gc

import numpy as np
import torch

from slipring.shm.control import Message, MoveBlocks
from slipring.shm.layout import Phase
from slipring.shm.pages import CanonicalPageMapping, PageShape
from slipring.shm.segment import Segment
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
from slipring.workers.speculation.memory import draft_memory
from slipring.workers.speculation.proposer import NullProposer, Proposer
from slipring.workers.startup_clock import PhaseClock
from slipring.workers.transfers import BlockMover
from slipring.workers.weight_share import WeightShare


def build_executor(config: WorkerConfig, link: Link) -> Executor:
    """Load, warm up, publish READY. Raises what loading raises; the caller turns it into an ERROR record."""
    clock = PhaseClock()
    torch.set_num_threads(config.num_threads)
    grammars = GrammarStore(config.model)
    executor, kv, proposer = _for_device(config, link, clock, grammars)
    _answer_control(config, link, grammars, kv, proposer)
    # Everything so far lives as long as the process: keep it out of every later collection.
    gc.collect()
    gc.freeze()
    link.beat(Phase.WAITING)
    link.publish_ready(Ready(num_blocks=kv.num_blocks, block_bytes=kv.budget_bytes, phase_seconds=clock.seconds))
    return executor


def _answer_control(config: WorkerConfig, link: Link, grammars: GrammarStore, kv: KvCache, proposer: Proposer) -> None:
    """Messages that belong to no step: grammars and, where there are tiers, transfers of blocks."""
    mover: BlockMover | None = None

    def handle(message: Message) -> Message | None:
        if isinstance(message, MoveBlocks):
            assert mover is not None, "a transfer for a worker without tiers"
            if message.is_load:
                proposer.overwritten(np.array(message.blocks, np.int64))
            mover.submit(message)
            return None
        return grammars.handle(message)

    control = ControlThread(*link.open_control(), handle, link.fail)
    if config.tier_fd is not None:
        shape = PageShape.of(config.model, config.block_size, config.dtype)
        segment = Segment.attach(config.tier_fd, config.tier_bytes)
        slots = np.frombuffer(segment.buf, np.uint8).reshape(-1, shape.nbytes)
        mover = BlockMover(kv.as_bytes(), slots, CanonicalPageMapping.of(shape, ways=1, rank=0), control.post)


def _for_device(
    config: WorkerConfig, link: Link, clock: PhaseClock, grammars: GrammarStore
) -> tuple[Executor, KvCache, Proposer]:
    if config.device == "cpu":
        return _for_cpu(config, link, clock, grammars)
    if config.device.startswith("cuda"):
        # Only here: the CPU's worker has no use for Triton, nor time to import it.
        from slipring.workers.cuda.device import CudaDevice
        from slipring.workers.cuda.startup import build_executor as build_cuda_executor

        return *build_cuda_executor(config, link, CudaDevice(config.device), clock, grammars), NullProposer()
    raise ValueError(f"device {config.device!r} is not supported; cpu and cuda:N are")


def _for_cpu(
    config: WorkerConfig, link: Link, clock: PhaseClock, grammars: GrammarStore
) -> tuple[Executor, KvCache, Proposer]:
    link.beat(Phase.LOADING)
    share = None
    if config.weights_fd >= 0:
        share = WeightShare(config.weights_fd, link.still_loading)
    weights = Weights(config.model, DTYPES[config.dtype], link.progress, share=share)
    with torch.inference_mode():
        model = build_model(config.model, weights, config.max_model_len)
    weights.close()
    # After the weights: what is still available then is what the pool may have.
    kv = KvCache.for_worker(config, draft_memory(config))
    clock.lap("load")
    # One thread: the others are the forward pass's.
    constraints = Constraints(link.table, config.model, grammars, config.max_draft)
    runner = Runner(config, model, kv, link.table, constraints)
    link.beat(Phase.COMPILING)
    runner.warm_up()
    runner.proposer = build_proposer(config, runner, constraints, link.progress)
    clock.lap("warm up")
    return InlineExecutor(link, runner), kv, runner.proposer
