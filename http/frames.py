"""Server-sent events of chat and completions: what is constant of a frame is rendered once per stream and choice.

A content frame is then prefix + JSON string + suffix, about a microsecond. Shapes follow OpenAI where it defines
them and vLLM where it adds to them (`stop_reason`):

chat          role chunk (with the choice's first piece) · content chunks · last content with finish_reason
completions   text chunks · last text with finish_reason
both          [usage chunk with choices: []] · data: [DONE]

No chunk is sent while text is held back. A failure is one error event, with neither finish_reason nor [DONE].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from slipring.http.errors import ApiError
from slipring.http.logprobs import LogprobWriter, TextOffset, TokenIds
from slipring.http.reply import ReplyHead, Usage
from slipring.runtime.request import Delta, TokenLogprob

DONE = b"data: [DONE]\n\n"


def json_string(text: str) -> bytes:
    """`text` as a JSON string. Lone surrogates, which UTF-8 cannot say, become question marks."""
    try:
        return orjson.dumps(text)
    except TypeError:
        return orjson.dumps(text.encode("utf-8", "replace").decode())


@dataclass(frozen=True, slots=True)
class TokenDetails:
    """What a stream tells of tokens beside their text."""

    prompts: list[TokenIds]
    """Of each choice."""
    ids: bool
    """Ids of the prompt and of what is generated."""
    num_top: int
    """Alternatives of each token of a prompt that is echoed with its log-probabilities."""


class EventRenderer(ABC):
    """What chat and completion streams share."""

    object_name: str
    details: TokenDetails | None = None

    def __init__(
        self,
        head: ReplyHead,
        usage: Usage,
        logprobs: LogprobWriter,
        echo: list[str],
        *,
        usage_at_end: bool = False,
        usage_in_every: bool = False,
    ) -> None:
        """`echo`: for each choice, the text that comes before what is generated; its length is the choices' number."""
        self._head = orjson.dumps(head.fields(self.object_name))[:-1]
        self._fingerprint = b',"system_fingerprint":' + orjson.dumps(head.fingerprint)
        self._usage = usage
        self._usage_at_end = usage_at_end
        self._usage_in_every = usage_at_end and usage_in_every
        self._logprobs = logprobs
        self._echo = echo
        self._started = [False] * len(echo)
        self._offsets = [TextOffset(len(text)) for text in echo]
        self._before = [b"data: " + self._head + self._opening(index) for index in range(len(echo))]

    def delta(self, delta: Delta) -> bytes:
        self._usage.add(delta)
        index, text, first = delta.index, delta.text, b""
        if not self._started[index]:
            self._started[index] = True
            first, text = self._first(index), self._echo[index] + text
        if delta.finish_reason is not None:
            return first + self._last(index, text, delta)
        if not text and not delta.logprobs and self.details is None:
            return first
        begin = first + self._before[index] + json_string(text)
        if delta.logprobs is None and not self._usage_in_every and self.details is None:
            return begin + self._plain_end
        return begin + self._middle(self._logprobs_of(delta)) + self._close()

    def tail(self) -> bytes:
        if not self._usage_at_end:
            return DONE
        usage = orjson.dumps(self._usage.fields())
        body = b',"choices":[],"usage":' + usage + self._fingerprint + b"}\n\n"
        return b"data: " + self._head + body + DONE

    def error(self, error: ApiError) -> bytes:
        return error.frame()

    def _last(self, index: int, text: str, delta: Delta) -> bytes:
        """The end of a choice comes with its last text; the fingerprint with the last thing that is sent."""
        ends = orjson.dumps(delta.finish_reason) + b',"stop_reason":' + orjson.dumps(delta.stop_reason)
        fingerprint = b"" if self._usage_at_end else self._fingerprint
        return (
            self._before[index]
            + json_string(text)
            + self._middle(self._logprobs_of(delta), ends)
            + fingerprint
            + self._close()
        )

    def _middle(self, logprobs: bytes, ends: bytes = b"null") -> bytes:
        """From behind the text to behind the choices."""
        return self._after_text + logprobs + b',"finish_reason":' + ends + b"}]"

    def _close(self) -> bytes:
        if not self._usage_in_every:
            return b"}\n\n"
        return b',"usage":' + orjson.dumps(self._usage.fields()) + b"}\n\n"

    def _logprobs_of(self, delta: Delta) -> bytes:
        """And what else a chunk tells of its tokens, behind them."""
        found = b"null" if not delta.logprobs else orjson.dumps(self._named(delta.index, delta.logprobs))
        return found if self.details is None or not self.details.ids else found + self._ids_of(delta)

    def _ids_of(self, delta: Delta) -> bytes:
        return b',"token_ids":' + orjson.dumps(list(delta.token_ids))

    def _prompt_ids(self, index: int) -> bytes:
        if self.details is None or not self.details.ids:
            return b""
        return b',"prompt_token_ids":' + orjson.dumps(list(map(int, self.details.prompts[index])))

    # Where the two differ.

    _after_text: bytes
    _plain_end: bytes

    @abstractmethod
    def _opening(self, index: int) -> bytes:
        """From behind the head to before the text."""

    @abstractmethod
    def _first(self, index: int) -> bytes:
        """What precedes a choice's first piece."""

    @abstractmethod
    def _named(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities in the API's shape."""


class ChatRenderer(EventRenderer):
    object_name = "chat.completion.chunk"
    _after_text = b'},"logprobs":'
    _plain_end = b'},"logprobs":null,"finish_reason":null}]}\n\n'

    def _opening(self, index: int) -> bytes:
        return b',"choices":[{"index":%d,"delta":{"content":' % index

    def _first(self, index: int) -> bytes:
        choice = b',"choices":[{"index":%d,"delta":{"role":"assistant","content":""' % index
        return b"data: " + self._head + choice + self._middle(b"null") + self._prompt_ids(index) + self._close()

    def _named(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._logprobs.chat(entries)


class CompletionRenderer(EventRenderer):
    object_name = "text_completion"
    _told: set[int]
    """Choices whose first piece is out."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._told = set()

    _after_text = b',"logprobs":'
    _plain_end = b',"logprobs":null,"finish_reason":null}]}\n\n'

    def _opening(self, index: int) -> bytes:
        return b',"choices":[{"index":%d,"text":' % index

    def _first(self, index: int) -> bytes:
        return b""

    def _named(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        return self._logprobs.completion(entries, self._offsets[index])

    def _logprobs_of(self, delta: Delta) -> bytes:
        if self.details is None or delta.index in self._told:
            return super()._logprobs_of(delta)
        self._told.add(delta.index)
        found = self._with_prompt(delta, self.details)
        return found + self._prompt_ids(delta.index) + (self._ids_of(delta) if self.details.ids else b"")

    def _with_prompt(self, delta: Delta, details: TokenDetails) -> bytes:
        """Log-probabilities of a choice's first piece, behind those of the prompt that it echoes."""
        if delta.prompt_logprobs is None:
            return b"null" if not delta.logprobs else orjson.dumps(self._named(delta.index, delta.logprobs))
        prompt, echo = details.prompts[delta.index], self._echo[delta.index]
        echoed = self._logprobs.echoed(prompt, echo, delta.prompt_logprobs, details.num_top)
        found = self._named(delta.index, delta.logprobs or ())
        return orjson.dumps({name: echoed[name] + found[name] for name in found})
