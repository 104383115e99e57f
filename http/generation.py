"""From a checked body and its prompts to an answer: submit one engine request per prompt, stream or collect.

Choices are numbered prompt_index * n + sample, as OpenAI and vLLM do. All requests of one body stand and fall
together: when the engine refuses one, those already submitted are aborted and the refusal is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from slipring.http import remote_kv
from slipring.http.bodies import SamplingBody
from slipring.http.call_limit import CallLimit
from slipring.http.errors import engine_failed, from_engine
from slipring.http.exchange import ApiResponse
from slipring.http.output_form import PLAIN, OutputForm
from slipring.http.placement import Placement
from slipring.http.prompts import Prompt
from slipring.http.reply import Choice, Collector, ReplyHead, Usage, Work
from slipring.http.sampling import stop_strings, tier_limits
from slipring.http.served import ServedModel
from slipring.http.stream import FrameStream, Renderer
from slipring.http.tools import MANY
from slipring.runtime.grammar import Grammar
from slipring.runtime.request import Delta, EngineError, GenerationRequest

_SIZE_OF_A_SCORE = 6
"""What one alternative of one prompt token takes to write, in characters of text work."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked for, checked."""

    body: SamplingBody
    prompts: list[Prompt]
    param: str
    """The field that holds the prompt, for error messages."""
    max_tokens: int | None
    """None: the rest of the context. 0: nothing is generated (echo only)."""
    logprobs: int
    output: OutputForm = PLAIN
    """How the answers are taken apart."""
    grammar: Grammar | None = None
    """What they must match."""
    grammar_param: str | None = None
    """The field that asked for it."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    scores: int = -1
    """Alternatives to report for the prompt's tokens; -1: none."""

    @property
    def n(self) -> int:
        return 1 if self.body.n is None else self.body.n

    @property
    def best_of(self) -> int:
        """Completions that are generated for each prompt, of which the `n` best are told."""
        return self.body.best_of or self.n

    @property
    def skips_special_tokens(self) -> bool:
        """They add nothing to the text."""
        if self.body.skip_special_tokens is None:
            return not self.output.needs_special_tokens
        return self.body.skip_special_tokens

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of a choice."""
        return self.prompts[index // self.n]

    @property
    def echo(self) -> list[str]:
        """For each choice, the text that comes before what is generated."""
        return [prompt.echo for prompt in self.prompts for _ in range(self.n)]


class Style(Protocol):
    """How one API writes its answers."""

    def reply(
        self, model: ServedModel, plan: Plan, head: ReplyHead, choices: list[Choice], usage: Usage
    ) -> dict[str, Any]:
        """The body of an answer that is sent at once."""
        ...

    def frames(self, model: ServedModel, plan: Plan, head: ReplyHead, usage: Usage) -> Renderer:
        """What writes the events of a streamed answer."""
        ...


class Flights:
    """Answers in flight, so that a shutdown can end them."""

    def __init__(self) -> None:
        self._open: set[FrameStream | Collector] = set()

    def __len__(self) -> int:
        return len(self._open)

    def track(self, answer: FrameStream | Collector) -> None:
        self._open.add(answer)
        answer.on_end = lambda: self._open.discard(answer)

    def drop(self, answer: FrameStream | Collector) -> None:
        self._open.discard(answer)

    def fail_all(self, message: str) -> None:
        for answer in list(self._open):
            answer.fail(engine_failed(message))


class Generation:
    """The engine requests behind one answer."""

    def __init__(
        self,
        model: ServedModel,
        requests: Sequence[GenerationRequest],
        param: str,
        num_choices: int,
        limits_calls: OutputForm | None = None,
    ) -> None:
        """`num_choices`: completions that are waited for; without requests each ends at once.

        limits_calls: ends completions that have made as many tool calls as they may.
        """
        self._limits_calls = limits_calls if requests else None
        self._engine = model.engine
        self._requests = requests
        self._param = param
        self._num_choices = num_choices

    @classmethod
    def of(cls, model: ServedModel, plan: Plan, reply_id: str, place: Placement) -> Generation:
        """Raises ApiError when a prompt leaves no room."""
        requests = list(_requests(model, plan, reply_id, place))
        output = plan.output
        limited = output.tools is not None and output.limit < MANY and plan.grammar is None
        return cls(model, requests, plan.param, len(plan.prompts) * plan.best_of, output if limited else None)

    def start(self, push: Callable[[Delta], None]) -> None:
        """Raises ApiError; then nothing is left running."""
        if self._limits_calls is not None:
            push = CallLimit(self._limits_calls, self._requests[0].n, push, self.cancel).push
        try:
            for position, request in enumerate(self._requests):
                self._engine.submit(request, _sink(position * request.n, push))
        except EngineError as error:
            self.cancel()
            raise from_engine(error, self._param) from None
        except BaseException:
            self.cancel()
            raise
        if not self._requests:
            for index in range(self._num_choices):
                push(Delta(index=index, finish_reason="length"))

    def cancel(self) -> None:
        for request in self._requests:
            self._engine.abort(request.request_id)


def _sink(base: int, push: Callable[[Delta], None]) -> Callable[[Delta], None]:
    """Numbers the choices of a later prompt from `base` on."""
    if base == 0:
        return push

    def sink(delta: Delta) -> None:
        delta.index += base
        push(delta)

    return sink


async def answer(
    model: ServedModel, flights: Flights, head: ReplyHead, plan: Plan, style: Style, place: Placement
) -> ApiResponse:
    remote_kv.check(model.engine, plan.body)
    each, lengths = plan.best_of, [len(prompt.token_ids) for prompt in plan.prompts]
    model.check_choices(len(lengths) * each, sum(lengths) * each)
    generation = Generation.of(model, plan, head.id, place)
    usage = Usage(lengths, each)
    if plan.body.stream:
        stream = FrameStream(style.frames(model, plan, head, usage), len(plan.echo), generation.cancel)
        generation.start(stream.push)
        flights.track(stream)
        response = ApiResponse.events(stream)
    else:
        response = ApiResponse.json(await _whole(model, flights, generation, head, plan, style, usage))
    response.work = Work(head, plan.body, plan.max_tokens, usage)
    return response


async def _whole(
    model: ServedModel,
    flights: Flights,
    generation: Generation,
    head: ReplyHead,
    plan: Plan,
    style: Style,
    usage: Usage,
) -> dict[str, Any]:
    """The body of an answer that is sent at once."""
    echo = [prompt.echo for prompt in plan.prompts for _ in range(plan.best_of)]
    choices = _best(await collect(flights, generation, Collector(echo, usage)), plan.best_of, plan.n)
    # A long prompt's log-probabilities are too much for the loop.
    size = usage.num_prompt * (1 + plan.scores) * _SIZE_OF_A_SCORE
    whole = await model.engine.text_work(size, style.reply, model, plan, head, choices, usage)
    if remote_kv.hands_over(plan.body):
        prompts = [prompt.token_ids for prompt in plan.prompts]
        whole["kv_transfer_params"] = await remote_kv.handover(model.engine, plan.body, prompts, head.id)
    return whole


def _best(choices: list[Choice], each: int, n: int) -> list[Choice]:
    """Of each prompt's completions the `n` likeliest by token, best first."""
    if each == n:
        return choices
    groups = [choices[begin : begin + each] for begin in range(0, len(choices), each)]
    return [choice for group in groups for choice in sorted(group, key=lambda c: -c.mean_logprob)[:n]]


