"""`Engine`: what the outside sees. Submit, abort, health, stats; start, drain, stop.

Owns the table of live requests. A request of `n` completions becomes n scheduler requests that share their prompt's
blocks; their pieces come to one sink, told apart by `Delta.index`. All methods must be called on the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipring.runtime.admission import Admission
from slipring.runtime.chat_template import ChatTemplate
from slipring.runtime.completion import Completion
from slipring.runtime.config import ConfigError, EngineConfig, ResolvedConfig, resolve
from slipring.runtime.fault_tolerance import FaultTolerance
from slipring.runtime.garbage import IdleCollector
from slipring.runtime.grammar import GrammarCompiler, GrammarSpec
from slipring.runtime.model import ModelError, open_model
from slipring.runtime.replica import Replica, ReplicaDeadError
from slipring.runtime.replicas import Replicas
from slipring.runtime.request import (
    ContextLengthError,
    EngineDeadError,
    GenerationRequest,
    InvalidRequestError,
    Sink,
)
from slipring.runtime.startup import StartupError, StartupEvent, advise, fit_context, open_tiers
from slipring.runtime.stats import Stats, stats_of
from slipring.runtime.tiers.kv_tiers import KvTiers, TierSetupError
from slipring.runtime.tokenizer import Tokenizer
from slipring.scheduler.offload.key import offload_key
from slipring.scheduler.prefix_cache import chain_root, extend_chain
from slipring.scheduler.request import FinishReason, Request
from slipring.shm import wire
from slipring.shm.grammar import Grammar

__all__ = ["ConfigError", "Engine", "Health", "HealthState", "ModelError", "StartupError", "StartupEvent"]

_LONG_TEXT = 2048
"""Characters from which text is rendered or tokenized off the loop: about a millisecond's work."""
_CHARACTERS_PER_TOKEN = 128
"""No text has so many characters for each of its tokens."""
_TEXT_THREADS = 2
"""Long texts at work at once; more wait their turn, so that they cannot crowd out the loop."""
_FLUSH_S = 3.0
"""For blocks that are on their way into files or objects when the engine stops."""


T = TypeVar("T")


class HealthState(Enum):
    STARTING = "starting"
    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    """No replica serves now, but one may again."""
    DRAINING = "draining"
    DEAD = "dead"


class Health(msgspec.Struct, frozen=True):
    state: HealthState
    reason: str | None = None


