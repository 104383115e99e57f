"""`ServedModel`: the engine as the handlers see it, with what is computed once per model. Exists once it is loaded."""

from __future__ import annotations

import hashlib
import time
from importlib.metadata import version
from itertools import chain, count
from typing import TYPE_CHECKING

from slipring.http.config import ServerConfig
from slipring.http.errors import ApiError, bad_request, from_engine
from slipring.http.logprobs import LogprobWriter
from slipring.http.output_form import OutputRules
from slipring.http.reply import ReplyHead
from slipring.http.sampling import SamplingRules
from slipring.runtime.request import MAX_BAD_WORD_TOKENS, EngineError

if TYPE_CHECKING:
    from slipring.runtime.engine import Engine

VERSION = version("slipring")


class ServedModel:
    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self.engine = engine
        self.names = config.served_model_names
        self.created = int(time.time())
        self.rules = SamplingRules(engine)
        self.logprobs = LogprobWriter(engine.tokenizer)
        self.output = OutputRules(engine, config.tool_call_parser, config.reasoning_parser)
        identity = f"{engine.spec.name} {engine.spec.path} {engine.spec.dtype}"
        self.fingerprint = f"slipring-{VERSION}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
        self._serial = count()

    def check_name(self, name: str | None) -> str:
        """The name to answer with. Raises ApiError (404) for a model that is not served."""
        if name is None:
            return self.names[0]
        if name not in self.names:
            served = ", ".join(f"`{known}`" for known in self.names)
            raise ApiError(
                404, f"The model `{name[:100]}` does not exist here. Served: {served}.", "model", "model_not_found"
            )
        return name

    def head(self, reply_id: str, name: str | None) -> ReplyHead:
        return ReplyHead(reply_id, int(time.time()), name or self.names[0], self.fingerprint)

    def engine_id(self, reply_id: str) -> str:
        """Unique in this process, whatever ids clients send."""
        return f"{reply_id}.{next(self._serial)}"

    def check_length(self, text: str, param: str) -> None:
        """Before a text is tokenized at all. Raises ApiError (400) when its size alone says that it cannot fit."""
        try:
            self.engine.check_length(text)
        except EngineError as error:
            raise from_engine(error, param) from None

    async def encode_parts(self, parts: list[str], add_special_tokens: bool, may_be_long: bool = False) -> list[int]:
        """Ids of a rendered conversation (`ChatTemplate.render_parts`). Templates write the special tokens
        themselves. Raises ApiError (400) when its size alone says that it cannot fit, unless it is cut afterwards."""
        if not may_be_long:
            self.check_length("".join(parts), "messages")
        token_ids = await self.engine.encode(parts[0], add_special_tokens)
        if len(parts) > 1:
            found = await self.engine.encode_many(parts[1:], add_special_tokens=False)
            token_ids = [*token_ids, *chain.from_iterable(found)]
        return token_ids

    async def bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that write these words, at the beginning of a text and behind a space.

        Raises ApiError (400) when they are too many.
        """
        if not words:
            return ()
        spellings = [prefix + word.lstrip() for word in words for prefix in ("", " ")]
        found = await self.engine.encode_many(spellings, add_special_tokens=False)
        sequences = tuple(dict.fromkeys(tuple(ids) for ids in found if ids))
        if (count := sum(map(len, sequences)) + len(sequences)) > MAX_BAD_WORD_TOKENS:
            message = f"`bad_words` are {count} tokens in all their spellings, and at most {MAX_BAD_WORD_TOKENS} fit."
            raise bad_request(message, "bad_words")
        return sequences

    def check_choices(self, count: int, num_tokens: int = 0) -> None:
        """Raises ApiError (400) for more completions, or prompt tokens, in one request than may ever wait."""
        most = self.engine.max_queued_requests
        if num_tokens > self.engine.max_queued_tokens and count > 1:
            raise bad_request(
                f"The prompts have {num_tokens} tokens together (times `n`), and at most "
                f"{self.engine.max_queued_tokens} may wait (--max-queued-tokens).",
                "n",
            )
        if count > most:
            raise bad_request(
                f"`n` times the number of prompts is {count}, and at most {most} completions may wait "
                "(--max-queued-requests).",
                "n",
            )

    def room(self, num_prompt: int, param: str, least: int = 1) -> int:
        """Tokens that may follow the prompt. Raises ApiError (400) when there is no room for `least`."""
        limit = self.engine.max_model_len
        if num_prompt == 0:
            raise bad_request(f"`{param}` must not be empty.", param)
        if num_prompt + least > limit:
            raise bad_request(
                f"This model's maximum context length is {limit} tokens. However, your {param} resulted in "
                f"{num_prompt} tokens, which leaves no room for an answer. Please shorten the {param}.",
                param,
                "context_length_exceeded",
            )
        return limit - num_prompt