async def collect(flights: Flights, generation: Generation, collector: Collector) -> list[Choice]:
    generation.start(collector.push)
    flights.track(collector)
    try:
        return await collector.wait()
    except BaseException:
        generation.cancel()  # the client has gone (cancelled), or one of several prompts failed
        raise
    finally:
        flights.drop(collector)


def _requests(model: ServedModel, plan: Plan, reply_id: str, place: Placement) -> Iterable[GenerationRequest]:
    body = plan.body
    least = 0 if plan.max_tokens == 0 else 1
    rooms = [model.room(len(prompt.token_ids), plan.param, least) for prompt in plan.prompts]
    if plan.max_tokens == 0 and plan.scores < 0:
        return
    for prompt, room in zip(plan.prompts, rooms, strict=True):
        max_tokens = room if plan.max_tokens is None else min(plan.max_tokens, room)
        # Unseeded prompts of a batch draw one seed each, or equal prompts would get equal answers.
        seed = model.engine.draw_seed() if body.seed is None else body.seed
        yield GenerationRequest(
            request_id=model.engine_id(reply_id),
            prompt_token_ids=prompt.token_ids,
            params=msgspec.structs.replace(
                model.rules.params(body, max_tokens, seed),
                logprobs=plan.logprobs if plan.best_of == plan.n else max(0, plan.logprobs),
                bad_words=plan.bad_words,
                prompt_logprobs=plan.scores,
            ),
            n=plan.best_of,
            stop=stop_strings(body),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=plan.skips_special_tokens,
            cache_salt=body.cache_salt,
            tier_limits=tier_limits(body),
            priority=body.priority or 0,
            grammar=plan.grammar,
            grammar_param=plan.grammar_param,
            data_parallel_rank=place.rank,
            session=place.session,
        )
