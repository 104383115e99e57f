"""/v1/responses: OpenAI's Responses API, on the same way as chat.

    POST /v1/responses · GET, DELETE /v1/responses/{id} · POST .../cancel · GET .../input_items

Owns what outlives a request: ended responses (`response_store.py`), and those that run in the background, each with
its task. A response is stored when it has ended; one whose client goes away before is forgotten altogether.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import orjson

from slipring.http.bodies import decode
from slipring.http.chat import plan_chat
from slipring.http.choices import writer_of
from slipring.http.config import ServerConfig
from slipring.http.errors import ApiError, bad_request, own_name, renaming
from slipring.http.exchange import JSON, ApiRequest, ApiResponse
from slipring.http.generation import Flights, Generation, Plan, answer
from slipring.http.item_page import Page
from slipring.http.json_bytes import json_bytes
from slipring.http.placement import Placement, placement
from slipring.http.reply import Choice, Collector, ReplyHead, Usage
from slipring.http.response_store import ResponseStore, StoredResponse
from slipring.http.responses_bodies import Item, Part, ResponsesBody
from slipring.http.responses_frames import ResponseRenderer, failed, plain_response, response_object
from slipring.http.responses_prompt import chat_body, check_body, own_names
from slipring.http.served import ServedModel
from slipring.http.truncation import truncate


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a response has to answer."""

    items: list[Item]
    num_previous: int
    """So many of them are from an earlier response."""


@dataclass(frozen=True, slots=True)
class Running:
    """A response in the background."""

    stored: StoredResponse
    """As it is shown meanwhile. Not in the store, which might drop it."""
    task: asyncio.Task[None]
    """Waits for its end."""
    end: Callable[[], None]
    """Ends it as cancelled."""


class ResponseStyle:
    """`generation.Style` of one response, which it stores when it has ended."""

    def __init__(self, service: Responses, body: ResponsesBody, items: list[Item]) -> None:
        self._service = service
        self._body = body
        self.items = items

    def begun(self, model: ServedModel, plan: Plan, head: ReplyHead) -> dict[str, Any]:
        params = model.rules.params(plan.body, 1, 0)
        return response_object(head, self._body, params, stored=self._service.keeps(self._body))

    def reply(
        self, model: ServedModel, plan: Plan, head: ReplyHead, choices: list[Choice], usage: Usage
    ) -> dict[str, Any]:
        response = self.ended(model, plan, head, choices, usage)
        self.end(response)
        return response

    def ended(
        self, model: ServedModel, plan: Plan, head: ReplyHead, choices: list[Choice], usage: Usage
    ) -> dict[str, Any]:
        begun, parser = self.begun(model, plan, head), plan.output.parser()
        return plain_response(begun, choices[0], usage, parser, writer_of(model, plan))

    def frames(self, model: ServedModel, plan: Plan, head: ReplyHead, usage: Usage) -> ResponseRenderer:
        begun, logprobs = self.begun(model, plan, head), writer_of(model, plan)
        return ResponseRenderer(begun, usage, plan.output.parser(), logprobs, self.end)

    def end(self, response: dict[str, Any]) -> None:
        """However it has ended."""
        if self._service.keeps(self._body):
            self._service.keep(response, self.items)


