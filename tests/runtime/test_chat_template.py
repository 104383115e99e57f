"""Rendering against transformers, and everything that a template can do wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from slipring.runtime.chat_template import (
    ChatTemplate,
    ReservedArgumentError,
    TemplateError,
    load_chat_template,
    refuse_reserved,
)
from slipring.runtime.model import ModelError, open_model
from slipring.shm.spec import ModelSpec

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>' + call.function.name + ' ' + (call.function.arguments | tojson) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n' }}{%- endif %}
{%- endif %}
"""
TRIMMING = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content | trim }} [/INST]"
    "{% else %} {{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
BLOCKS = """{% set ns = namespace(system='') %}
{% for m in messages %}
    {% if m.role == 'system' %}
        {% set ns.system = m.content %}
        {% continue %}
    {% endif %}
    {% if loop.index > 10 %}{% break %}{% endif %}
    {% generation %}{% set tail = '!' %}{{ m.role }}: {{ m.content | upper }}{{ tail }}{% endgeneration %}

{% endfor %}
{{ ns.system }} {{ messages[0].content.split(' ') | join('-') }} {{ {'a': '<é&>', 'b': [1, 2.5, none, true]} | tojson }}
{{ {'b': 1, 'a': 2} | tojson(indent=2, sort_keys=true) }} {{ strftime_now('%Y') }} {{ missing }}|{{ range(3) | list }}
"""
REASONING = (
    "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }};{% endfor %}"
)
SOURCES = [CHATML, TOOLS, TRIMMING, BLOCKS, REASONING]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"é<": {}}}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi  "}],
    [{"role": "system", "content": "Be <b>good</b> & brief."}, {"role": "user", "content": "é 你好 'x'"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": " b ", "reasoning": "why"},
        {"role": "user", "content": "{{ 7 * 7 }}"},
    ],
]


def transformers_render(source: str, chat: list[dict[str, Any]], tools: Any = None, **kwargs: Any) -> str:
    rendered, _ = render_jinja_template([chat], tools=tools, chat_template=source, **kwargs)
    return rendered[0]


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_equals_transformers(source: str, chat: list[dict[str, Any]], generate: bool, tools: Any) -> None:
    ours = ChatTemplate(source, "<s>", "</s>").render(chat, tools, generate)
    theirs = transformers_render(source, chat, tools, add_generation_prompt=generate, bos_token="<s>", eos_token="</s>")
    assert ours == theirs


@pytest.mark.parametrize("source", [CHATML, TOOLS, TRIMMING])
@pytest.mark.parametrize("content", ["Once upon", "Once upon ", " x", "\n"])
def test_continuing_equals_transformers(source: str, content: str) -> None:
    chat = [{"role": "user", "content": "Tell"}, {"role": "assistant", "content": content}]
    ours = ChatTemplate(source, "<s>", "</s>").render(chat, add_generation_prompt=False, continue_final_message=True)
    theirs = transformers_render(source, chat, continue_final_message=True, bos_token="<s>", eos_token="</s>")
    assert ours == theirs
    assert ours.rstrip().endswith(content.strip())
    assert chat[-1]["content"] == content


def test_template_arguments() -> None:
    template = ChatTemplate(TOOLS)
    chat = [{"role": "user", "content": "x"}]
    assert template.render(chat, enable_thinking=False).endswith("</think>\n")
    assert "think" not in template.render(chat, enable_thinking=True)
    for name in ("messages", "conversation", "chat_template", "tokenize", "bos_token", "eos_token", "raise_exception"):
        with pytest.raises(ReservedArgumentError, match=name) as caught:
            template.render(chat, **{name: "x"})
        assert caught.value.argument == name
    for name in ("tools", "add_generation_prompt", "continue_final_message"):
        with pytest.raises(ReservedArgumentError, match=name):
            refuse_reserved({"fine": 1, name: "x"})


def test_absent_special_tokens_render_as_nothing() -> None:
    assert ChatTemplate("{{ bos_token }}{{ messages[0].content }}").render([{"role": "user", "content": "x"}]) == "x"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{{ raise_exception('Conversation roles must alternate user/assistant') }}", "roles must alternate"),
        ("{{ messages[5].content }}", "missing"),
        ("{{ messages[0]['nothing'] + 'x' }}", "nothing"),
        ("{{ unknown.attribute }}", "unknown"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ 'a' + 1 }}", "str"),
        ("{{ range(10 ** 9) | list }}", "Range too big"),
        ("{{ messages.append(1) }}", "not safe|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "__class__|unsafe"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_failing_templates_give_their_own_sentence(source: str, sentence: str) -> None:
    with pytest.raises(TemplateError, match=sentence) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert "Traceback" not in str(caught.value)


def test_a_source_that_is_no_template() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for %}")


def test_continue_final_message_is_refused() -> None:
    template = ChatTemplate(CHATML)
    for chat in ([], [{"role": "assistant"}], [{"role": "assistant", "content": ""}]):
        with pytest.raises(TemplateError, match="continue_final_message"):
            template.render(chat, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(TemplateError, match="exclude each other"):
        template.render(CHATS[0], add_generation_prompt=True, continue_final_message=True)
    for source in ("{{ 'x' }}", "{{ messages[0].content[:3] }}"):
        with pytest.raises(TemplateError, match="continue_final_message"):
            ChatTemplate(source).render(CHATS[0], add_generation_prompt=False, continue_final_message=True)


def test_developer_is_system_unless_the_template_knows_it() -> None:
    chat = [{"role": "developer", "content": "D"}, {"role": "user", "content": "x"}]
    assert "<|im_start|>system\nD<|im_end|>" in ChatTemplate(CHATML).render(chat)
    knows = "{% for m in messages %}{{ m.role }}{% if m.role == 'developer' %}!{% endif %}{% endfor %}"
    assert ChatTemplate(knows).render(chat) == "developer!user"
    assert chat[0]["role"] == "developer"


def test_null_content_of_a_tool_call() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chat = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert '<tool_call>f {"a": 1}</tool_call>' in ChatTemplate(TOOLS).render(chat)
    assert "<|im_start|>assistant\n<|im_end|>" in ChatTemplate(CHATML).render(chat)


def test_the_tool_template_serves_requests_with_tools() -> None:
    template = ChatTemplate("plain", None, None, "with {{ tools | length }}")
    assert template.render([]) == template.render([], []) == "plain"
    assert template.render([], [TOOL]) == "with 1"


def test_smollm2() -> None:
    template = open_model("smollm2").chat_template()
    assert template is not None
    text = template.render([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.fixture
def directory(tmp_path: Path) -> ModelSpec:
    spec = open_model("smollm2").spec
    return msgspec.structs.replace(spec, path=str(tmp_path), format="safetensors")


def load(spec: ModelSpec) -> ChatTemplate | None:
    return load_chat_template(spec, open_model("smollm2").tokenizer())


def test_sources_of_a_directory(directory: ModelSpec, tmp_path: Path) -> None:
    assert load(directory) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one {{ eos_token }}"}))
    template = load(directory)
    assert template is not None and template.render([]) == "one <|im_end|>"
    named = [{"name": "default", "template": "default"}, {"name": "tool_use", "template": "tools"}]
    config.write_text(json.dumps({"chat_template": named}))
    template = load(directory)
    assert template is not None
    assert (template.render([]), template.render([], [TOOL])) == ("default", "tools")
    (tmp_path / "chat_template.jinja").write_text("file")
    template = load(directory)
    assert template is not None and template.render([], [TOOL]) == "file"
    config.write_text("nonsense")
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="not valid JSON"):
        load(directory)
