"""How families of models write tool calls: one small description each, and which one a model uses.

    hermes        <tool_call>{"name": "f", "arguments": {...}}</tool_call>            Hermes, Qwen 2.5 and 3
    json          the same, and a bare or fenced {...} or [{...}, ...] that is all    the fallback
    llama3_json   {"name": "f", "parameters": {...}}; {...}, or behind <|python_tag|> Llama 3.x
    mistral       [TOOL_CALLS][{...}, ...], [TOOL_CALLS]f[ARGS]{...}, [TOOL_CALLS]f{...}
    deepseek      <|tool_call_begin|>f<|tool_sep|>{...}<|tool_call_end|> in wide bars; V3's with a fenced block
    kimi_k2       <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    pythonic      [f(a=1), g(b="x")]                                                  Llama 3.2 and 4, LFM2, Olmo
    qwen3_coder   <tool_call><function=f><parameter=a>1</parameter></function></tool_call>

Where a marker announces a call, unknown names are passed on (the caller can tell the model). Where nothing does, only
calls of tools that there are count: a JSON answer that has a "name" is an answer.
"""

from __future__ import annotations

from slipring.http.json_calls import FramedCalls, JsonCalls, MistralCalls
from slipring.http.python_calls import PythonCalls
from slipring.http.tool_calls import ToolFormat
from slipring.http.xml_calls import XmlCalls

HERMES = JsonCalls("hermes", ("<tool_call>", "<|tool_call|>"), ("</tool_call>",))
JSON = JsonCalls("json", ("<tool_call>",), ("</tool_call>",), beginnings=("{", "[", "```"))
LLAMA = JsonCalls("llama3_json", ("<|python_tag|>",), ("<|eom_id|>", "<|eot_id|>"), beginnings=("{",), special=True)
MISTRAL = MistralCalls()
DEEPSEEK = FramedCalls(
    "deepseek",
    section=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>"),
    call=("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>"),
    separator="<\uff5ctool\u2581sep\uff5c>",
    special=True,
)
KIMI = FramedCalls(
    "kimi_k2",
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call=("<|tool_call_begin|>", "<|tool_call_end|>"),
    separator="<|tool_call_argument_begin|>",
    special=True,
)
PYTHONIC = PythonCalls(
    "pythonic",
    markers=("<|python_start|>", "<|tool_call_start|>", "<function_calls>"),
    closers=("<|python_end|>", "<|tool_call_end|>", "</function_calls>"),
    special=True,
)
QWEN_CODER = XmlCalls()

FORMATS: dict[str, ToolFormat] = {
    form.name: form for form in (HERMES, JSON, LLAMA, MISTRAL, DEEPSEEK, KIMI, PYTHONIC, QWEN_CODER)
}
ALIASES = {
    "qwen": "hermes", "qwen3_json": "hermes", "granite": "hermes", "llama3": "llama3_json",
    "llama4_json": "llama3_json", "llama4_pythonic": "pythonic", "olmo3": "pythonic", "lfm2": "pythonic",
    "deepseek_v3": "deepseek", "deepseek_v31": "deepseek", "qwen3_xml": "qwen3_coder", "xlam": "json",
}  # fmt: skip
"""Names that other engines use for the same."""

_TELLTALES = (
    (DEEPSEEK.call[0], DEEPSEEK), (KIMI.call[0], KIMI), ("[TOOL_CALLS]", MISTRAL), ("<function=", QWEN_CODER),
    ("<tool_call>", HERMES), ("<|tool_call|>", HERMES), ("<|python_start|>", PYTHONIC),
    ("<|tool_call_start|>", PYTHONIC), ("<function_calls>", PYTHONIC), ("<|python_tag|>", LLAMA),
    ('"parameters": dictionary', LLAMA),
)  # fmt: skip
"""What a chat template prints where its model writes calls in that format; the first that is found decides."""


def detect_tool_format(template: str | None) -> ToolFormat:
    """By what the chat template prints; plain JSON where that says nothing."""
    if template is not None and "tools" in template:
        for text, form in _TELLTALES:
            if text in template:
                return form
    return JSON


def tool_format(name: str) -> ToolFormat | None:
    """By the name that --tool-call-parser takes."""
    return FORMATS.get(ALIASES.get(name, name))


def forcible(form: ToolFormat | None) -> JsonCalls:
    """The format in which calls are forced: the model's own where that is JSON in plain text, else plain JSON."""
    return form if isinstance(form, JsonCalls) else JSON
