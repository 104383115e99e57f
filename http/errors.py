"""`ApiError` and the OpenAI error body, the one shape in which every path says that something went wrong.

The text of a 4xx names the field and what would be accepted. A 5xx never carries internals: those go to the log.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import orjson

from slipring.http.exchange import ApiResponse
from slipring.runtime.request import EngineDeadError, EngineError, InvalidRequestError, QueueFullError

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}

_QUOTED = re.compile(r"`(\w[^`\s]*)(?=`)")


class ApiError(Exception):
    """An answer other than success."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """The same, for an API that calls the fields of chat by other names (`own_name`)."""
        message = _QUOTED.sub(lambda found: f"`{own_name(found[1], names)}", self.message)
        param = None if self.param is None else own_name(self.param, names)
        return ApiError(self.status, message, param, self.code, self.headers)

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> ApiResponse:
        return ApiResponse.json(self.body(), self.status, self.headers)

    def frame(self) -> bytes:
        """The same body as the last event of a stream that had already begun."""
        return b"data: " + orjson.dumps(self.body()) + b"\n\n"


def own_name(path: str, names: Mapping[str, str]) -> str:
    """A field's name in another API, by chat's.

    A name stands for everything inside the field as well; of several that fit the first counts.
    """
    for name, other in names.items():
        if path.startswith(name) and path[len(name) : len(name) + 1] in ("", ".", "["):
            return other + path[len(name) :]
    return path


@contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors that come out of here are `renamed`."""
    try:
        yield
    except ApiError as error:
        raise error.renamed(names) from None


@dataclass(frozen=True, slots=True)
class ErrorStyle:
    """How one API writes its errors, and the JSON Schema of that."""

    name: str
    write: Callable[[ApiError], ApiResponse]
    schema: dict[str, Any]
    id_headers: tuple[str, ...] = ("x-request-id",)
    """Headers in which every answer of the API carries the request's id."""


_NULLABLE = {"type": ["string", "null"]}
OPENAI_ERRORS = ErrorStyle(
    "Error",
    ApiError.response,
    {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": _NULLABLE,
                    "code": _NULLABLE,
                },
            }
        },
    },
)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


def not_ready(state: str, reason: str | None = None, retry_after: int = 1) -> ApiError:
    """503 with Retry-After. `state` is starting, draining or dead."""
    sentence = {
        "starting": "The model is still loading; try again in a moment.",
        "draining": "The server is shutting down and takes no new requests.",
        "dead": "The engine has stopped and cannot serve requests.",
    }[state]
    message = f"{sentence} ({reason})" if reason else sentence
    return ApiError(503, message, code=f"engine_{state}", headers={"Retry-After": str(retry_after)})


def internal_error() -> ApiError:
    return ApiError(500, "The server hit an unexpected error; its log says more.", code="internal_error")


def engine_failed(message: str | None) -> ApiError:
    """The engine, or the loss of it, ended an answer that had begun."""
    return ApiError(500, message or "The engine could not finish this request.", code="engine_error")


def answer_failed(message: str | None, param: str | None) -> ApiError:
    """What ended an answer that had begun. `param`: the field of the request whose fault it is, if it is one's."""
    return engine_failed(message) if param is None else bad_request(f"`{param}`: {message}.", param)


def from_engine(error: EngineError, param: str | None = None) -> ApiError:
    """What `Engine.submit` raised, as an answer. `param` names the prompt's field where the engine left it open."""
    if isinstance(error, InvalidRequestError):
        return bad_request(str(error), error.param or param, error.code)
    if isinstance(error, QueueFullError):
        retry_after = str(max(1, math.ceil(error.retry_after)))
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": retry_after})
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": "1"})
    return internal_error()
