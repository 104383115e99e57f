"""The table of routes: what can be asked for, what a body must look like, and which answers may come.

A route says all that `/openapi.json` tells of it (`openapi.py`), so that the two cannot drift apart: most statuses
follow from its other fields, and a handler's own are listed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipring.http import admin, fault_tolerance, health, messages, models, tokens
from slipring.http.bodies import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    Invocation,
    TokenizeBody,
    decode,
)
from slipring.http.chat import create_chat_completion
from slipring.http.completions import create_completion
from slipring.http.embeddings import create_embeddings
from slipring.http.errors import not_ready
from slipring.http.exchange import ApiRequest, ApiResponse
from slipring.http.item_page import DEFAULT_LIMIT, MAX_LIMIT, Page
from slipring.http.messages_bodies import CountTokensBody, MessagesBody
from slipring.http.messages_errors import ANTHROPIC_ERRORS
from slipring.http.metrics import CONTENT_TYPE, exposition
from slipring.http.responses_bodies import ResponsesBody
from slipring.http.route_table import Handler, Parameter, Route, RouteTable
from slipring.http.served import VERSION, ServedModel

if TYPE_CHECKING:
    from slipring.http.api import Api

GENERATES = (404, 429, 504)
"""Statuses of their own of all routes that make the engine generate."""


def served(api: Api) -> ServedModel:
    if api.model is None:
        raise not_ready("starting")
    return api.model


async def _completions(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await create_completion(served(api), api.flights, request)


async def _chat(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await create_chat_completion(served(api), api.flights, request)


async def _messages(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await messages.create_message(served(api), api.flights, request)


async def _count_tokens(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await messages.count_tokens(served(api), request)


async def _create_response(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await api.responses.create(served(api), api.flights, request)


async def _get_response(api: Api, request: ApiRequest, response_id: str) -> ApiResponse:
    return api.responses.retrieve(response_id)


async def _delete_response(api: Api, request: ApiRequest, response_id: str) -> ApiResponse:
    return api.responses.delete(response_id)


async def _cancel_response(api: Api, request: ApiRequest, response_id: str) -> ApiResponse:
    return api.responses.cancel(response_id)


async def _input_items(api: Api, request: ApiRequest, response_id: str) -> ApiResponse:
    return api.responses.input_items(response_id, Page.parse(request.query))


async def _embeddings(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await create_embeddings(served(api), api.flights, request)


async def _tokenize(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await tokens.tokenize(served(api), request)


async def _detokenize(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await tokens.detokenize(served(api), request)


async def _list_models(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return models.list_models(served(api))


async def _get_model(api: Api, request: ApiRequest, name: str) -> ApiResponse:
    return models.get_model(served(api), name)


async def _health(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return health.ready(*api.state())


async def _live(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return health.live(*api.state())


async def _metrics(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await exposition(api.engine, api.config, api.counter)


async def _version(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return ApiResponse.json({"version": VERSION})


async def _openapi(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return ApiResponse.json(api.description())


async def _invocations(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    """One address for both, as SageMaker has it: a body with messages is a chat."""
    chat = bytes(decode(await request.read(), Invocation).messages) != b"null"
    return await (_chat if chat else _completions)(api, request, "")


async def _load(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return ApiResponse.json({"server_load": len(api.flights)})


async def _pause(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await admin.pause(served(api).engine, request)


async def _resume(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await admin.resume(served(api).engine)


async def _is_paused(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await admin.is_paused(served(api).engine)


async def _abort_requests(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await admin.abort_requests(served(api).engine, request)


async def _reset_prefix_cache(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    return await admin.reset_prefix_cache(served(api).engine, request)


async def _apply_fault_tolerance(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    fault_tolerance.check_enabled(api.config.enable_fault_tolerance, request.path)
    return await fault_tolerance.apply(served(api).engine, request)


async def _fault_tolerance_status(api: Api, request: ApiRequest, _: str) -> ApiResponse:
    fault_tolerance.check_enabled(api.config.enable_fault_tolerance, request.path)
    return await fault_tolerance.status(served(api).engine)


def _fault_tolerance(prefix: str) -> tuple[Route, Route]:
    """They must answer whatever state the engine is in, once there is one."""
    return (
        Route(
            "POST", f"{prefix}/fault_tolerance/apply", _apply_fault_tolerance, "Tell broken replicas how to go on",
            body=fault_tolerance.ApplyBody, statuses=(202, 404, 503), needs_model=False, administers=True,
        ),
        Route(
            "GET", f"{prefix}/fault_tolerance/status", _fault_tolerance_status, "How each replica is",
            statuses=(404, 503), needs_model=False,
        ),
    )  # fmt: skip


def _probe(pattern: str, handler: Handler, summary: str, method: str = "GET") -> Route:
    return Route(method, pattern, handler, summary, statuses=(503,), needs_key=False, needs_model=False)


_PAUSE_QUERY = (
    Parameter("mode", {"enum": list(admin.PAUSE_MODES), "default": "abort"}, "What becomes of running requests."),
    Parameter("clear_cache", {"type": "boolean", "default": True}, "Forget the prefix cache."),
)

_RESET_QUERY = (
    Parameter("reset_external", {"type": "boolean", "default": False}, "Forget what the CPU tier holds as well."),
)

_PAGE_QUERY = (
    Parameter("order", {"enum": ["asc", "desc"]}, "Oldest or newest (the default) first."),
    Parameter("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LIMIT}, f"{DEFAULT_LIMIT} where absent."),
    Parameter("after", {"type": "string"}, "Begin behind the item with this id."),
)

ROUTES = (
    _probe("/health", _health, "May I send work?"),
    _probe("/health/ready", _health, "May I send work?"),
    _probe("/health/live", _live, "Is the process worth keeping?"),
    _probe("/ping", _health, "May I send work?"),
    _probe("/ping", _health, "May I send work?", "POST"),
    Route("GET", "/version", _version, "Version of the server", needs_model=False),
    Route("GET", "/metrics", _metrics, "Prometheus metrics", answer=CONTENT_TYPE, needs_model=False),
    Route("GET", "/openapi.json", _openapi, "This description", needs_model=False),
    Route("GET", "/v1/models", _list_models, "Models that are served"),
    Route("GET", "/v1/models/{id}", _get_model, "One model", statuses=(404,)),
    Route(
        "POST", "/v1/completions", _completions, "Continue a text",
        body=CompletionBody, statuses=GENERATES, streams=True, operation="text_completion",
    ),
    Route(
        "POST", "/v1/chat/completions", _chat, "Answer a conversation",
        body=ChatBody, statuses=GENERATES, streams=True, operation="chat",
    ),
    Route(
        "POST", "/v1/messages", _messages, "Answer a conversation, in Anthropic's shape",
        body=MessagesBody, statuses=GENERATES, streams=True, errors=ANTHROPIC_ERRORS, operation="chat",
    ),
    Route(
        "POST", "/v1/messages/count_tokens", _count_tokens, "Tokens of a conversation, in Anthropic's shape",
        body=CountTokensBody, statuses=(404,), errors=ANTHROPIC_ERRORS,
    ),
    Route(
        "POST", "/v1/responses", _create_response, "Answer a conversation that may be kept",
        body=ResponsesBody, statuses=GENERATES, streams=True, operation="chat",
    ),
    Route("GET", "/v1/responses/{id}", _get_response, "A stored response", statuses=(404,)),
    Route("DELETE", "/v1/responses/{id}", _delete_response, "Forget a response", statuses=(404,)),
    Route(
        "POST", "/v1/responses/{id}/cancel", _cancel_response, "End a response in the background",
        statuses=(400, 404),
    ),
    Route(
        "GET", "/v1/responses/{id}/input_items", _input_items, "What a response has read",
        query=_PAGE_QUERY, statuses=(400, 404),
    ),
    Route(
        "POST", "/v1/embeddings", _embeddings, "Texts as vectors",
        body=EmbeddingBody, statuses=GENERATES,
    ),
    Route("POST", "/tokenize", _tokenize, "Token ids of a text", body=TokenizeBody, statuses=(404,)),
    Route("POST", "/detokenize", _detokenize, "Text of token ids", body=DetokenizeBody, statuses=(404,)),
    Route(
        "POST", "/invocations", _invocations, "A chat or a completion, by what the body holds",
        body=(ChatBody, CompletionBody), statuses=GENERATES, streams=True, operation="chat",
    ),
    Route("GET", "/load", _load, "Answers in flight"),
    Route("GET", "/is_paused", _is_paused, "Is the server paused?"),
    Route("POST", "/pause", _pause, "Start nothing new", query=_PAUSE_QUERY, administers=True),
    Route("POST", "/resume", _resume, "Go on", administers=True),
    Route(
        "POST", "/abort_requests", _abort_requests, "End requests",
        body=AbortBody, body_optional=True, administers=True,
    ),
    Route(
        "POST", "/reset_prefix_cache", _reset_prefix_cache, "Forget free KV blocks",
        query=_RESET_QUERY, administers=True,
    ),
    *_fault_tolerance("/v1"),
    *_fault_tolerance(""),
)  # fmt: skip

TABLE = RouteTable(ROUTES)

NOT_SERVED: dict[str, str] = dict.fromkeys(
    ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/pooling"),
    "A generating model does not score, rank or classify texts; it continues them (/v1/completions), answers "
    "(/v1/chat/completions) and turns them into vectors (/v1/embeddings), whose dot product says how alike they are.",
)
"""Paths that other servers have, and why there is nothing here."""
