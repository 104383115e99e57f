"""`EngineConfig`: what a person may set, and `resolve`, which turns every "auto" into a value before freezing.

This is the only place of the engine that reads the environment (memory, CPUs, SLIPRING_* variables). Layers own
their configs (`scheduler.config.SchedulerConfig`, `shm.spec.WorkerConfig`); this file composes them.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right

import msgspec

from slipring.runtime.cpu_affinity import parse_affinity
from slipring.runtime.draft_model import resolve_draft_model
from slipring.runtime.speculation import (
    SpeculationError,
    draft_depth,
    draft_widths,
    parse_speculation,
    worker_speculation,
)
from slipring.runtime.tiers.config import KvTransferConfig, of_size, parse
from slipring.scheduler.config import SchedulerConfig
from slipring.shm.memory import available_bytes
from slipring.shm.spec import ModelSpec, SpeculationSpec
from slipring.shm.table import TableShape

DTYPES = {"auto": "auto", "float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}
"""As given, and what it means."""
POLICIES = ("fcfs", "priority")
ON_FAULT = ("replay", "abort")
WORKER_BYTES = 150 << 20
"""What a worker takes at least for itself (measured: 163 to 174 MiB beside the weights, which all share)."""
MOST_WORKERS_PER_CPU = 8
"""More of them only take turns."""


class ConfigError(ValueError):
    """A setting, or a combination of settings, that cannot work; the message names the flag and the fix."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """As given by the user; None and "auto" mean: let the engine decide. Flags carry the same names."""

    model: str
    dtype: str = "auto"
    device: str = "auto"
    """`cpu` or `cuda:N`. `auto` is the CPU for as long as the CUDA path has not been seen to run on a GPU."""
    max_model_len: int | None = None
    allow_long_max_model_len: bool = False
    """Let `max_model_len` exceed the context that the model was trained with; answers beyond it may be poor."""
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    """Blocks in the KV pool, whatever the memory says (tests)."""
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"
    async_scheduling: bool = True
    """True: the next step is published while the last one runs (pipeline depth 2). False: depth 1."""
    speculative_config: str | None = None
    """JSON object with vLLM's keys (`runtime/speculation.py`); None: no speculation."""
    seed: int = 0
    """Unseeded requests draw their seeds from a generator with this seed; 0: from the operating system."""
    cpu_threads: int | None = None
    cpu_affinity: str | None = None
    """CPUs of each replica's worker, such as `0-3|4-7` (`runtime/cpu_affinity.py`); None: any."""
    max_queued_requests: int = 4096
    max_queued_tokens: int = 4_000_000
    itl_target_ms: float = 200.0
    """A prompt's chunks are sized so that a step beside decoding rows stays under this, where that is possible."""
    worker_startup_timeout_s: float = 600.0
    worker_module: str = "slipring.workers.main"
    """What the supervisor spawns (tests put a scripted worker here)."""
    data_parallel_size: int = 1
    """Replicas, each with its own worker, scheduler and KV pool."""
    on_fault: str = "replay"
    """`replay`: open streams go on after a worker's death. `abort`: they end at once, with an error."""
    hang_limit_s: float = 30.0
    """A step that takes longer than this, and than ten times what was predicted, means that the worker hangs."""
    engine_recovery_timeout_sec: float = 120.0
    """A replica that is not healthy again so long after a fault is dead."""
    warm_spare: bool = False
    """Keep one more worker per replica that has loaded everything and waits: recovery then takes no start-up."""
    flight_recorder_dir: str | None = None
    """Where the last steps before a fault are written; None: a folder in the temporary directory."""
    auto_recovery: bool = True
    """False: after a fault a replica waits for a command."""
    kv_transfer_config: str | None = None
    """JSON, see `slipring.runtime.tiers.config`: KV tiers beyond the device."""
    kv_offloading_size: float | None = None
    """GiB of a CPU tier alone; the short form of `kv_transfer_config`."""
    debug_integrity: bool = False
    """Recount every block and row from first principles whenever the engine falls idle."""


class ResolvedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every value decided."""

    user: EngineConfig
    dtype: str
    device: str
    max_model_len: int
    max_num_batched_tokens: int
    kv_cache_bytes: int
    """Of one replica."""
    num_threads: int
    """Of one replica's worker."""
    cpus: tuple[int, ...] = ()
    """Those that the replica's worker may run on; none: any."""
    pipeline_depth: int
    num_rows: int
    max_draft: int = 0
    rank: int = 0
    """The replica that this is for."""
    num_blocks: int | None = None
    """Of a replica's KV pool; None until it was told, or its first worker has said."""
    draft_depth: int = 0
    """How many drafts of a row may be accepted in one step: fewer than `max_draft` where they branch."""
    draft_widths: tuple[int, ...] = ()
    """Drafts of a row by the number of decode rows."""
    speculation: SpeculationSpec | None = None
    kv_transfer: KvTransferConfig | None = None
    """None: no tiers beyond the device."""

    def for_rank(self, rank: int) -> ResolvedConfig:
        """What one replica is told."""
        user = self.user
        if user.cpu_affinity is None:
            return msgspec.structs.replace(self, rank=rank)
        cpus = parse_affinity(user.cpu_affinity, user.data_parallel_size, os.sched_getaffinity(0))[rank]
        return msgspec.structs.replace(self, rank=rank, cpus=cpus, num_threads=user.cpu_threads or len(cpus))

    @property
    def itl_target_s(self) -> float:
        return self.user.itl_target_ms / 1e3

    def worker_environment(self) -> dict[str, str]:
        """The environment a worker is born with: ours, and what its libraries read only once, at load.

        GNU OpenMP's threads spin for milliseconds at each barrier by default. Where the event loop, or anybody else,
        wants one of the same cores, a step then takes ten times as long (measured: 2 instead of 16 tokens a second).
        """
        return {
            "GOMP_SPINCOUNT": "1000",
            **os.environ,
            "OMP_NUM_THREADS": str(self.num_threads),
            "PYTHONUNBUFFERED": "1",
        }

    @property
    def table_shape(self) -> TableShape:
        return TableShape(self.num_rows, self.max_model_len, self.user.block_size)

    def scheduler(self) -> SchedulerConfig:
        """The scheduler's own config, once it is known how many blocks the pool holds."""
        assert self.num_blocks is not None
        return SchedulerConfig(
            num_blocks=self.num_blocks,
            block_size=self.user.block_size,
            max_num_seqs=self.user.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            num_rows=self.num_rows,
            max_model_len=self.max_model_len,
            max_draft=self.max_draft,
            draft_depth=self.draft_depth,
            draft_widths=self.draft_widths,
            enable_prefix_caching=self.user.enable_prefix_caching,
            policy=self.user.scheduling_policy,
        )


def resolve(config: EngineConfig, spec: ModelSpec) -> ResolvedConfig:
    """Decide everything that was left open. Raises ConfigError."""
    _check(config)
    max_model_len = _max_model_len(config, spec)
    resolved = _resolve(config, spec, max_model_len)
    _check_room(resolved)
    return resolved if config.speculative_config is None else _with_speculation(resolved, config.speculative_config)


def _with_speculation(resolved: ResolvedConfig, text: str) -> ResolvedConfig:
    try:
        speculation = parse_speculation(text)
        widths = draft_widths(speculation, resolved.user.max_num_seqs)
        for_worker = worker_speculation(speculation)
        if speculation.method == "draft_model":
            draft = resolve_draft_model(speculation.model or "", resolved.user.model)
            for_worker = msgspec.structs.replace(for_worker, draft=draft)
    except SpeculationError as error:
        raise ConfigError(f"--speculative-config: {error}") from None
    if resolved.device != "cpu":
        raise ConfigError(f"--speculative-config works on the CPU so far, not on {resolved.device}: leave it out")
    return msgspec.structs.replace(
        resolved,
        max_draft=max(widths),
        draft_depth=min(draft_depth(speculation), max(widths)),
        draft_widths=widths,
        speculation=for_worker,
    )


