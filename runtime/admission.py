"""`Admission`: a request's way from its submission into a replica's line.

It is checked and the queue bounded; its completions are made; its prompt is hashed, a slice each turn of the loop, so
that a replica can be chosen by what it knows of it. While the engine is paused requests are held before that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipring.runtime.completion import Completion
from slipring.runtime.config import ResolvedConfig
from slipring.runtime.detokenizer import Detokenizer
from slipring.runtime.replicas import Replicas, Unavailable
from slipring.runtime.request import (
    ContextLengthError,
    EngineDeadError,
    GenerationRequest,
    InvalidRequestError,
    QueueFullError,
    Sink,
    check_request,
)
from slipring.runtime.tiers.kv_tiers import KvTiers
from slipring.runtime.tokenizer import Tokenizer
from slipring.scheduler.request import Request, TierLimits
from slipring.shm import wire
from slipring.shm.spec import ModelSpec

_HASH_SLICE = 512
"""Blocks hashed in one turn of the loop, about half a millisecond. A thread would hold the interpreter's lock for
longer than that at a time."""


class Admission:
    def __init__(
        self,
        config: ResolvedConfig,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        replicas: Replicas,
        tiers: KvTiers | None,
        fail: Callable[[list[Request], str], None],
    ) -> None:
        """`config`: with the context that the pool holds. `fail` ends requests with an error."""
        self._config = config
        self._spec = spec
        self._tokenizer = tokenizer
        self._replicas = replicas
        self._tiers = tiers
        self._fail = fail
        self._eos = frozenset(spec.eos_token_ids)
        self.num_rejected = 0
        """Requests that the full queue had no room for."""
        self._num_hashing = 0
        """Prompt tokens of requests that are not in line yet, because their prompts are being hashed."""
        self.paused = False
        self._held: dict[str, list[Request]] = {}
        """By request id, completions of requests that arrived while paused."""

    @property
    def num_held(self) -> int:
        """Requests that wait for the engine to go on."""
        return len(self._held)

    def check_rank(self, rank: int | None) -> None:
        """That a replica can take a request for this rank; which one will, its prefixes are to tell. Raises
        InvalidRequestError or EngineDeadError."""
        if rank is not None and not 0 <= rank < len(self._replicas):
            raise InvalidRequestError(
                f"data_parallel_rank {rank} is out of range: there are {len(self._replicas)} ranks, from 0",
                "X-data-parallel-rank",
            )
        try:
            self._replicas.open_to(rank)
        except Unavailable as error:
            raise EngineDeadError(str(error)) from None

    def check(self, generation: GenerationRequest) -> NDArray[np.int32]:
        """Refuse what cannot be computed, or what there is no room to wait for; its prompt. Raises
        InvalidRequestError, ContextLengthError or QueueFullError."""
        check_request(generation, self._spec.vocab_size)
        if generation.params.embedding_size not in (0, min(self._spec.hidden_size, wire.REPORT_WORDS)):
            most = f"at most {wire.REPORT_WORDS} can be reported"
            raise InvalidRequestError(f"the model's state has {self._spec.hidden_size} numbers, and {most}", "model")
        prompt = np.asarray(generation.prompt_token_ids, np.int64)
        if prompt.ndim != 1 or prompt.size == 0:
            raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
        if prompt.min() < 0 or prompt.max() >= self._spec.vocab_size:
            raise InvalidRequestError(f"token ids must be from 0 to {self._spec.vocab_size - 1}", "prompt")
        if prompt.size + min(1, generation.params.max_tokens) > self._config.max_model_len:
            raise ContextLengthError(
                f"This model's maximum context length is {self._config.max_model_len} tokens, and the prompt has "
                f"{prompt.size}: it must leave room for at least one new token.",
                "prompt",
            )
        self._check_queue(generation.n, int(prompt.size))
        return prompt.astype(np.int32)

    def _check_queue(self, n: int, num_tokens: int) -> None:
        """Bounded in requests and in tokens; a lone request always passes."""
        user = self._config.user
        waiting = sum(replica.load[1] for replica in self._replicas) + len(self._held)
        tokens = sum(replica.num_waiting_tokens for replica in self._replicas) + self._num_hashing
        full = waiting + n > user.max_queued_requests or tokens + n * num_tokens > user.max_queued_tokens
        if full and (waiting or tokens):
            self.num_rejected += 1
            raise QueueFullError(
                f"{waiting} requests with {tokens} tokens are waiting already "
                f"(--max-queued-requests {user.max_queued_requests}, --max-queued-tokens {user.max_queued_tokens})"
            )

    def make(self, generation: GenerationRequest, prompt: NDArray[np.int32], sink: Sink) -> list[Completion]:
        room = self._config.max_model_len - len(prompt)
        max_tokens = min(generation.params.max_tokens, room)
        arrival = time.monotonic()
        completions: list[Completion] = []
        nowhere_yet = self._replicas[0].metrics
        for index in range(generation.n):
            request = Request(
                prompt,
                msgspec.structs.replace(generation.params, choice=index, max_tokens=max_tokens),
                arrival=arrival,
                priority=generation.priority,
                cache_salt=generation.cache_salt,
                tier_limits=self._tier_limits(generation, len(prompt)),
                leader=completions[0].request if completions else None,
                # Where a grammar leaves nothing else, a request ends even if it would ignore ends of sequence.
                stop_token_ids=self._eos if generation.grammar is not None else (),
            )
            detokenizer = Detokenizer(
                self._tokenizer,
                generation.stop,
                generation.include_stop_str_in_output,
                generation.skip_special_tokens,
                generation.params.min_tokens,
            )
            completions.append(Completion(generation, index, request, detokenizer, self._eos, sink, nowhere_yet))
        return completions

    def _tier_limits(self, generation: GenerationRequest, num_prompt: int) -> TierLimits:
        limits = generation.tier_limits
        if self._tiers is None:
            return limits
        if limits.source is not None:
            limits = dataclasses.replace(limits, source=self._tiers.peer(limits.source))
        if not self._tiers.prompts_only:
            return limits
        most = num_prompt if limits.max_store_tokens is None else min(num_prompt, limits.max_store_tokens)
        return dataclasses.replace(limits, max_store_tokens=most)

    def enter(self, completions: list[Completion]) -> None:
        """Put a request in line, as soon as may be."""
        requests = [completion.request for completion in completions]
        self._num_hashing += requests[0].num_prompt * len(requests)
        self._enqueue(requests)

    def forget(self, request_id: str, completions: list[Completion]) -> None:
        """The request has ended, wherever it was."""
        if (held := self._held.pop(request_id, None)) is not None:
            self._num_hashing -= held[0].num_prompt * len(held)
        if not any(completion.replica for completion in completions):  # it ended before it was in any line
            completions[0].metrics.prompt_tokens += completions[0].request.num_prompt

    def resume(self) -> None:
        """Requests that were held go in line."""
        self.paused = False
        held, self._held = self._held, {}
        for requests in held.values():
            self._enqueue(requests)

    def _enqueue(self, requests: list[Request]) -> None:
        """Hash the prompt, a slice each turn of the loop, then hand over what was not aborted in the meantime."""
        first = requests[0]
        live = [request for request in requests if request.owner is not None and not request.owner.finished]
        if not live:
            self._num_hashing -= first.num_prompt * len(requests)
            return
        if self.paused:
            self._held[live[0].owner.request_id] = requests
            return
        if self._config.user.enable_prefix_caching and not first.hash_prompt(self._config.user.block_size, _HASH_SLICE):
            asyncio.get_running_loop().call_soon(self._enqueue, requests)
            return
        self._num_hashing -= first.num_prompt * len(requests)
        try:
            generation = live[0].owner.generation
            replica = self._replicas.choose(first.block_hashes, generation.data_parallel_rank, generation.session)
        except Unavailable as error:  # since the submission
            self._fail(live, str(error))
            return
        replica.metrics.prompt_tokens += first.num_prompt
        for request in live:
            request.block_hashes = first.block_hashes.copy()
            request.owner.place(replica)
            replica.add(request)
