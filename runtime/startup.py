"""What the engine settles once, while it starts, and how it tells of it: phases, notes, and why it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from slipring.runtime.config import ConfigError, ResolvedConfig
from slipring.runtime.cpu_features import cpu_features, lacks_bfloat16
from slipring.runtime.tiers.kv_tiers import KvTiers, TierSetupError
from slipring.shm import wire
from slipring.shm.pages import PageShape
from slipring.shm.spec import ModelSpec


class StartupEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine is busy with while it starts. `done` of `total` bytes while weights load."""

    phase: str
    seconds: float = 0.0
    done: int = 0
    total: int = 0
    final: bool = False
    """The phase is over; `seconds` is how long it took."""
    note: str | None = None
    """Something to be told besides; then nothing else in here means anything."""


class StartupError(Exception):
    """The engine cannot start; the message says why and what to do."""


Tell = Callable[[StartupEvent], None]


def advise(config: ResolvedConfig, tell: Tell) -> None:
    """Settings that can be served, and hardly be meant."""
    if config.device == "cpu" and config.dtype == "bfloat16" and lacks_bfloat16(cpu_features()):
        note = (
            "this CPU has no bf16 instructions (AVX512_BF16, AMX): --dtype bfloat16 is several times slower than "
            "float32 here; leave it out"
        )
        tell(StartupEvent(phase="note", note=note))


async def open_tiers(config: ResolvedConfig, spec: ModelSpec) -> KvTiers | None:
    """Raises TierSetupError; nothing is left open then."""
    if config.kv_transfer is None:
        return None
    shape = PageShape.of(spec, config.user.block_size, config.dtype)
    loop = asyncio.get_running_loop()
    # Off the loop: a directory is looked through, a service is asked what it holds.
    tiers = await asyncio.to_thread(KvTiers, config.kv_transfer, spec, shape, config.dtype, config.max_model_len, loop)
    try:
        await tiers.start()
    except TierSetupError:
        tiers.close()
        raise
    return tiers


def fit_context(config: ResolvedConfig, ready: wire.Ready, tell: Tell) -> ResolvedConfig:
    """No request may be longer than the whole pool, so the context ends where the pool does. Raises ConfigError."""
    capacity = ready.num_blocks * config.user.block_size
    user = config.user
    if capacity < config.max_model_len and user.max_model_len is not None:
        need = -(-config.max_model_len // user.block_size) * ready.block_bytes
        raise ConfigError(
            f"--max-model-len {config.max_model_len} needs {need / 2**20:.0f} MiB of KV cache, and there are "
            f"{ready.num_blocks * ready.block_bytes / 2**20:.0f} MiB: use --max-model-len {capacity} or less, "
            f"or --kv-cache-memory-bytes {need}"
        )
    if capacity < config.max_model_len:
        tell(
            StartupEvent(
                phase="note",
                note=f"the context is cut from {config.max_model_len} to {capacity} tokens: the KV cache holds "
                f"{ready.num_blocks} blocks; --kv-cache-memory-bytes makes it larger",
            )
        )
    most = min(config.max_model_len, capacity)
    return msgspec.structs.replace(config, max_model_len=most, num_blocks=ready.num_blocks)
