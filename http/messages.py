"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, on the same way as chat."""

from __future__ import annotations

import secrets
from typing import Any

from slipring.http.bodies import decode
from slipring.http.chat import encode_prompt, plan_chat
from slipring.http.errors import renaming
from slipring.http.exchange import ApiRequest, ApiResponse
from slipring.http.generation import Flights, Plan, answer
from slipring.http.messages_bodies import CountTokensBody, MessagesBody
from slipring.http.messages_frames import MessageRenderer, content_blocks, message, stop_fields
from slipring.http.messages_prompt import chat_body, own_names
from slipring.http.placement import placement
from slipring.http.reply import Choice, ReplyHead, Usage
from slipring.http.served import ServedModel


class MessagesStyle:
    def reply(
        self, model: ServedModel, plan: Plan, head: ReplyHead, choices: list[Choice], usage: Usage
    ) -> dict[str, Any]:
        (choice,) = choices
        parser = plan.output.parser(_call_id)
        content = content_blocks(parser.read(choice))
        stop = stop_fields(parser.finish_reason(choice.finish_reason), choice.stop_reason)
        return {**message(head, content, usage), **stop}

    def frames(self, model: ServedModel, plan: Plan, head: ReplyHead, usage: Usage) -> MessageRenderer:
        return MessageRenderer(head, usage, plan.output.parser(_call_id))


_STYLE = MessagesStyle()


def _call_id() -> str:
    return f"toolu_{secrets.token_hex(12)}"


async def create_message(model: ServedModel, flights: Flights, request: ApiRequest) -> ApiResponse:
    data = await request.read()
    body = decode(data, MessagesBody)
    with renaming(own_names(body)):
        plan = await plan_chat(model, chat_body(body), len(data))
        head = model.head(f"msg_{request.request_id}", body.model)
        return await answer(model, flights, head, plan, _STYLE, placement(request))


async def count_tokens(model: ServedModel, request: ApiRequest) -> ApiResponse:
    """Counts what `create_message` would be asked to read."""
    data = await request.read()
    body = decode(data, CountTokensBody)
    model.check_name(body.model)
    with renaming(own_names(body)):
        token_ids = await encode_prompt(model, chat_body(body), len(data))
    return ApiResponse.json({"input_tokens": len(token_ids)})
