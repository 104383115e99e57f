"""Forced calls: whatever a model writes under the grammar, the parser finds valid calls in it."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from slipring.runtime.request import GenerationRequest
from tests.http.calls import CHAT, HELLO, acall, call, make_api, refused
from tests.http.engine_double import EOS, TEMPLATE, VOCAB, EngineDouble

KIND = {
    "type": "object", "properties": {"kind": {"anyOf": [{"const": "keep"}, {"const": "drop"}]}},
    "required": ["kind"], "additionalProperties": False,
}  # fmt: skip
NUMBER = {
    "type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 8}},
    "required": ["n"], "additionalProperties": False,
}  # fmt: skip
TOOLS: Any = [
    {"type": "function", "function": {"name": "mem", "parameters": KIND}},
    {"type": "function", "function": {"name": "num", "parameters": NUMBER}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "num"}}
TEMPLATES = {
    "json": TEMPLATE, "hermes": TEMPLATE + "{# <tool_call> #}", "llama": TEMPLATE + "{# <|python_tag|> #}",
    "mistral": TEMPLATE + "{# [TOOL_CALLS] #}", "thinks": TEMPLATE + "{# <think> #}",
    "opened": TEMPLATE + "{% if add_generation_prompt %}<think>\n{% endif %}",
}  # fmt: skip

WISHES = {"thinks": b"<think>hm</think>", "opened": b"hm\n</think>"}


class Vocabulary:
    """The double's, as llguidance asks for it: a token is a byte."""

    eos_token_id, bos_token_id = EOS, None
    tokens = tuple(bytes([token]) if token < 256 else b"" for token in range(VOCAB))
    special_token_ids = (EOS,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@pytest.fixture(scope="module")
def vocabulary() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Vocabulary()), n_vocab=VOCAB, eos_token=[EOS])  # type: ignore[arg-type]


class Writer(EngineDouble):
    """Writes its wish and then at random, but for the grammar; a byte a token. `steps`: where it is cut off."""

    def __init__(self, template: str, vocabulary: LLTokenizer, seed: int, steps: int) -> None:
        super().__init__(None, max_model_len=8000, template=TEMPLATES[template])
        self._template = template
        self._vocabulary = vocabulary
        self._random = random.Random(seed)
        self._steps = steps

    def submit(self, request: GenerationRequest, sink: Any) -> None:
        super().submit(request, sink)
        asyncio.get_running_loop().call_soon(self._try, request)

    def _try(self, request: GenerationRequest) -> None:
        try:
            self._write(request)
        except Exception as error:
            self.end(reason="error", error=repr(error))  # or the answer would be waited for without end
            raise

    def _write(self, request: GenerationRequest) -> None:
        assert request.grammar is not None
        matcher = LLMatcher(self._vocabulary, request.grammar.text, log_level=0)
        data = bytearray()
        wish = list(WISHES.get(self._template, b"")[::-1])
        while len(data) < self._steps:
            mask = matcher.compute_bitmask()
            allowed = [token for token in range(VOCAB) if mask[token >> 3] >> (token & 7) & 1]
            # A little wild, and yet it comes to an end.
            usual = [token for token in allowed if token == EOS or token in b'"}<\n']
            token = self._random.choice(usual if usual and self._random.random() < 0.7 else allowed)
            if wish:
                token = wish.pop()
            if token == EOS:
                return self._say(data, "stop")
            assert matcher.consume_token(token), matcher.get_error()
            data.append(token)
        self._say(data, "length")

    def _say(self, data: bytearray, reason: str) -> None:
        for character in data.decode("utf-8", "ignore"):
            self.say(character)
        self.end(reason=reason)


def written(template: str, vocabulary: LLTokenizer, seed: int, steps: int = 600, **more: Any) -> dict[str, Any]:
    async def main() -> Any:
        api = make_api(Writer(template, vocabulary, seed, steps))
        response = await acall(api, "POST", CHAT, {"messages": HELLO, "tools": TOOLS, **more})
        assert response.status == 200, response.body
        return json.loads(response.body)["choices"][0]  # type: ignore[arg-type]

    return asyncio.run(main())


def check_call(found: dict[str, Any]) -> str:
    name, arguments = found["function"]["name"], json.loads(found["function"]["arguments"])
    if name == "mem":
        assert arguments["kind"] in ("keep", "drop") and len(arguments) == 1
    elif name == "num":
        assert type(arguments["n"]) is int and arguments.keys() <= {"n", "s"} and len(arguments.get("s", "")) <= 8
    return name


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_a_required_call_comes_whatever_the_model_would_like(template: str, vocabulary: LLTokenizer) -> None:
    ended = 0
    for seed in range(4):
        found = written(template, vocabulary, seed, tool_choice="required", parallel_tool_calls=seed % 2 == 0)
        calls = found["message"].get("tool_calls", [])
        if found["finish_reason"] == "length":
            continue  # wild enough not to come to an end
        ended += 1
        assert found["finish_reason"] == "tool_calls" and calls and found["message"]["content"] is None
        assert found["message"].get("reasoning_content") == ("hm" if template in WISHES else None)
        assert {check_call(made) for made in calls} <= {"mem", "num", "now"}
        assert len(calls) == 1 or seed % 2 == 0
    assert ended >= 1


def test_a_named_call_is_of_that_function_and_the_only_one(vocabulary: LLTokenizer) -> None:
    for seed in range(4):
        found = written("json", vocabulary, seed, tool_choice=NAMED)
        assert [check_call(made) for made in found["message"]["tool_calls"]] == ["num"]
        assert found["finish_reason"] == "tool_calls"


def test_a_forced_call_that_is_cut_off_says_length_and_never_promises_calls(vocabulary: LLTokenizer) -> None:
    for steps in range(1, 100, 7):
        found = written("json", vocabulary, steps, steps, tool_choice="required")
        if found["finish_reason"] == "length":
            calls = found["message"].get("tool_calls")
            assert calls is None or calls
        else:
            assert found["finish_reason"] == "tool_calls" and found["message"]["tool_calls"]


@pytest.mark.parametrize("inner", [{"type": "strin"}, {"type": "string", "pattern": "(?=a)b"}, {"$ref": "http://x/y"}])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "bad"}}])
def test_a_schema_that_cannot_be_followed_is_named(inner: dict[str, Any], choice: Any) -> None:
    bad = {"type": "object", "properties": {"x": inner}}
    tools = [TOOLS[0], {"type": "function", "function": {"name": "bad", "parameters": bad}}]
    body = {"messages": HELLO, "tools": tools, "tool_choice": choice}
    error = refused(call(make_api(EngineDouble()), "POST", CHAT, body))
    assert error["param"] == "tools[1].function.parameters"


def test_a_forced_call_takes_bounds_of_any_size() -> None:
    bounded = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 10**30}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": bounded}}]
    body = {"messages": HELLO, "tools": tools, "tool_choice": "required"}
    response = call(make_api(EngineDouble(max_model_len=1000)), "POST", CHAT, body)
    assert response.status == 200, response.body
