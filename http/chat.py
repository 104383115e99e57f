"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from slipring.http import conversation
from slipring.http.bodies import ChatBody, decode
from slipring.http.choices import ChoicesStyle, prompt_details, writer_of
from slipring.http.errors import bad_request
from slipring.http.exchange import ApiRequest, ApiResponse
from slipring.http.frames import ChatRenderer, EventRenderer
from slipring.http.generation import Flights, Plan, answer
from slipring.http.parsed_frames import ParsedChatRenderer, message_fields
from slipring.http.placement import placement
from slipring.http.prompts import Prompt, cut_of
from slipring.http.reply import Choice, ReplyHead, Usage
from slipring.http.sampling import check_logprobs, check_max_tokens, check_min_tokens
from slipring.http.served import ServedModel
from slipring.http.structured import compile_structured, structured_output
from slipring.http.tool_grammar import compile_calls
from slipring.http.tools import ToolUse, check_tools


class ChatStyle(ChoicesStyle):
    object_name = "chat.completion"

    def choice(self, model: ServedModel, index: int, choice: Choice, plan: Plan, usage: Usage) -> dict[str, Any]:
        message, finish_reason = {"content": choice.text}, choice.finish_reason
        if not plan.output.plain:
            parser = plan.output.parser()
            message = message_fields(parser.read(choice), choice.echo)
            finish_reason = parser.finish_reason(choice.finish_reason)
            parser.tell_usage(usage, index)
        found: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", **message, "refusal": None},
            "logprobs": writer_of(model, plan).chat(choice.logprobs) if plan.logprobs >= 0 else None,
            "finish_reason": finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if plan.body.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    def reply(
        self, model: ServedModel, plan: Plan, head: ReplyHead, choices: list[Choice], usage: Usage
    ) -> dict[str, Any]:
        whole = super().reply(model, plan, head, choices, usage)
        return whole | prompt_details(model, plan, plan.prompts[0], choices[0])

    def renderer(self, plan: Plan) -> Callable[..., EventRenderer]:
        return ChatRenderer if plan.output.plain else partial(ParsedChatRenderer, form=plan.output)


_STYLE = ChatStyle()


async def create_chat_completion(model: ServedModel, flights: Flights, request: ApiRequest) -> ApiResponse:
    data = await request.read()
    body = decode(data, ChatBody)
    plan = await plan_chat(model, body, len(data))
    head = model.head(f"chatcmpl-{request.request_id}", body.model)
    return await answer(model, flights, head, plan, _STYLE, placement(request))


async def plan_chat(model: ServedModel, body: ChatBody, size: int) -> Plan:
    """Check a conversation and render its prompt, for every API that holds conversations. Raises ApiError.

    `size`: bytes of the request, by which rendering is judged long.
    """
    model.check_name(body.model)
    model.rules.check(body)
    max_tokens, logprobs = _max_tokens(body), _logprobs(body)
    echo = conversation.prefill(body.messages) if body.echo and body.messages else ""
    check_min_tokens(body, max_tokens)
    structured_output(body)
    _refuse_modalities(body)
    use = check_tools(body)
    cut = cut_of(model, body.truncate_prompt_tokens, body.truncation_side, "left", max_tokens or 1)
    text, token_ids = await _encode(model, body, use, size, may_be_long=cut is not None)
    prompt = Prompt(token_ids if cut is None else cut.apply(token_ids), echo)
    output = model.output.form(use, text, stops=bool(body.stop or body.stop_token_ids))
    if use is not None and use.forced:
        grammar, param = await compile_calls(model.engine, use, output), "tools"
    else:
        grammar, param = await compile_structured(model.engine, body)
    bad_words = await model.bad_words(body.bad_words or [])
    scores = -1 if body.prompt_logprobs is None else body.prompt_logprobs
    return Plan(body, [prompt], "messages", max_tokens, logprobs, output, grammar, param, bad_words, scores)


async def encode_prompt(model: ServedModel, body: ChatBody, size: int) -> list[int]:
    """The conversation as the model reads it. `size` as for `plan_chat`. Raises ApiError."""
    return (await _encode(model, body, check_tools(body), size))[1]


async def _encode(
    model: ServedModel, body: ChatBody, use: ToolUse | None, size: int, may_be_long: bool = False
) -> tuple[str, list[int]]:
    tools = None if use is None else use.tools
    parts = await model.engine.text_work(size, conversation.render, model.engine, body, tools)
    return "".join(parts), await model.encode_parts(parts, bool(body.add_special_tokens), may_be_long)


def _max_tokens(body: ChatBody) -> int | None:
    check_max_tokens(body.max_tokens, "max_tokens")
    check_max_tokens(body.max_completion_tokens, "max_completion_tokens")
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _refuse_modalities(body: ChatBody) -> None:
    if body.modalities not in (None, [], ["text"]):
        message = '`modalities` must be ["text"]: this model writes nothing else.'
        raise bad_request(message, "modalities", "unsupported_parameter")


def _logprobs(body: ChatBody) -> int:
    """Alternatives per token; -1 for no log-probabilities."""
    check_logprobs(body.top_logprobs, "top_logprobs")
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise bad_request("`top_logprobs` needs `logprobs: true`.", "top_logprobs")
    return -1
