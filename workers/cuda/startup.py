"""From a `WorkerConfig` for a GPU to a warm `CudaExecutor`: load, measure, size the pool, compile, register.

The largest step runs once on a pool of one block, which compiles kernels and shows the activations' peak; the pool
takes what is left. Every batch bucket then runs once, empty, so that no request meets a first compilation; graphs are
captured later, between requests (`executor.py`).
"""

from __future__ import annotations

import sys
from functools import partial

import numpy as np
import torch

from slipring.kernels.logprobs import gather_logprobs
from slipring.kernels.sampling import apply_penalties
from slipring.kernels.token_mask import apply_token_mask
from slipring.shm.layout import Phase
from slipring.shm.spec import WorkerConfig
from slipring.shm.wire import StepFlag, StepInputView, StepOutputView, StepShape
from slipring.workers.cuda.device import Device
from slipring.workers.cuda.edits import Edits
from slipring.workers.cuda.executor import CudaExecutor
from slipring.workers.cuda.memory import Budget
from slipring.workers.cuda.runner import CudaRunner
from slipring.workers.grammar import GrammarStore, num_mask_words
from slipring.workers.kv_cache import DTYPES, KvCache, MemoryShortageError, block_bytes
from slipring.workers.link import Link
from slipring.workers.loader import Weights
from slipring.workers.models.llama import Llama
from slipring.workers.models.registry import build_model
from slipring.workers.reports import RESERVE_BYTES
from slipring.workers.startup_clock import PhaseClock

_CHUNKS = (8, 40)
"""Lengths between those at which attention and products change their tiles (16 and 64 tokens)."""


def build_executor(
    config: WorkerConfig, link: Link, device: Device, clock: PhaseClock, grammars: GrammarStore
) -> tuple[CudaExecutor, KvCache]:
    """Everything but READY. Raises MemoryShortageError, and what loading raises."""
    device.activate()
    link.beat(Phase.LOADING)
    total = device.free_bytes()
    model = _load(config, link, device)
    weights = total - device.free_bytes()
    clock.lap("load")
    link.beat(Phase.COMPILING)
    runner = CudaRunner(device, config, model, _pool(config, 1, device), link.table, grammars)
    with torch.inference_mode():
        state = total - device.free_bytes() - weights
        budget = measure(config, runner, device, (total, weights, state))
        num_blocks = budget.num_blocks(config)
        print(budget.table(num_blocks, runner.kv.block_bytes), file=sys.stderr, flush=True)
        runner.exchange_pool(_pool(config, num_blocks, device))
        warm_up(config, runner, device)
    for memory in link.read_by_device:
        _register(device, memory)
    clock.lap("warm up")
    return CudaExecutor(link, runner, device), runner.kv


def measure(config: WorkerConfig, runner: CudaRunner, device: Device, held: tuple[int, int, int]) -> Budget:
    """Run the largest steps, and see what they take. `held`: total, weights and state of the `Budget`."""
    try:
        activations = device.peak_bytes(partial(_run_largest, config, runner))
        graphs = _measure_graphs(runner, device)
    except torch.OutOfMemoryError as error:
        raise MemoryShortageError(
            f"a step of {config.max_num_batched_tokens} tokens and {config.max_num_seqs} rows does not fit beside the "
            "weights; lower --max-num-batched-tokens or --max-num-seqs"
        ) from error
    edits = RESERVE_BYTES + Edits.reserve_bytes(config.num_rows, config.max_num_seqs, config.model.vocab_size)
    return Budget.measured(*held, activations, graphs, len(runner.decode.buckets), edits)


def _run_largest(config: WorkerConfig, runner: CudaRunner) -> None:
    _run_dummy(runner, *_dummy_step(config))
    for bucket in (runner.decode.buckets[-1], runner.decode.buckets[0]):  # also what a capture must find loaded
        runner.decode.run_empty(bucket)