class Responses:
    def __init__(self, config: ServerConfig) -> None:
        self._max_stored = config.max_stored_responses
        self._store = ResponseStore(config.max_stored_responses, config.max_stored_response_bytes)
        self._running: dict[str, Running] = {}

    def keeps(self, body: ResponsesBody) -> bool:
        return body.store is not False and self._max_stored > 0

    def keep(self, response: dict[str, Any], read: Sequence[Item]) -> None:
        self._store.put(response["id"], _stored(response, read))

    # The routes.

    async def create(self, model: ServedModel, flights: Flights, request: ApiRequest) -> ApiResponse:
        data = await request.read()
        body = decode(data, ResponsesBody)
        model.check_name(body.model)
        check_body(body)
        if body.background and not self.keeps(body):
            raise bad_request("`background` needs responses to be stored (--max-stored-responses).", "background")
        with renaming(own_names(body)):
            found = self._conversation(body)
            plan = await _plan(model, body, found, len(data))
            # Not the request's id: who knows a response's id may read it.
            head = model.head(f"resp_{secrets.token_hex(24)}", body.model)
            style = ResponseStyle(self, body, found.items)
            if body.background:
                return self._start(model, flights, head, plan, style, placement(request))
            return await answer(model, flights, head, plan, style, placement(request))

    def retrieve(self, response_id: str) -> ApiResponse:
        return ApiResponse(200, self._stored(response_id).body, {"Content-Type": JSON})

    def cancel(self, response_id: str) -> ApiResponse:
        stored = self._stored(response_id)
        if not orjson.loads(stored.body)["background"]:
            raise bad_request("Only a response that was created with `background: true` can be cancelled.", "id")
        self._stop(response_id)
        return self.retrieve(response_id)

    def delete(self, response_id: str) -> ApiResponse:
        self._stored(response_id)
        self._stop(response_id)
        self._store.remove(response_id)
        return ApiResponse.json({"id": response_id, "object": "response", "deleted": True})

    def input_items(self, response_id: str, page: Page) -> ApiResponse:
        stored = self._stored(response_id)
        return ApiResponse.json(page.of(stored.conversation()[: stored.num_read]))

    # Conversations.

    def _stored(self, response_id: str, param: str = "id") -> StoredResponse:
        running = self._running.get(response_id)
        stored = self._store.get(response_id) if running is None else running.stored
        if stored is None:
            message = f"There is no response with the id {response_id[:100]!r} (any more)."
            raise ApiError(404, message, param, "response_not_found")
        return stored

    def _conversation(self, body: ResponsesBody) -> Conversation:
        previous: list[Item] = []
        if body.previous_response_id is not None:
            if body.previous_response_id in self._running:
                raise bad_request("The previous response has not ended yet.", "previous_response_id")
            previous = self._stored(body.previous_response_id, "previous_response_id").conversation()
        given = body.input
        if isinstance(given, str):
            given = [Item(type="message", role="user", content=[Part("input_text", given)])]
        items = [self._resolve(item, f"input[{i}]") for i, item in enumerate(given)]
        for item in items:
            item.id = item.id or f"{_PREFIXES.get(item.type or 'message', 'item')}_{secrets.token_hex(12)}"
        return Conversation(previous + items, len(previous))

    def _resolve(self, item: Item, where: str) -> Item:
        """Items may stand for stored ones."""
        if item.type != "item_reference":
            return item
        found = self._store.find_item(item.id or "")
        if found is None:
            raise ApiError(404, f"`{where}` refers to an item that is not stored (any more).", f"{where}.id")
        return found

    # The background.

    def _start(
        self,
        model: ServedModel,
        flights: Flights,
        head: ReplyHead,
        plan: Plan,
        style: ResponseStyle,
        place: Placement,
    ) -> ApiResponse:
        usage = Usage([len(prompt.token_ids) for prompt in plan.prompts], plan.n)
        collector = Collector(plan.echo, usage)
        generation = Generation.of(model, plan, head.id, place)
        begun = style.begun(model, plan, head)
        shown = _stored(begun, style.items)
        generation.start(collector.push)
        flights.track(collector)

        def end(response: dict[str, Any]) -> None:
            generation.cancel()  # does nothing when it has ended
            flights.drop(collector)
            self._running.pop(head.id, None)
            style.end(response)

        async def finish() -> None:
            try:
                choices = await collector.wait()
            except ApiError as error:
                end(failed(begun, error, []))
            else:
                end(style.ended(model, plan, head, choices, usage))

        task = asyncio.ensure_future(finish())
        self._running[head.id] = Running(shown, task, lambda: end({**begun, "status": "cancelled"}))
        return ApiResponse.json({**begun, "status": "queued"})

    def _stop(self, response_id: str) -> None:
        running = self._running.get(response_id)
        if running is not None:
            running.task.cancel()
            running.end()


def _stored(response: dict[str, Any], read: Sequence[Item]) -> StoredResponse:
    answered = msgspec.convert(response["output"], list[Item])
    return StoredResponse.of(json_bytes(response), read, answered)


_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


async def _plan(model: ServedModel, body: ResponsesBody, found: Conversation, size: int) -> Plan:
    chat = chat_body(body, found.items, found.num_previous)
    if body.truncation == "auto":
        await truncate(model, chat, size)
    plan = await plan_chat(model, chat, size)
    # Of streams, too, whose errors come when nobody renames them any more.
    param = None if plan.grammar_param is None else own_name(plan.grammar_param, own_names(body))
    return replace(plan, param="input", grammar_param=param)