class Engine:
    def __init__(self, config: EngineConfig) -> None:
        """Read the model's metadata. Raises ModelError or ConfigError, whose messages name the fix."""
        self._model = open_model(config.model)
        self.spec = self._model.spec
        self.config: ResolvedConfig = resolve(config, self.spec)
        self.max_model_len = self.config.max_model_len
        self.max_queued_requests = config.max_queued_requests
        self.max_queued_tokens = config.max_queued_tokens
        self.tokenizer: Tokenizer
        self.chat_template: ChatTemplate | None = None
        self._live: dict[str, list[Completion]] = {}
        self._state = HealthState.STARTING
        self._dead_reason: str | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._ended = asyncio.Event()
        """Set whenever a request ends, for `wait_paused`."""
        self._died = asyncio.Event()
        self._text_pool = ThreadPoolExecutor(_TEXT_THREADS, thread_name_prefix="slipring-text")
        self._grammars = GrammarCompiler(self.spec)
        self._seeds = secrets.SystemRandom() if config.seed == 0 else np.random.default_rng(config.seed)
        self._replicas: Replicas
        self._admission: Admission
        self.fault_tolerance: FaultTolerance
        self._tiers: KvTiers | None = None

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self, on_event: Callable[[StartupEvent], None] | None = None) -> None:
        """Spawn the workers and wait until all can serve. Raises StartupError; nothing is left running then."""
        tell = on_event or (lambda event: None)
        began = time.monotonic()
        advise(self.config, tell)

        def on_progress(progress: wire.Progress) -> None:
            tell(StartupEvent(phase="load weights", done=progress.done, total=progress.total))

        try:
            self._tiers = await open_tiers(self.config, self.spec)
            self._replicas = Replicas(
                self.config,
                self.spec,
                self._on_state,
                on_progress,
                self._fail_requests,
                self._tiers,
            )
            self.fault_tolerance = FaultTolerance(self._replicas)
        except TierSetupError as error:
            raise StartupError(str(error)) from error
        except OSError as error:
            self._close_tiers()
            raise StartupError(f"no shared memory for rings and batch table: {error}. {_SHM_FIX}") from error
        starting = asyncio.ensure_future(self._replicas.start(self.config.user.worker_startup_timeout_s))
        try:
            await asyncio.sleep(0)  # the workers are on their way while the tokenizer is built
            self.tokenizer, self.chat_template = await asyncio.to_thread(self._load_text)
            tell(StartupEvent(phase="tokenizer", seconds=time.monotonic() - began, final=True))
            ready = await starting
            for phase in ready[0].phase_seconds:
                seconds = max(each.phase_seconds.get(phase, 0.0) for each in ready)
                tell(StartupEvent(phase=phase, seconds=seconds, final=True))
            self.config = fit_context(self.config, min(ready, key=lambda each: each.num_blocks), tell)
            self.max_model_len = self.config.max_model_len
            self._replicas.begin(self.config)
        except (ReplicaDeadError, ModelError, ConfigError, OSError) as error:
            explained = isinstance(error, ReplicaDeadError) and error.explained
            last = "" if explained else "\n".join(self._replicas.last_lines)
            raise StartupError(f"{error}\n{last}".rstrip()) from error
        finally:
            if not self._replicas.any_healthy:
                self._replicas.close()
                self._close_tiers()
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
        self._admission = Admission(
            self.config, self.spec, self.tokenizer, self._replicas, self._tiers, self._fail_requests
        )
        self._state = HealthState.HEALTHY

    def _close_tiers(self) -> None:
        if self._tiers is not None:
            self._tiers.close()
            self._tiers = None

    def _load_text(self) -> tuple[Tokenizer, ChatTemplate | None]:
        return self._model.tokenizer(), self._model.chat_template()

    async def drain(self, timeout_s: float) -> None:
        """Take no new work and let what is live finish; after `timeout_s` the rest ends with an error."""
        if self._state is HealthState.HEALTHY:
            self._state = HealthState.DRAINING
            self.resume()
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            self._end_all("the server is shutting down")

    async def stop(self) -> None:
        """End the workers and give everything back. Idempotent."""
        if self._state is not HealthState.DEAD:
            self._state = HealthState.DRAINING
            self._end_all("the server is shutting down")
        if hasattr(self, "_replicas"):
            await self._replicas.shut_down(timeout_s=2.0)
        if self._tiers is not None:
            await self._tiers.flush(_FLUSH_S)
        self._close_tiers()
        self._text_pool.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    async def wait_dead(self) -> str:
        """Returns, with the reason, when the engine can serve no more."""
        await self._died.wait()
        return self._dead_reason or ""

    def collect_when_idle(self) -> None:
        """Run the garbage collector in idle moments only. For processes that do nothing but serve."""
        collector = IdleCollector()
        for replica in self._replicas:
            replica.set_collector(collector)

    @property
    def replicas(self) -> Replicas:
        """By rank; there from `start` on."""
        return self._replicas

    @property
    def worker_last_lines(self) -> list[str]:
        """What the worker of a broken replica, or of the first one, has written last."""
        return self._replicas.last_lines

    @property
    def worker_pids(self) -> list[int]:
        """By rank."""
        return [replica.worker_pid for replica in self._replicas]

    # --- requests -----------------------------------------------------------------------------------------------

    def submit(self, generation: GenerationRequest, sink: Sink) -> None:
        """Start generating; `sink` gets each piece, on the loop, never before this returns.

        Raises InvalidRequestError, ContextLengthError, QueueFullError or EngineDeadError; then nothing was started.
        """
        if self._state is not HealthState.HEALTHY:
            raise EngineDeadError(self._dead_reason or f"the engine is {self._state.value}")
        self._admission.check_rank(generation.data_parallel_rank)
        if generation.request_id in self._live:
            raise InvalidRequestError(f"request id {generation.request_id!r} is in use", "request_id")
        prompt = self._admission.check(generation)
        completions = self._admission.make(
            generation, prompt, functools.partial(self._deliver, generation.request_id, sink)
        )
        self._live[generation.request_id] = completions
        self._idle.clear()
        try:
            self._admission.enter(completions)
        except BaseException:
            self.abort(generation.request_id)
            raise

    def abort(self, request_id: str) -> bool:
        """Forget a request; its sink is called no more. False when it is not live."""
        completions = self._live.pop(request_id, None)
        if completions is None:
            return False
        for completion in completions:
            if not completion.finished:
                completion.finished = True
                completion.metrics.finished[FinishReason.ABORT.value] += 1
                self._drop(completion)
        self._forget(request_id, completions)
        return True

    def finish(self, request_id: str) -> bool:
        """End a request with finish reason `abort`, which its sink is told. False when it is not live."""
        completions = self._live.get(request_id, ())
        for completion in completions:
            self._end(completion, FinishReason.ABORT)
        return bool(completions)

    @property
    def live_ids(self) -> list[str]:
        return list(self._live)

    def pause(self, freeze: bool = False) -> None:
        """Take requests but start none; with `freeze` those that are running stop where they are, too."""
        self._admission.paused = True
        self._replicas.freeze(freeze)

    def resume(self) -> None:
        self._replicas.freeze(False)
        self._admission.resume()

    @property
    def paused(self) -> bool:
        return self._admission.paused

    async def wait_paused(self) -> None:
        """Until nothing runs any more, or somebody has resumed."""
        while self.paused and len(self._live) > self._admission.num_held:
            self._ended.clear()
            await self._ended.wait()

    def reset_prefix_cache(self, external: bool = False) -> None:
        """Forget what free blocks hold, and with `external` what the CPU tier holds. Live requests keep theirs; files
        and objects outlive this process, so they outlive this as well."""
        self._replicas.forget_prefixes()
        if external and self._tiers is not None:
            self._tiers.tiers.reset()

    def _drop(self, completion: Completion) -> None:
        if completion.replica is not None:
            completion.replica.abort(completion.request)

    def check_length(self, text: str) -> None:
        """Refuse a text whose size alone says that it cannot fit. Raises ContextLengthError."""
        least = max(self.tokenizer.least_tokens(text), len(text) // _CHARACTERS_PER_TOKEN)
        if least >= self.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens, and the prompt has at least "
                f"{least}."
            )

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; long texts are tokenized off the loop."""
        return (await self.encode_many([text], add_special_tokens))[0]

    async def encode_many(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        """As `encode`, for several texts at once."""
        size = sum(map(len, texts))
        return await self.text_work(size, self.tokenizer.encode_many, texts, add_special_tokens)

    async def text_work(self, size: int, function: Callable[..., T], *arguments: object) -> T:
        """Call `function`, whose work is on `size` characters: here when they are few, else in a bounded pool."""
        if size < _LONG_TEXT:
            return function(*arguments)
        return await asyncio.get_running_loop().run_in_executor(self._text_pool, function, *arguments)

    async def compile_grammar(self, spec: GrammarSpec, param: str) -> Grammar:
        """Check what an output must match, off the loop. Raises InvalidRequestError, on the field `param`."""
        return await self._grammars.compile(spec, param, self.tokenizer)

    def draw_seed(self) -> int:
        """A seed for a request that brought none."""
        if isinstance(self._seeds, np.random.Generator):
            return int(self._seeds.integers(1 << 63))
        return self._seeds.getrandbits(63)

    def health(self) -> Health:
        if self._state is HealthState.HEALTHY and not self._replicas.any_healthy:
            return Health(HealthState.UNHEALTHY, self._replicas.reason)
        return Health(self._state, self._dead_reason)

    def stats(self) -> Stats:
        return Stats(
            by_rank=tuple(stats_of(replica, self.config) for replica in self._replicas),
            num_rejected=self._admission.num_rejected,
            tiers=None if self._tiers is None else self._tiers.stats(),
            num_in_state=self._replicas.num_in_state(),
        )

    # --- pages of KV for other instances, and from them -----------------------------------------------------------

    @property
    def kv_served_at(self) -> tuple[str, int] | None:
        """(host, port) where other instances find our pages; None: nowhere."""
        return None if self._tiers is None else self._tiers.serves_at

    @property
    def kv_peers(self) -> list[str]:
        """Names of the tiers that are other instances, as `TierLimits.source` names them: `p2p:HOST:PORT`."""
        return [] if self._tiers is None else self._tiers.peers

    def kv_peer(self, name: str) -> str | None:
        """The one of them that is meant by `p2p:HOST:PORT`, in these words or by an address of its own."""
        return None if self._tiers is None else self._tiers.peer(name)

    async def kv_stored(
        self, prompt: Sequence[int] | NDArray[np.int64], cache_salt: str | None, timeout_s: float
    ) -> bool:
        """Wait until other instances find every full block of the prompt here; False when they do not in time."""
        if self._tiers is None:
            return False
        token_ids = np.asarray(prompt, np.int32)
        hashes = await self.text_work(
            len(prompt), extend_chain, chain_root(cache_salt), token_ids, self.config.user.block_size
        )
        return await self._tiers.stored([offload_key(block_hash) for block_hash in hashes], timeout_s)

    def _deliver(self, request_id: str, sink: Sink, delta) -> None:
        if delta.finish_reason is not None:
            completions = self._live.get(request_id)
            if completions is not None and all(completion.finished for completion in completions):
                del self._live[request_id]
                self._forget(request_id, completions)
        sink(delta)

    def _forget(self, request_id: str, completions: list[Completion]) -> None:
        self._admission.forget(request_id, completions)
        for completion in completions:
            completion.request.owner = None  # the two hold each other: no cycle is left for the collector
        self._ended.set()
        if not self._live:
            self._idle.set()

    # --- faults -------------------------------------------------------------------------------------------------

    def _on_state(self, replica: Replica) -> None:
        """A replica's state has changed; nothing has been done about it yet."""
        if self._replicas.all_over and self._state is not HealthState.DEAD:
            self._state = HealthState.DEAD
            self._dead_reason = replica.fault.reason if replica.fault else f"replica {replica.rank} was removed"
            self._died.set()

    def _fail_requests(self, requests: list[Request], reason: str) -> None:
        now = time.monotonic()
        for request in requests:
            if request.owner is not None:
                request.owner.finish(FinishReason.ERROR, now, error=reason)

    def _end_all(self, reason: str) -> None:
        for completions in list(self._live.values()):
            for completion in completions:
                self._end(completion, FinishReason.ERROR, reason)

    def _end(self, completion: Completion, reason: FinishReason, error: str | None = None) -> None:
        if not completion.finished:
            self._drop(completion)
            completion.finish(reason, time.monotonic(), error=error)


_SHM_FIX = "In a container, start it with a larger --shm-size, or lower --max-num-seqs or --max-model-len."
