"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from slipring.http import config as limits
from slipring.http.bodies import CompletionBody, decode
from slipring.http.choices import ChoicesStyle
from slipring.http.errors import ApiError, bad_request
from slipring.http.exchange import ApiRequest, ApiResponse
from slipring.http.frames import CompletionRenderer
from slipring.http.generation import Flights, Plan, Prompt, answer
from slipring.http.logprobs import TextOffset
from slipring.http.placement import placement
from slipring.http.reply import Choice, Usage
from slipring.http.sampling import check_logprobs, check_max_tokens, check_min_tokens, is_set
from slipring.http.served import ServedModel

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default for this endpoint."""


class CompletionStyle(ChoicesStyle):
    object_name = "text_completion"

    def choice(self, model: ServedModel, index: int, choice: Choice, plan: Plan, usage: Usage) -> dict[str, Any]:
        logprobs = None
        if plan.logprobs >= 0:
            offset = TextOffset(len(plan.prompts[index // plan.n].echo))
            logprobs = model.logprobs.completion(choice.logprobs, offset)
        return {
            "index": index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def renderer(self, plan: Plan) -> type[CompletionRenderer]:
        return CompletionRenderer


_STYLE = CompletionStyle()


async def create_completion(model: ServedModel, flights: Flights, request: ApiRequest) -> ApiResponse:
    body = decode(await request.read(), CompletionBody)
    model.check_name(body.model)
    model.rules.check(body)
    max_tokens = _check(body)
    prompts = await _prompts(model, body)
    logprobs = -1 if body.logprobs is None else body.logprobs
    plan = Plan(body, prompts, "prompt", max_tokens, logprobs)
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
    if body.echo and body.logprobs is not None:
        raise bad_request(
            "`echo` together with `logprobs` is not supported yet; `logprobs` alone gives those of the generated "
            "tokens, `echo` alone repeats the prompt.",
            "echo",
            "unsupported_parameter",
        )
    check_response_format(body.response_format)
    return max_tokens


def check_response_format(value: Any) -> None:
    """Only plain text until structured output exists."""
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("json_object", "json_schema"):
        raise bad_request(
            f'`response_format` of type "{kind}" is not supported yet; only "text" is.',
            "response_format",
            "unsupported_parameter",
        )
    if kind != "text":
        raise bad_request('`response_format` must be {"type": "text"}.', "response_format.type")


async def _prompts(model: ServedModel, body: CompletionBody) -> list[Prompt]:
    prompt = body.prompt
    if prompt is None:
        raise bad_request("Missing required field `prompt`.", "prompt", "missing_required_parameter")
    if isinstance(prompt, str):
        return await _from_texts(model, body, [prompt])
    if not prompt:
        raise _wrong_prompt()
    if not isinstance(prompt[0], int):
        model.check_choices(len(prompt) * (body.n or 1))
    kinds = set(map(type, prompt))  # a prompt of 100,000 ids must not hold up the loop
    if kinds == {int}:
        return [_from_ids(model, body, prompt)]
    if len(prompt) > limits.MAX_PROMPTS:
        raise bad_request(f"`prompt` may hold at most {limits.MAX_PROMPTS} prompts, got {len(prompt)}.", "prompt")
    if kinds == {str}:
        return await _from_texts(model, body, [str(item) for item in prompt])
    if kinds == {list}:
        return [_from_ids(model, body, item) for item in prompt]
    raise _wrong_prompt()


async def _from_texts(model: ServedModel, body: CompletionBody, texts: list[str]) -> list[Prompt]:
    for text in texts:
        model.check_length(text, "prompt")
    found = await model.engine.encode_many(texts, body.add_special_tokens is not False)
    return [Prompt(ids, text if body.echo else "") for ids, text in zip(found, texts, strict=True)]


def _from_ids(model: ServedModel, body: CompletionBody, token_ids: Any) -> Prompt:
    token_ids = model.rules.check_ids(token_ids, "prompt")
    # Too long a prompt is refused later on; decoding it just to echo it would be wasted.
    fits = len(token_ids) <= model.engine.max_model_len
    decode = model.engine.tokenizer.decode
    echo = decode(token_ids.tolist(), skip_special_tokens=False) if body.echo and fits else ""
    return Prompt(token_ids, echo)


def _wrong_prompt() -> ApiError:
    return bad_request(
        "`prompt` must be a string, a list of strings, a list of token ids or a list of lists of token ids, not empty "
        "and not mixed.",
        "prompt",
        "invalid_type",
    )
