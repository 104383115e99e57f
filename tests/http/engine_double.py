"""An engine without a model, for tests of the outside face alone: it answers a script, or what a test pushes.

Obeys `slipring.runtime.engine.Engine`'s interface. Its tokenizer has one token per byte, so lengths are easy to see.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from slipring.runtime.chat_template import ChatTemplate
from slipring.runtime.engine import Health, HealthState
from slipring.runtime.grammar import Grammar, GrammarCompiler, GrammarSpec
from slipring.runtime.metrics import Metrics
from slipring.runtime.prompt_logprobs import PromptLogprobs
from slipring.runtime.request import Delta, GenerationRequest, Sink, TokenLogprob
from slipring.runtime.stats import ReplicaStats, Stats
from slipring.shm.spec import ModelSpec, SamplingDefaults

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'alien' %}{{ raise_exception('no aliens') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}"
    "{% if flavour %}<{{ flavour }}>{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EOS = 257
VOCAB = 300


class ByteTokenizer:
    vocab_size = VOCAB
    document = b""
    special_ids = frozenset({EOS})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids, skip_special_tokens: bool = True, continuation: bool = False) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        return text.encode()[0] if len(text.encode()) == 1 else None

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b""

    def byte_table(self, skip_special_tokens: bool) -> dict[int, bytes]:
        return {token_id: self.token_bytes(token_id) for token_id in range(VOCAB)}

    def all_token_bytes(self, vocab_size: int) -> list[bytes]:
        return [self.token_bytes(token_id) for token_id in range(vocab_size)]


class EngineDouble:
    """`script` is what every completion says. With `script` None the test itself calls `say` and `end`."""

    def __init__(
        self,
        script: str | None = "Hello!",
        max_model_len: int = 200,
        template: str | None = TEMPLATE,
        defaults: SamplingDefaults | None = None,
    ) -> None:
        self.script = script
        self.max_model_len = max_model_len
        self.max_queued_requests = 4096
        self.max_queued_tokens = 4_000_000
        self.tokenizer = ByteTokenizer()
        self.chat_template = None if template is None else ChatTemplate(template)
        self.spec = spec(defaults or SamplingDefaults())
        self._grammars = GrammarCompiler(self.spec)
        self.state = HealthState.HEALTHY
        self.reason: str | None = None
        self.requests: list[GenerationRequest] = []
        self.sinks: dict[str, Sink] = {}
        self.aborted: list[str] = []
        self.refuse: Exception | None = None
        self.refuse_after = 0
        self.num_seeds = 0
        self.metrics = [Metrics()]
        """By rank."""

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        if self.refuse is not None and len(self.requests) >= self.refuse_after:
            raise self.refuse
        assert request.request_id not in self.sinks
        self.requests.append(request)
        self.sinks[request.request_id] = sink
        if self.script is not None:
            asyncio.get_running_loop().call_soon(self._play, request)

    def abort(self, request_id: str) -> bool:
        self.aborted.append(request_id)
        return self.sinks.pop(request_id, None) is not None

    def health(self) -> Health:
        return Health(self.state, self.reason)

    def draw_seed(self) -> int:
        self.num_seeds += 1
        return 999 + self.num_seeds

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    async def encode_many(self, texts: list[str], add_special_tokens: bool = True) -> list[list[int]]:
        return [await self.encode(text, add_special_tokens) for text in texts]

    async def compile_grammar(self, spec: GrammarSpec, param: str) -> Grammar:
        return await self._grammars.compile(spec, param, self.tokenizer)  # type: ignore[arg-type]

    def check_length(self, text: str) -> None:
        return

    async def text_work(self, size: int, function: Callable[..., Any], *arguments: object) -> Any:
        await asyncio.sleep(0)  # as when it is done off the loop
        return function(*arguments)

    def stats(self) -> Stats:
        """As many replicas as there are `metrics`; all requests run on the first."""
        return Stats(by_rank=tuple(map(self._of_rank, range(len(self.metrics)))), num_rejected=4)

    def _of_rank(self, rank: int) -> ReplicaStats:
        m = self.metrics[rank]
        return ReplicaStats(
            num_running=0 if rank else len(self.sinks), num_waiting=rank, kv_cache_usage=0.5, num_blocks=10 + rank,
            num_free_blocks=5, num_cached_blocks=1, prefix_cache_queries=4 + rank, prefix_cache_hits=3,
            external_cache_hits=rank,
            prompt_tokens=7 + rank, generation_tokens=9, num_preemptions=0, num_steps=2, finished=m.finished,
            ttft_s=m.ttft_s, itl_s=m.itl_s, requests=m.requests, num_drafts=rank, num_draft_tokens=2 * rank,
            num_accepted_per_position=(2, 1)[:rank],
            cache_config={"block_size": "16", "num_gpu_blocks": str(10 + rank)}, faults=m.faults,
        )  # fmt: skip

    # What a test does in the engine's place.

    def say(self, text: str, index: int = 0, position: int = -1, logprobs: bool = False, cached: int = 0) -> None:
        entries = [TokenLogprob(b, -0.5, 1, ((b, -0.5),)) for b in text.encode()] if logprobs else None
        ids = tuple(text.encode("utf-8", "replace"))
        self._push(position, Delta(index=index, text=text, token_ids=ids, logprobs=entries, num_cached_tokens=cached))

    def end(
        self,
        text: str = "",
        reason: str = "stop",
        index: int = 0,
        position: int = -1,
        error: str | None = None,
        stop_reason: int | str | None = None,
        error_param: str | None = None,
    ) -> None:
        ids = tuple(text.encode())
        self._push(position, Delta(index=index, text=text, token_ids=ids, finish_reason=reason, error=error,
                                   stop_reason=stop_reason, error_param=error_param))  # fmt: skip

    def _push(self, position: int, delta: Delta) -> None:
        sink = self.sinks.get(self.requests[position].request_id)
        if sink is not None:
            sink(delta)

    def _play(self, request: GenerationRequest) -> None:
        """Letter by letter, all choices in turn, cut at max_tokens."""
        sink = self.sinks.get(request.request_id)
        if sink is None:
            return
        assert self.script is not None
        if request.params.max_tokens == 0:
            self._answer_prompt(request, sink)
            return
        data = self.script.encode()[: request.params.max_tokens]
        reason = "length" if len(data) == request.params.max_tokens else "stop"
        wants = request.params.logprobs
        ended: Counter[int] = Counter()
        for position, byte in enumerate(data):
            for index in range(request.n):
                last = position == len(data) - 1
                ended[index] += last
                top = tuple((byte - i, -0.5 - i) for i in range(wants))
                entries = [TokenLogprob(byte, -0.5, 1, top)] if wants >= 0 else None
                sink(Delta(index=index, text=chr(byte), token_ids=(byte,), logprobs=entries,
                           prompt_logprobs=None if position else scores_of(request),
                           finish_reason=reason if last else None))  # fmt: skip
        self.sinks.pop(request.request_id, None)

    def _answer_prompt(self, request: GenerationRequest, sink: Sink) -> None:
        """What is asked of the prompt alone: log-probabilities, or its first ids as a hidden state."""
        embedding = None
        if request.params.embedding_size:
            embedding = np.array([*request.prompt_token_ids, 0, 0, 0][:4], np.float32)
        for index in range(request.n):
            sink(Delta(index=index, finish_reason="length", embedding=embedding, prompt_logprobs=scores_of(request)))
        self.sinks.pop(request.request_id, None)


def scores_of(request: GenerationRequest) -> PromptLogprobs | None:
    """Every prompt token has the log-probability -1 / 4 and rank 2; the likelier ones are 32, 33, ..."""
    if (num_top := request.params.prompt_logprobs) < 0:
        return None
    records = np.empty((len(request.prompt_token_ids) - 1, 2 + 2 * num_top), np.int32)
    records[:, 0] = np.float32(-0.25).view(np.int32)
    records[:, 1] = 2
    records[:, 2 : 2 + num_top] = 32 + np.arange(num_top)
    records[:, 2 + num_top :] = np.float32(-0.125).view(np.int32)
    return PromptLogprobs([records.reshape(-1)], num_top)


def spec(defaults: SamplingDefaults) -> ModelSpec:
    return ModelSpec(
        architecture="llama", name="double", path="/double", format="gguf", files=(), tensors=(), dtype="float32",
        vocab_size=VOCAB, hidden_size=4, intermediate_size=1, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=1,
        max_position_embeddings=200, rms_norm_eps=1e-5, rope_theta=1e4, eos_token_ids=(EOS,),
        sampling_defaults=defaults,
    )  # fmt: skip
