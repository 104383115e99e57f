"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from slipring.http.bodies import CompletionBody, decode
from slipring.http.choices import ChoicesStyle, prompt_details, writer_of
from slipring.http.errors import bad_request
from slipring.http.exchange import ApiRequest, ApiResponse
from slipring.http.frames import CompletionRenderer
from slipring.http.generation import Flights, Plan, answer
from slipring.http.logprobs import TextOffset
from slipring.http.placement import placement
from slipring.http.prompts import Prompt, Wanted, cut_of, read_prompts
from slipring.http.reply import Choice, Usage
from slipring.http.sampling import check_logprobs, check_max_tokens, check_min_tokens, is_set
from slipring.http.served import ServedModel
from slipring.http.structured import compile_structured, structured_output

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""


class CompletionStyle(ChoicesStyle):
    object_name = "text_completion"

    def choice(self, model: ServedModel, index: int, choice: Choice, plan: Plan, usage: Usage) -> dict[str, Any]:
        found: dict[str, Any] = {
            "index": index,
            "text": choice.text,
            "logprobs": _logprobs(model, choice, plan, plan.prompt_of(index)),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **prompt_details(model, plan, plan.prompt_of(index), choice),
        }
        if plan.body.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    def renderer(self, plan: Plan) -> type[CompletionRenderer]:
        return CompletionRenderer


_STYLE = CompletionStyle()


def _logprobs(model: ServedModel, choice: Choice, plan: Plan, prompt: Prompt) -> dict[str, Any] | None:
    if plan.logprobs < 0:
        return None
    writer = writer_of(model, plan)
    found = writer.completion(choice.logprobs, TextOffset(len(prompt.echo)))
    if not plan.body.echo or choice.prompt_logprobs is None:
        return found
    echoed = writer.echoed(prompt.token_ids, prompt.echo, choice.prompt_logprobs, plan.logprobs)
    return {name: echoed[name] + found[name] for name in found}


async def create_completion(model: ServedModel, flights: Flights, request: ApiRequest) -> ApiResponse:
    body = decode(await request.read(), CompletionBody)
    model.check_name(body.model)
    model.rules.check(body)
    max_tokens = _check(body)
    cut = cut_of(model, body.truncate_prompt_tokens, body.truncation_side, "left", max_tokens)
    wanted = Wanted("prompt", body.add_special_tokens is not False, cut, bool(body.echo), body.best_of or body.n or 1)
    prompts = await read_prompts(model, body.prompt, wanted)
    logprobs = -1 if body.logprobs is None else body.logprobs
    scores = max(-1 if body.prompt_logprobs is None else body.prompt_logprobs, logprobs if body.echo else -1)
    bad_words = await model.bad_words(body.bad_words or [])
    grammar, param = await compile_structured(model.engine, body)
    plan = Plan(
        body, prompts, "prompt", max_tokens, logprobs,
        grammar=grammar, grammar_param=param, bad_words=bad_words, scores=scores,
    )  # fmt: skip
    head = model.head(f"cmpl-{request.request_id}", body.model)
    return await answer(model, flights, head, plan, _STYLE, placement(request))


def _check(body: CompletionBody) -> int:
    """The number of tokens asked for."""
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    check_max_tokens(max_tokens, "max_tokens", least=0 if body.echo else 1)
    check_min_tokens(body, max_tokens)
    check_logprobs(body.logprobs, "logprobs")
    if is_set(body.suffix):
        raise bad_request("`suffix` is not supported: this model does not fill in the middle.", "suffix")
    structured_output(body)
    return max_tokens
