"""Text that a model writes by itself, to train a draft head on: what it is asked, and what it answers.

The best material for guessing a model's next token is its own output. Where there is a chat template, the model also
makes up the questions: it continues the template from where a user's words begin. A text that the user names gives
further beginnings. Most answers are greedy, as most are when the head is used.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from slipring.runtime.engine import Engine
from slipring.runtime.request import Delta, GenerationRequest
from slipring.shm.params import SamplingParams

_LANES = 48
"""Requests in flight."""
_QUESTION_TOKENS = (32, 64)
_ANSWER_TOKENS = (128, 192, 256)
_TEMPERATURES = (0.0, 0.0, 0.0, 0.0, 0.0, 0.7)
_LEAST_QUESTION, _LEAST_ANSWER = 3, 32
_PLACE = "\x02question\x02"
"""Stands for the user's words in a rendered template."""


@dataclass
class SelfText:
    """`written[i]` are token ids, of which the first `prompts[i]` were given."""

    written: list[list[int]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    greedy: list[bool] = field(default_factory=list)
    num_tokens: int = 0
    """Written by the model."""


class Writer:
    """Lets an engine write until there are enough tokens."""

    def __init__(self, engine: Engine, seed: int, text: str = "") -> None:
        """`text`: what a user named; its paragraphs are beginnings."""
        self._engine = engine
        self._random = random.Random(seed)
        self._eos = tuple(engine.spec.eos_token_ids)
        self._beginnings = [part.strip()[:400] for part in text.split("\n\n") if len(part.strip()) > 20]
        self._frame = self._chat_frame()
        self._num_requests = self._num_answered = self._planned = 0
        self._on_answer: Callable[[], None] = lambda: None
        self.found = SelfText()

    async def write(self, num_tokens: int, on_progress: Callable[[int, int], None]) -> SelfText:
        """About `num_tokens` of the model's own: no text is begun that is not needed, unless others end early."""
        self._planned, self._on_answer = 0, lambda: on_progress(min(self._num_answered, num_tokens), num_tokens)

        async def lane() -> None:
            while (missing := num_tokens - self._planned) > 0:
                most = min(self._random.choice(_ANSWER_TOKENS), max(missing, _LEAST_ANSWER))
                self._planned += most
                answered = await self._one(most)
                self._planned -= most - answered

        await asyncio.gather(*[lane() for _ in range(_LANES)])
        return self.found

    def _chat_frame(self) -> tuple[list[int], list[int]] | None:
        """Token ids of the template before and after a user's words."""
        if self._engine.chat_template is None:
            return None
        rendered = self._engine.chat_template.render([{"role": "user", "content": _PLACE}])
        before, found, after = rendered.partition(_PLACE)
        encode = self._engine.tokenizer.encode
        return (encode(before), encode(after)) if found else None

    async def _one(self, most: int) -> int:
        """Another text; returns how many tokens the model has answered."""
        prompt = await self._prompt()
        if prompt is None:
            return 0
        warm = self._random.choice(_TEMPERATURES)
        answer = await self._generate(prompt, most, warm, self._answered)
        self.found.written.append(prompt + answer)
        self.found.prompts.append(len(prompt))
        self.found.greedy.append(warm == 0.0)
        self.found.num_tokens += len(answer)
        return len(answer)

    def _answered(self, count: int) -> None:
        self._num_answered += count
        self._on_answer()

    async def _prompt(self) -> list[int] | None:
        """None when the model had nothing to ask."""
        encode = self._engine.tokenizer.encode
        named = self._random.choice(self._beginnings) if self._beginnings and self._random.random() < 0.5 else None
        if self._frame is None:
            first = self._engine.spec.bos_token_id if self._engine.spec.bos_token_id is not None else self._eos[0]
            return encode(named) if named is not None else [first]
        before, after = self._frame
        if named is not None:
            return before + encode(named) + after
        question = await self._generate(before, self._random.choice(_QUESTION_TOKENS), 1.0)
        while question and question[-1] in self._eos:
            question.pop()
        return before + question + after if len(question) >= _LEAST_QUESTION else None

    async def _generate(
        self, prompt: list[int], max_tokens: int, temperature: float, on_tokens: Callable[[int], None] = lambda _: None
    ) -> list[int]:
        got: list[int] = []
        done = asyncio.Event()

        def sink(delta: Delta) -> None:
            got.extend(delta.token_ids)
            on_tokens(len(delta.token_ids))
            if delta.finish_reason is not None:
                done.set()

        self._num_requests += 1
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=0.95 if temperature else 1.0,
            seed=self._random.getrandbits(63),
            stop_token_ids=self._eos,
        )
        request_id = f"self-text-{self._num_requests}"
        self._engine.submit(GenerationRequest(request_id=request_id, prompt_token_ids=prompt, params=params), sink)
        await done.wait()
        return got
