"""The output parser: however a text is cut into pieces, the same calls, reasoning and content come out."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipring.http.output_events import (
    ContentDelta,
    Event,
    ParsedText,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
    join_events,
)
from slipring.http.output_parser import OutputParser
from slipring.http.reasoning import DEEPSEEK_R1, GRANITE, THINK, Reasoning, detect_reasoning, reasoning_format
from slipring.http.tool_formats import ALIASES, FORMATS, detect_tool_format, tool_format

TYPED = {"s": {"type": "string"}, "n": {"type": "integer"}, "x": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
SCHEMAS: Any = {"f": {"type": "object", "properties": TYPED}, "get-it": {"type": "object"}}


def make(form: str | None, **options: Any) -> OutputParser:
    numbers = itertools.count()
    tools = None if form is None else FORMATS[form]
    return OutputParser(tools, new_id=lambda: f"call_{next(numbers)}", schemas=SCHEMAS, **options)


def run(form: str | None, pieces: Any, **options: Any) -> list[Event]:
    parser = make(form, **options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def parse(form: str | None, text: str, **options: Any) -> ParsedText:
    return join_events(run(form, [text], **options))


def found(form: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    """Content and calls, all of which must be whole."""
    parsed = parse(form, text)
    assert all(call.complete for call in parsed.calls)
    return parsed.content, [(call.name, json.loads(call.arguments)) for call in parsed.calls]


def written(form: str, name: str, arguments: dict[str, Any]) -> str:
    """A call as a model of this family writes it."""
    body = json.dumps(arguments, ensure_ascii=False)
    if form == "hermes":
        return f'<tool_call>\n{{"name": "{name}", "arguments": {body}}}\n</tool_call>'
    if form == "json":
        return f'{{"name": "{name}", "arguments": {body}}}'
    if form == "llama3_json":
        return f'{{"name": "{name}", "parameters": {body}}}'
    if form == "mistral":
        return f"[TOOL_CALLS]{name}[ARGS]{body}"
    if form == "deepseek":
        return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{body}<｜tool▁call▁end｜>"
    if form == "kimi_k2":
        return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{body}<|tool_call_end|>"
    if form == "pythonic":
        return f"<|python_start|>[{name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})]<|python_end|>"
    parameters = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in arguments.items()
    )
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<tool_", "<", "</", "<|tool_call|>", "[TOOL_CALLS]", "[TOOL", "[ARGS]",
    "[CALL_ID]c", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>", "<｜tool", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "functions.f:0", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "<function=f>", "<function=",
    "<parameter=s>", "<parameter=n>", "</parameter>", "</function>", "<think>", "</think>", "<thi", "</th",
    "```json", "```", '{"name": "f", "arguments": {', '{"name": "f"', '"name": "get-it"', '"arguments": ',
    '"parameters"', '{"s": "a"}', "{", "}", "[", "]", "(", ")", "f(", "f(s='x', n=1)", ",", ", ", ":", ";", '"',
    "'", "\\", '\\"', "\\u00e9", "\\ud83d\\ude00", "\\ud83d", "\\u12", "\n", " ", "\t", "\n\n", "true", "None",
    "nul", "-1.5e3", "01", "1", "é", "日本", "😀", "\x01", "text", "f", "s=", "\ud83d", '"s": "', '"function": ',
    "null",
]  # fmt: skip
TEXTS = st.lists(
    st.one_of(st.sampled_from(FRAGMENTS), st.sampled_from([written(f, "f", {"s": "a", "n": 1}) for f in FORMATS])),
    max_size=14,
).map("".join)
FORMS = st.sampled_from([None, *FORMATS])
REASONING = st.sampled_from([None, THINK, DEEPSEEK_R1, GRANITE])


def cut(text: str, places: list[int]) -> list[str]:
    borders = sorted({min(place, len(text)) for place in places})
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]


@settings(max_examples=600, deadline=None)
@given(FORMS, REASONING, st.booleans(), TEXTS, st.lists(st.integers(0, 300), max_size=12), st.sampled_from([1, 99]),
       st.booleans())  # fmt: skip
def test_cutting_changes_nothing(
    form: str | None, reasoning: Reasoning | None, opened: bool, text: str, places: list[int], limit: int, held: bool
) -> None:
    options = {"reasoning": reasoning, "in_reasoning": opened, "limit": limit, "whole_calls": held}
    whole = join_events(run(form, [text], **options))
    assert join_events(run(form, cut(text, places), **options)) == whole
    assert join_events(run(form, text, **options)) == whole
    check(run(form, cut(text, places), **options), limit)


def check(events: list[Event], limit: int) -> None:
    """Events follow each other as every API may take for granted."""
    num_calls, open_call, arguments = 0, False, ""
    for event in events:
        match event:
            case ToolCallStart(index, call_id, name):
                assert not open_call and index == num_calls and call_id and name
                open_call, arguments = True, ""
            case ToolArgumentsDelta(index, fragment):
                assert open_call and index == num_calls and fragment
                arguments += fragment
            case ToolCallEnd(index, complete):
                assert open_call and index == num_calls
                open_call, num_calls = False, num_calls + 1
                if complete:
                    assert isinstance(json.loads(arguments), dict)
            case ContentDelta(text):
                assert text and not open_call
            case ReasoningDelta(text):
                assert text and not open_call and not num_calls
    assert not open_call and num_calls <= limit


@settings(max_examples=200, deadline=None)
@given(FORMS, TEXTS)
def test_without_calls_the_text_is_the_content(form: str | None, text: str) -> None:
    parsed = parse(form, text)
    if not parsed.calls:
        assert parsed.content == text
    pieces = [parsed.content, *(call.name for call in parsed.calls)]
    assert sum(map(len, pieces)) <= len(text)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "s", "long_key"]), JSON_VALUES, max_size=3)


def sayable(form: str, arguments: dict[str, Any]) -> bool:
    """Plain text between tags cannot say everything."""
    if form != "qwen3_coder":
        return True
    return all(not isinstance(v, str) or (k == "s" and "<" not in v) for k, v in arguments.items()) and not (
        "s" in arguments and not isinstance(arguments["s"], str)
    )


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.lists(ARGUMENTS, min_size=1, max_size=3), st.data())
def test_what_a_model_calls_is_what_comes_out(form: str, calls: list[dict[str, Any]], data: st.DataObject) -> None:
    calls = [arguments for arguments in calls if sayable(form, arguments)]
    text = "\n".join(written(form, "f", arguments) for arguments in calls)
    places = data.draw(st.lists(st.integers(0, max(1, len(text))), max_size=8))
    parsed = join_events(run(form, cut(text, places)))
    assert [(call.name, call.complete) for call in parsed.calls] == [("f", True)] * len(calls)
    assert [json.loads(call.arguments) for call in parsed.calls] == calls
    assert parsed.content == ""


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"s": 1}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"s\\": 1}"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"s": 1}}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"s": 1}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"s": 1}}'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"s": 1}}</tool_'),
        ("hermes", '<tool_call>[{"name": "f", "arguments": {"s": 1}}]</tool_call>'),
        ("hermes", '<tool_call>{"id": [1], "name": "f", "arguments": {"s": 1,}, "more": {}}</tool_call>'),
        ("json", '{"type": "function", "function": {"name": "f", "parameters": {"s": 1}}}'),
        ("json", '```json\n[{"name": "f", "arguments": {"s": 1}}]\n```'),
        ("json", '<tool_call>{"name": "f", "arguments": {"s": 1}}</tool_call>'),
        ("llama3_json", '<|python_tag|>{"type": "function", "name": "f", "parameters": {"s": 1}}'),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"s": 1}}]'),
        ("mistral", '[TOOL_CALLS]f{"s": 1}'),
        ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"s": 1}'),
        ("deepseek", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"s": 1}\n```'
                     '<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
        ("kimi_k2", '<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{"s": 1}'
                    '<|tool_call_end|><|tool_calls_section_end|>'),
        ("pythonic", "[f(s=1)]"),
        ("qwen3_coder", "<function=f><parameter=k>1</parameter></function>"),
    ],
)  # fmt: skip
def test_layouts_that_models_use(form: str, text: str) -> None:
    content, calls = found(form, text)
    assert content == "" and [name for name, _ in calls] == ["f"]
    assert list(calls[0][1].values()) == [1]


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("json", '{"name": "Bob", "parameters": {"age": 3}}'),
        ("json", '{"name": "f", "arguments": [1]}'),
        ("json", '[{"id": 1, "colour": "red"}]'),
        ("json", "```python\nprint(1)\n```"),
        ("json", 'The call is {"name": "f", "arguments": {}}'),
        ("llama3_json", "{}"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[len(s='x')]"),
        ("pythonic", "[f(s=open('x'))]"),
        ("pythonic", "[f(**{'s': 1})]"),
        ("pythonic", "[f(s=1"),
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "argum'),
        ("hermes", '<tool_call>{"name": "f f", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", "a < b and <tool_box> or <tool_call >"),
        ("mistral", "[TOOL_CALLS]"),
        ("deepseek", "<｜tool▁call▁begin｜>f and no more"),
        ("qwen3_coder", "<function=>x</function>"),
    ],
)
def test_what_is_no_call_is_content(form: str, text: str) -> None:
    assert found(form, text) == (text, [])


def test_a_call_behind_something_that_looked_like_one() -> None:
    text = 'Hm <tool_call> no, <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\nThere.'
    assert found("hermes", text) == ("Hm <tool_call> no,There.", [("f", {})])


def test_an_array_that_breaks_off_between_calls_keeps_the_first() -> None:
    assert found("json", '[{"name": "f", "arguments": {}}, 5]') == (", 5]", [("f", {})])


def test_values_follow_the_schema_where_the_text_has_no_types() -> None:
    text = written("qwen3_coder", "f", {"s": "12", "n": 3, "x": None, "free": [1, {"a": True}]})
    assert found("qwen3_coder", text) == ("", [("f", {"s": "12", "n": 3, "x": None, "free": [1, {"a": True}]})])


def test_what_models_get_wrong_in_json_is_put_right() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"s": "a\nb\tc\\d \\ud83d", "n": [True, None,],}}</tool_call>'
    assert found("hermes", text) == ("", [("f", {"s": "a\nb\tc\\d \ufffd", "n": [True, None]})])


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_call_cut_off_keeps_what_was_written_and_says_so(form: str) -> None:
    text = written(form, "f", {"s": "some words", "n": 1})
    parsed = parse(form, text[: text.index("words") + 2])
    if form == "pythonic":  # its calls are passed on whole
        assert parsed.calls == [] and parsed.content == text[: text.index("words") + 2]
        return
    (call,) = parsed.calls
    assert (call.name, call.arguments, call.complete) == ("f", '{"s": "some wo', False)


def test_broken_arguments_go_on_raw_up_to_the_end_of_the_call() -> None:
    parsed = parse("hermes", '<tool_call>{"name": "f", "arguments": {"s": oops!}}</tool_call> and more')
    (call,) = parsed.calls
    assert (call.arguments, call.complete, parsed.content) == ('{"s": oops!}}', False, "and more")


def test_arguments_are_passed_on_while_they_come() -> None:
    parser = make("hermes")
    assert parser.feed('Well. <tool_call>{"name": "f", ') == [ContentDelta("Well.")]
    start = ToolCallStart(0, "call_0", "f")
    assert parser.feed('"arguments": {"s": "one') == [start, ToolArgumentsDelta(0, '{"s": "one')]
    assert parser.feed(" two") == [ToolArgumentsDelta(0, " two")]
    assert parser.feed('"}}') == [ToolArgumentsDelta(0, '"}'), ToolCallEnd(0, True)]
    assert parser.feed("</tool_call>") == [] and parser.finish() == []


def test_text_is_passed_on_as_soon_as_it_cannot_be_a_marker() -> None:
    parser = make("hermes")
    assert parser.feed("a <") == [ContentDelta("a")]
    assert parser.feed("b") == [ContentDelta(" <b")]
    assert parser.feed(" <tool_c") == [] and parser.feed("ups") == [ContentDelta(" <tool_cups")]
    assert parser.feed("end \n") == [ContentDelta("end")] and parser.finish() == [ContentDelta(" \n")]


def test_calls_beyond_the_limit_are_dropped() -> None:
    text = written("hermes", "f", {}) + written("hermes", "f", {"s": 1})
    parser = make("hermes", limit=1)
    parsed = join_events(parser.feed(text) + parser.finish())
    assert [call.arguments for call in parsed.calls] == ["{}"] and parsed.content == ""
    assert parser.num_finished_calls == 2


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content"),
    [
        ("<think>\nhm\n\n</think>\n\nHi", False, "hm", "Hi"),
        ("hm</think>Hi", True, "hm", "Hi"),
        ("<think>hm</think>Hi", True, "hm", "Hi"),
        ("\n<think>a < b </th", False, "a < b </th", ""),
        ("never closed ", True, "never closed ", ""),
        ("<think></think>Hi", False, None, "Hi"),
        ("Hi <think>no</think>", False, None, "Hi <think>no</think>"),
        (" <thin", False, None, " <thin"),
    ],
)
@pytest.mark.parametrize("form", [None, "hermes"])
def test_reasoning(form: str | None, text: str, opened: bool, reasoning: str | None, content: str) -> None:
    parsed = parse(form, text, reasoning=THINK, in_reasoning=opened)
    assert (parsed.reasoning, parsed.content, parsed.calls) == (reasoning, content, [])


def test_calls_in_the_reasoning_are_reasoning_and_behind_it_calls() -> None:
    call = written("json", "f", {"s": 1})
    parsed = parse("json", f"<think>{call}</think>\n{call}", reasoning=THINK)
    assert parsed.reasoning == call and parsed.content == "" and [c.arguments for c in parsed.calls] == ['{"s": 1}']


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_nothing_but_the_text_itself_is_kept_waiting(form: str) -> None:
    """Reading is linear because the window stays short, whatever comes letter by letter."""
    parser = make(form)
    long = "x" * 3000 + '\\" é' * 300
    for letter in written(form, "f", {"s": long, "n": [1] * 500}) + " " * 3000 + long + "<" * 500:
        parser.feed(letter)
        assert len(parser._source.window) <= 40
    parsed = join_events(parser.finish())
    assert parsed.calls == []  # it had ended long before


def test_which_format_a_template_says() -> None:
    assert detect_tool_format(None).name == detect_tool_format("{{ messages }}").name == "json"
    assert detect_tool_format("{% if tools %}<tool_call>").name == "hermes"
    assert detect_tool_format("{% if tools %}<tool_call>\n<function=").name == "qwen3_coder"
    assert detect_tool_format("{{ tools }}[TOOL_CALLS]").name == "mistral"
    assert all(tool_format(name) is not None for name in (*FORMATS, *ALIASES)) and tool_format("none") is None
    assert detect_reasoning("{{ '<think>' }}") is THINK and detect_reasoning("x") is None
    assert reasoning_format("qwen3") is THINK and reasoning_format("zzz") is None


def test_whether_a_prompt_has_opened_the_reasoning() -> None:
    assert THINK.open_in("<|assistant|><think>\n") and not THINK.open_in("<think>\n</think>\n")
    assert not THINK.open_in("<|assistant|>") and DEEPSEEK_R1.open_in("<|assistant|>")
    assert not DEEPSEEK_R1.open_in("<|assistant|><think></think>")