def _measure_graphs(runner: CudaRunner, device: Device) -> tuple[int, int]:
    """(bytes of the largest bucket's graphs, and of the smallest's beside them); they are captured for this alone, and
    dropped: a graph holds the addresses of its KV pool."""
    decode = runner.decode

    def capture(bucket: int) -> None:
        decode.capture(bucket, lambda: None)
        decode.replay_empty(bucket)  # the first replay takes memory too

    try:
        largest = device.peak_bytes(partial(capture, decode.buckets[-1]))
        return largest, device.peak_bytes(partial(capture, decode.buckets[0]))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        print(f"decode steps cannot be captured: {error}", file=sys.stderr)
        return 0, 0
    finally:
        decode.drop_graphs()


def warm_up(config: WorkerConfig, runner: CudaRunner, device: Device) -> None:
    """Launch every kernel that serving will, in every form that it will."""
    most = config.max_num_batched_tokens
    for num_tokens in {*(min(length, most) for length in _CHUNKS), most}:
        _run_dummy(runner, *_dummy_step(config, num_rows=1, num_tokens=num_tokens))
    runner.rows.warm_up()
    for bucket in runner.decode.buckets:
        runner.decode.run_empty(bucket)
    scores = torch.zeros((1, config.model.vocab_size), device=device.torch)
    counts, one = torch.zeros_like(scores, dtype=torch.int32), torch.ones(1, device=device.torch)
    apply_penalties(scores, counts > 0, counts, repetition=one, presence=one, frequency=one)
    words = num_mask_words(config.model.vocab_size)
    apply_token_mask(scores, counts[0, :1].long(), torch.zeros((1, words), dtype=torch.int32, device=device.torch))
    gather_logprobs(scores, torch.zeros(1, dtype=torch.int64, device=device.torch))
    device.synchronize()


def _load(config: WorkerConfig, link: Link, device: Device) -> Llama:
    weights = Weights(config.model, DTYPES[config.dtype], link.progress, device.torch)
    try:
        with torch.inference_mode():
            return build_model(config.model, weights, config.max_model_len)
    except torch.OutOfMemoryError as error:
        raise MemoryShortageError(
            f"the weights of {config.model.name} do not fit {config.device}; take a smaller or quantised model"
        ) from error
    finally:
        weights.close()


def _pool(config: WorkerConfig, num_blocks: int, device: Device) -> KvCache:
    dtype = DTYPES[config.dtype]
    try:
        return KvCache(config.model, num_blocks, config.block_size, dtype, device.torch)
    except torch.OutOfMemoryError as error:
        size = num_blocks * block_bytes(config.model, config.block_size, dtype)
        raise MemoryShortageError(
            f"a KV cache of {size / 2**30:.2f} GiB could not be allocated though so much was free; does another "
            "process use the device? --kv-cache-memory-bytes sets a smaller one"
        ) from error


def _dummy_step(
    config: WorkerConfig, num_rows: int | None = None, num_tokens: int | None = None
) -> tuple[StepInputView, StepOutputView]:
    """A step of prompt chunks on rows 0 and on, each sampled; by default as large as steps get."""
    shape = StepShape.of(config.max_num_seqs, config.max_draft, config.block_size)
    step = StepInputView(memoryview(bytearray(shape.input_bytes)), shape)
    num_rows = num_rows or min(config.max_num_seqs, config.max_num_batched_tokens)
    num_tokens = num_tokens or config.max_num_batched_tokens
    step.header[step.NUM_ROWS] = num_rows
    step.rows[:num_rows] = np.arange(num_rows)
    share = np.diff(np.arange(num_rows + 1) * num_tokens // num_rows)
    step.num_tokens[:num_rows] = np.minimum(share, config.max_model_len)
    step.flags[:num_rows] = StepFlag.SAMPLE
    return step, StepOutputView(memoryview(bytearray(shape.output_bytes)), shape)


def _run_dummy(runner: CudaRunner, step: StepInputView, output: StepOutputView) -> None:
    """On rows of no admission, whose blocks are all block 0; what they hold afterwards, no admission ever reads."""
    rows = step.rows[: int(step.header[step.NUM_ROWS])]
    runner.rows.host.generation[rows] = 0
    runner.run(step, output)
    runner.rows.host.generation[rows] = -1
    runner.rows.num_computed.zero_()


def _register(device: Device, memory: memoryview) -> None:
    try:
        device.register(memory)
    except RuntimeError as error:
        print(f"{error}; copies from shared memory are staged, which costs some microseconds a step", file=sys.stderr)
