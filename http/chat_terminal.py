"""`slipring chat`: a conversation in the terminal with a running server. Only an HTTP client; knows no engine."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class ChatError(Exception):
    """The server cannot be reached, or said no; the message is for people."""


def chat(url: str, model: str | None, api_key: str | None, system: str | None) -> int:
    """Returns the exit status."""
    try:
        return asyncio.run(_chat(url.rstrip("/"), model, api_key, system))
    except ChatError as error:
        print(f"slipring: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough
        sys.stdout = None
        return 0


async def _chat(url: str, model: str | None, api_key: str | None, system: str | None) -> int:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as session:
        talk = Conversation(session, url, model or await _first_model(session, url), system)
        if not sys.stdin.isatty():
            if isinstance(sys.stdin, io.TextIOWrapper):
                sys.stdin.reconfigure(encoding="utf-8", errors="replace")
            question = sys.stdin.read()
            if question.strip():
                await talk.ask(question)
            return 0
        print(f"{talk.model} at {url}. Ctrl-C stops an answer, Ctrl-D ends.")
        while (question := await _read_question()) is not None:
            if question.strip():
                await _until_interrupted(talk, question)
        print()
    return 0


class Conversation:
    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, system: str | None) -> None:
        self.model = model
        self._session = session
        self._url = url
        self._messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []

    async def ask(self, question: str) -> None:
        """Print the answer as it comes, and remember what was said, also when it is stopped half-way."""
        self._messages.append({"role": "user", "content": question})
        pieces: list[str] = []
        try:
            await self._print_answer(pieces)
        finally:
            if pieces:
                self._messages.append({"role": "assistant", "content": "".join(pieces)})
            else:
                self._messages.pop()  # not answered: as if it had not been asked

    async def _print_answer(self, pieces: list[str]) -> None:
        num_tokens, first = 0, 0.0
        async for event in self._events():
            for choice in event.get("choices", ()):
                if text := choice["delta"].get("content"):
                    first = first or time.monotonic()
                    pieces.append(text)
                    print(text, end="", flush=True)
            num_tokens = (event.get("usage") or {}).get("completion_tokens", num_tokens)
        print()
        seconds = time.monotonic() - first
        if sys.stdout.isatty() and num_tokens > 1 and seconds > 0:
            print(f"{_DIM}{(num_tokens - 1) / seconds:.0f} tok/s{_PLAIN}")

    async def _events(self) -> AsyncIterator[dict[str, Any]]:
        body = {
            "model": self.model,
            "messages": self._messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with _told(self._url), self._session.post(f"{self._url}/chat/completions", json=body) as response:
            if response.status != 200:
                raise ChatError(_reason(await response.read(), response.status))
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ChatError(event["error"]["message"])
                    yield event


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    async with _told(url), session.get(f"{url}/models") as response:
        if response.status == 404 and not url.endswith("/v1"):
            raise ChatError(f"there is no API at {url}; did you mean --url {url}/v1?")
        if response.status != 200:
            raise ChatError(_reason(await response.read(), response.status))
        return (await response.json())["data"][0]["id"]


@contextlib.asynccontextmanager
async def _told(url: str) -> AsyncIterator[None]:
    """Connection failures as a sentence."""
    try:
        yield
    except aiohttp.ClientConnectionError as error:
        raise ChatError(f"no server at {url} ({error}). Start one with `slipring serve smollm2`.") from None
    except aiohttp.InvalidURL:
        raise ChatError(f"{url!r} is no URL; write http://HOST:PORT/v1") from None
    except aiohttp.ClientError as error:
        raise ChatError(f"{url}: {error}") from None


async def _read_question() -> str | None:
    """None at the end of input."""
    try:
        return await asyncio.to_thread(input, "> ")
    except EOFError:
        return None


async def _until_interrupted(talk: Conversation, question: str) -> None:
    """Ask; Ctrl-C cancels this answer only."""
    answer = asyncio.ensure_future(talk.ask(question))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, answer.cancel)
    try:
        await answer
    except asyncio.CancelledError:
        print(f" {_DIM}(stopped){_PLAIN}")
    except ChatError as error:
        print(f"slipring: {error}", file=sys.stderr)
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _reason(body: bytes, status: int) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered with status {status}"
