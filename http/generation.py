"""From a checked body and its prompts to an answer: submit one engine request per prompt, stream or collect.

Choices are numbered prompt_index * n + sample, as OpenAI and vLLM do. All requests of one body stand and fall
together: when the engine refuses one, those already submitted are aborted and the refusal is the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from slipring.http.bodies import SamplingBody
from slipring.http.call_limit import CallLimit
from slipring.http.errors import from_engine
from slipring.http.exchange import ApiResponse
from slipring.http.output_form import PLAIN, OutputForm
from slipring.http.placement import Placement
from slipring.http.reply import Choice, Collector, ReplyHead, Usage, Work
from slipring.http.sampling import stop_strings
from slipring.http.served import ServedModel
from slipring.http.stream import FrameStream, Renderer
from slipring.http.tools import MANY
from slipring.runtime.grammar import Grammar
from slipring.runtime.request import Delta, EngineError, GenerationRequest


@dataclass(frozen=True, slots=True)
class Prompt:
    token_ids: Sequence[int] | NDArray[np.int64]
    echo: str = ""
    """Text that comes before what is generated."""


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

    @property
    def n(self) -> int:
        return 1 if self.body.n is None else self.body.n

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
            answer.fail(message)


class Generation:
    """The engine requests behind one answer."""

    def __init__(self, model: ServedModel, plan: Plan, reply_id: str, place: Placement) -> None:
        self._engine = model.engine
        self._plan = plan
        self._requests = list(_requests(model, plan, reply_id, place))

    def start(self, push: Callable[[Delta], None]) -> None:
        """Raises ApiError; then nothing is left running."""
        output = self._plan.output
        if output.tools is not None and output.limit < MANY and self._plan.grammar is None:
            push = CallLimit(output, self._plan.n, push, self.cancel).push
        try:
            for position, request in enumerate(self._requests):
                self._engine.submit(request, _sink(position * self._plan.n, push))
        except EngineError as error:
            self.cancel()
            raise from_engine(error, self._plan.param) from None
        except BaseException:
            self.cancel()
            raise
        if not self._requests:
            for index in range(len(self._plan.prompts) * self._plan.n):
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
    model.check_choices(len(plan.prompts) * plan.n, sum(len(prompt.token_ids) for prompt in plan.prompts) * plan.n)
    generation = Generation(model, plan, head.id, place)
    usage = Usage([len(prompt.token_ids) for prompt in plan.prompts], plan.n)
    if plan.body.stream:
        stream = FrameStream(style.frames(model, plan, head, usage), len(plan.echo), generation.cancel)
        generation.start(stream.push)
        flights.track(stream)
        response = ApiResponse.events(stream)
    else:
        choices = await _collect(flights, generation, Collector(plan.echo, usage))
        response = ApiResponse.json(style.reply(model, plan, head, choices, usage))
    response.work = Work(head, plan.body, plan.max_tokens, usage)
    return response


async def _collect(flights: Flights, generation: Generation, collector: Collector) -> list[Choice]:
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
    if plan.max_tokens == 0:
        for prompt in plan.prompts:
            model.room(len(prompt.token_ids), plan.param, least=0)
        return
    for prompt in plan.prompts:
        room = model.room(len(prompt.token_ids), plan.param)
        max_tokens = room if plan.max_tokens is None else min(plan.max_tokens, room)
        # Unseeded prompts of a batch draw one seed each, or equal prompts would get equal answers.
        seed = model.engine.draw_seed() if body.seed is None else body.seed
        yield GenerationRequest(
            request_id=model.engine_id(reply_id),
            prompt_token_ids=prompt.token_ids,
            params=model.rules.params(body, max_tokens, plan.logprobs, seed),
            n=plan.n,
            stop=stop_strings(body),
            include_stop_str_in_output=bool(body.include_stop_str_in_output),
            skip_special_tokens=_skips_special_tokens(plan),
            cache_salt=body.cache_salt,
            priority=body.priority or 0,
            grammar=plan.grammar,
            data_parallel_rank=place.rank,
            session=place.session,
        )


def _skips_special_tokens(plan: Plan) -> bool:
    if plan.body.skip_special_tokens is None:
        return not plan.output.needs_special_tokens
    return plan.body.skip_special_tokens
