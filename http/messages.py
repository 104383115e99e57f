"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, on the same way as chat."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slipring.http.bodies import decode
from slipring.http.chat import encode_prompt, plan_chat
from slipring.http.errors import ApiError
from slipring.http.exchange import ApiRequest, ApiResponse
from slipring.http.generation import Flights, Plan, answer
from slipring.http.messages_bodies import CountTokensBody, MessagesBody
from slipring.http.messages_frames import MessageRenderer, content_blocks, message, stop_fields
from slipring.http.messages_prompt import OWN_NAMES, chat_body
from slipring.http.output_parser import OutputParser, join_events
from slipring.http.reply import Choice, ReplyHead, Usage
from slipring.http.served import ServedModel


class MessagesStyle:
    def reply(
        self, model: ServedModel, plan: Plan, head: ReplyHead, choices: list[Choice], usage: Usage
    ) -> dict[str, Any]:
        (choice,) = choices
        parser = _parser()
        parsed = join_events([*parser.feed(choice.text), *parser.finish()])
        stop = stop_fields(choice.finish_reason, choice.stop_reason, bool(parsed.calls))
        return {**message(head, content_blocks(parsed), usage), **stop}

    def frames(self, model: ServedModel, plan: Plan, head: ReplyHead, usage: Usage) -> MessageRenderer:
        return MessageRenderer(head, usage, _parser())


_STYLE = MessagesStyle()


def _parser() -> OutputParser:
    return OutputParser(new_id=lambda: f"toolu_{secrets.token_hex(12)}")


async def create_message(model: ServedModel, flights: Flights, request: ApiRequest) -> ApiResponse:
    data = await request.read()
    body = decode(data, MessagesBody)
    with own_names():
        plan = await plan_chat(model, chat_body(body), len(data))
        head = model.head(f"msg_{request.request_id}", body.model)
        return await answer(model, flights, head, plan, _STYLE)


async def count_tokens(model: ServedModel, request: ApiRequest) -> ApiResponse:
    """Counts what `create_message` would be asked to read."""
    data = await request.read()
    body = decode(data, CountTokensBody)
    model.check_name(body.model)
    with own_names():
        token_ids = await encode_prompt(model, chat_body(body), len(data))
    return ApiResponse.json({"input_tokens": len(token_ids)})


@contextmanager
def own_names() -> Iterator[None]:
    """Errors speak of the fields by their names in this API."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(OWN_NAMES) from None