def _resolve(config: EngineConfig, spec: ModelSpec, max_model_len: int) -> ResolvedConfig:
    return ResolvedConfig(
        user=config,
        dtype=_dtype(config),
        device=device_name(config.device),
        max_model_len=max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens or max(512, config.max_num_seqs),
        kv_cache_bytes=_kv_cache_bytes(config),
        num_threads=config.cpu_threads or max(1, available_cpus() // config.data_parallel_size),
        pipeline_depth=2 if config.async_scheduling else 1,
        num_rows=_num_rows(config.max_num_seqs),
        num_blocks=config.num_gpu_blocks_override,
        kv_transfer=_kv_transfer(config),
    )


def _num_rows(max_num_seqs: int) -> int:
    """Of the batch table: some more than run at a time, since a row is free only once no step in flight has it."""
    return max_num_seqs + max(8, max_num_seqs // 4)


def _check(config: EngineConfig) -> None:
    _one_of("--dtype", config.dtype, tuple(DTYPES))
    _one_of("--scheduling-policy", config.scheduling_policy, POLICIES)
    _one_of("--on-fault", config.on_fault, ON_FAULT)
    device_name(config.device)
    for flag, value, least in (
        ("--max-num-seqs", config.max_num_seqs, 1),
        ("--max-model-len", config.max_model_len, 2),
        ("--max-num-batched-tokens", config.max_num_batched_tokens, 1),
        ("--num-gpu-blocks-override", config.num_gpu_blocks_override, 1),
        ("--kv-cache-memory-bytes", config.kv_cache_memory_bytes, 1),
        ("--cpu-threads", config.cpu_threads, 1),
        ("--max-queued-requests", config.max_queued_requests, 1),
        ("--max-queued-tokens", config.max_queued_tokens, 1),
        ("--seed", config.seed, 0),
        ("--data-parallel-size", config.data_parallel_size, 1),
        ("--hang-limit", config.hang_limit_s, 0.05),
        ("engine_recovery_timeout_sec", config.engine_recovery_timeout_sec, 0.1),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{flag} must be at least {least}, got {value}")
    if not (1 <= config.block_size <= 256 and config.block_size & (config.block_size - 1) == 0):
        raise ConfigError(f"--block-size must be a power of two from 1 to 256, got {config.block_size}")
    if config.cpu_threads is not None and config.cpu_threads > available_cpus():
        raise ConfigError(f"--cpu-threads {config.cpu_threads} is more than the {available_cpus()} CPUs that there are")
    _check_affinity(config)
    budget = config.max_num_batched_tokens
    if budget is not None and budget < config.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens ({budget}) must be at least --max-num-seqs ({config.max_num_seqs}): "
            "each running sequence needs one token per step"
        )


def _check_room(resolved: ResolvedConfig) -> None:
    """Whether the batch table and so many replicas fit, before anything is taken. One replica alone is let try."""
    user = resolved.user
    num_workers = user.data_parallel_size * (2 if user.warm_spare else 1)
    _check_table(resolved)
    if user.data_parallel_size == 1:
        return
    each = WORKER_BYTES + resolved.table_shape.nbytes
    if resolved.device == "cpu":
        each += user.kv_cache_memory_bytes or 0
    free, cpus = available_bytes(), available_cpus()
    if num_workers * each <= free and num_workers <= MOST_WORKERS_PER_CPU * cpus:
        return
    most = min(free // each, MOST_WORKERS_PER_CPU * cpus) // (2 if user.warm_spare else 1)
    raise ConfigError(
        f"--data-parallel-size: {user.data_parallel_size} replicas do not fit: {num_workers} workers need at least "
        f"{num_workers * each / 2**30:.1f} GiB of memory and {-(-num_workers // MOST_WORKERS_PER_CPU)} CPUs, and "
        f"there are {free / 2**30:.1f} GiB and {cpus} CPUs: use {max(1, most)} or less"
    )


def _check_table(resolved: ResolvedConfig) -> None:
    """A table that does not fit would not fail: shared memory is promised freely, and the system dies of its pages."""
    num_seqs, length, free = resolved.user.max_num_seqs, resolved.max_model_len, available_bytes()

    def needed(num_seqs: int, length: int) -> int:
        return TableShape(_num_rows(num_seqs), length, resolved.user.block_size).nbytes

    table = needed(num_seqs, length)
    if table <= free // 2:
        return
    room = free * 7 // 16  # somewhat less, so that it still fits when it is tried
    if most := bisect_right(range(1, min(num_seqs, room) + 1), room, key=lambda seqs: needed(seqs, length)):
        fix = f"--max-num-seqs {most}"
    elif most := bisect_right(range(1, min(length, room) + 1), room, key=lambda tokens: needed(num_seqs, tokens)):
        fix = f"--max-model-len {most}"
    else:
        most = bisect_right(range(1, min(length, room) + 1), room, key=lambda tokens: needed(1, tokens))
        fix = f"--max-model-len {max(1, most)} with --max-num-seqs 1"
    raise ConfigError(
        f"--max-num-seqs {num_seqs} with --max-model-len {length} needs {table / 2**30:.1f} GiB for the batch table, "
        f"more than half of the {free / 2**30:.1f} GiB of memory that there are: use fewer or shorter sequences, such "
        f"as {fix}"
    )


def _check_affinity(config: EngineConfig) -> None:
    if config.cpu_affinity is None:
        return
    try:
        lists = parse_affinity(config.cpu_affinity, config.data_parallel_size, os.sched_getaffinity(0))
    except ValueError as error:
        raise ConfigError(f"--cpu-affinity: {error}") from None
    least = min(map(len, lists))
    if config.cpu_threads is not None and config.cpu_threads > least:
        raise ConfigError(f"--cpu-threads {config.cpu_threads} is more than the {least} CPUs of a --cpu-affinity list")


def device_name(device: str) -> str:
    """What --device means: `cpu` (also for auto) or `cuda:N`. Raises ConfigError."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
        raise ConfigError(f"--device must be auto, cpu or cuda:N; got {device!r}")
    return {"auto": "cpu", "cuda": "cuda:0"}.get(device, device)


def _one_of(flag: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{flag} must be one of {', '.join(allowed)}; got {value!r}")


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    if config.max_model_len is None:
        return spec.max_position_embeddings
    if config.max_model_len > spec.max_position_embeddings and not config.allow_long_max_model_len:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the model's context of "
            f"{spec.max_position_embeddings} tokens: use that or less, or add --allow-long-max-model-len"
        )
    return config.max_model_len


def _dtype(config: EngineConfig) -> str:
    """float32 on the CPU keeps greedy answers independent of batch and cache; bfloat16 is what GPUs are made for."""
    if config.dtype != "auto":
        return DTYPES[config.dtype]
    return "bfloat16" if config.device.startswith("cuda") else "float32"


def _kv_cache_bytes(config: EngineConfig) -> int:
    """As asked; else of 40 % of the free memory, at most 4 GiB, the replica's share, or on a GPU 0: it measures."""
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes
    if config.device.startswith("cuda"):
        return 0
    return min(4 << 30, available_bytes() * 2 // 5) // config.data_parallel_size


def _kv_transfer(config: EngineConfig) -> KvTransferConfig | None:
    if config.kv_transfer_config is None and config.kv_offloading_size is None:
        return None
    if config.kv_transfer_config is not None and config.kv_offloading_size is not None:
        raise ConfigError("--kv-offloading-size is short for --kv-transfer-config: give one of them")
    if not config.enable_prefix_caching:
        raise ConfigError("KV tiers extend the prefix cache: leave out --no-enable-prefix-caching")
    if config.device.startswith("cuda"):
        raise ConfigError("KV tiers serve CPU workers so far: leave out --kv-transfer-config, --kv-offloading-size")
    if config.kv_transfer_config is not None:
        flag, make = "--kv-transfer-config", lambda: parse(config.kv_transfer_config or "")
    else:
        flag, make = "--kv-offloading-size", lambda: of_size(config.kv_offloading_size or 0.0)
    try:
        return make()
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None


def available_cpus() -> int:
    return len(os.sched_getaffinity(0))


def environment_api_keys() -> tuple[str, ...]:
    """The API key in SLIPRING_API_KEY, if there is one. Raises ConfigError when no header could hold it."""
    key = os.environ.get("SLIPRING_API_KEY", "")
    if not all("!" <= character <= "~" for character in key):
        raise ConfigError("SLIPRING_API_KEY must be printable ASCII, without spaces")
    return (key,) if key else ()
