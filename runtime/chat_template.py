"""Renders a model's own chat template, as transformers does. Owns the sandbox and what a template is told.

The template is the model's, never the request's: Jinja's sandbox bounds what it can reach but not how much memory it
takes. Whatever goes wrong while rendering is the caller's input refused by the model's rules: a `TemplateError` with
the template's own sentence (HTTP 400).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes
from jinja2.parser import Parser

from slipring.runtime.architectures import ModelError
from slipring.runtime.gguf import GgufFile, read_gguf
from slipring.runtime.tokenizer import Tokenizer
from slipring.runtime.written_markers import WrittenMarkers, parts
from slipring.shm.spec import ModelSpec

RESERVED = frozenset({
    "messages", "conversation", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
    "bos_token", "eos_token", "tokenize", "return_dict", "return_tensors", "padding", "truncation", "max_length",
    "raise_exception", "strftime_now", "namespace", "dict", "range", "self",
})  # fmt: skip
"""Names that a request may not set through template arguments: the server's own, and the template's functions."""

_REASONING = ("reasoning_content", "thinking", "reasoning")
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
"""Marks the end of the final message. The trailing space shows whether the template trims what it prints."""


class TemplateError(Exception):
    """The messages cannot be rendered; the message is the template's own sentence where it has one (HTTP 400)."""


class ReservedArgumentError(TemplateError):
    """A template argument has a reserved name, `argument` (HTTP 400)."""

    def __init__(self, argument: str) -> None:
        super().__init__(f"chat template argument {argument!r} is reserved and cannot be set by a request")
        self.argument = argument


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; when rendering a prompt it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own protocol)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        # A scope and not just its body: variables set inside a call block stay inside it, as in transformers.
        scope = nodes.Scope(lineno=next(parser.stream).lineno)
        scope.body = list(parser.parse_statements(("name:endgeneration",), drop_needle=True))
        return scope


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which would change what the model reads.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled template, with a second one for requests with tools where the model brings two."""

    def __init__(
        self,
        source: str,
        bos_token: str | None = None,
        eos_token: str | None = None,
        tool_source: str | None = None,
        markers: Iterable[str] = (),
    ) -> None:
        """`markers`: the special tokens, which mean nothing in what is rendered (`render_parts`).

        Raises ModelError when a source is not a Jinja template.
        """
        self._written = WrittenMarkers(markers)
        environment = _environment()
        try:
            self._plain = (source, environment.from_string(source))
            self._tools = self._plain if tool_source is None else (tool_source, environment.from_string(tool_source))
        except (jinja2.TemplateSyntaxError, RecursionError, TypeError) as error:
            where = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
            raise ModelError(f"the chat template does not compile: {error}{where}") from None
        self.source = self._tools[0]
        """The text of the template, of the one for tools where there are two."""
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: text for name, text in tokens.items() if text is not None}

    @property
    def takes_tools(self) -> bool:
        """The template prints descriptions of tools."""
        return "tools" in self.source

    @property
    def takes_calls(self) -> bool:
        """The template prints tool calls, and knows the role of their results."""
        return "tool_calls" in self.source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt's text. `messages` and `tools` are plain JSON values, `content` a string or absent.

        `continue_final_message` ends the prompt inside the last message. Raises TemplateError; ReservedArgumentError
        (one of them) for an argument of a reserved name.
        """
        refuse_reserved(kwargs)
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt exclude each other")
        source, template = self._tools if tools else self._plain
        seen = [_as_seen(message, source) for message in messages]
        final = _tag_final(seen, source) if continue_final_message else None
        context = {
            **self._tokens,
            **kwargs,
            "messages": seen,
            "tools": list(tools) if tools else None,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        text = _run(template, context)
        return text if final is None else _cut_at_tag(text, final)

    def render_parts(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """As `render`, in parts to be tokenized one by one: each special token that is written in messages, tools or
        arguments is cut between two of them. One part when there are none."""
        found: list[str] = []
        text = self.render(
            self._written.hide(list(messages), found),
            tools=self._written.hide(list(tools), found) if tools else None,
            **self._written.hide(kwargs, found),
        )
        return parts(text, found)


def refuse_reserved(arguments: Mapping[str, Any]) -> None:
    """Raises ReservedArgumentError. For callers to use before they spread a request's arguments into `render`."""
    for name in arguments:
        if name in RESERVED:
            raise ReservedArgumentError(name)


def _as_seen(message: Mapping[str, Any], source: str) -> dict[str, Any]:
    """A message as the template gets it: absent rather than null, known roles only, reasoning under every name."""
    seen = {key: value for key, value in message.items() if value is not None}
    if seen.get("role") == "developer" and "developer" not in source:
        seen["role"] = "system"
    if "content" not in seen and "tool_calls" not in source:
        # A template that knows no tool calls takes for granted that every message has content.
        seen["content"] = ""
    reasoning = next((seen[key] for key in _REASONING if key in seen), None)
    return seen if reasoning is None else {"thinking": reasoning, **seen, "reasoning_content": reasoning}


def _tag_final(seen: list[dict[str, Any]], source: str) -> str:
    """Marks the end of the last message's content, which is returned."""
    final = seen[-1].get("content") if seen else None
    if not isinstance(final, str) or not final:
        raise TemplateError("continue_final_message needs a last message with content to continue")
    if "content" not in source:
        raise TemplateError("continue_final_message: this chat template does not print the content of messages")
    seen[-1]["content"] = final + _CONTINUE_TAG
    return final


def _run(template: jinja2.Template, context: dict[str, Any]) -> str:
    try:
        return template.render(context)
    except jinja2.UndefinedError as error:
        raise TemplateError(f"the chat template needs something that is missing: {error.message}") from None
    except jinja2.TemplateError as error:
        raise TemplateError(error.message or type(error).__name__) from None
    except Exception as error:  # a template is a program: it can fail in every way that Python can
        raise TemplateError(f"the chat template cannot render these messages: {error}") from None


def _cut_at_tag(text: str, final: str) -> str:
    tag = _CONTINUE_TAG.strip()
    position = text.rfind(tag)
    if position < 0 or final.strip() not in text:
        raise TemplateError("continue_final_message: the chat template does not print the last message as it is")
    if text.startswith(_CONTINUE_TAG, position):
        return text[:position]
    # The template trims content, so it would have trimmed the end of the message as well.
    return text[:position].rstrip()


def load_chat_template(spec: ModelSpec, tokenizer: Tokenizer, gguf: GgufFile | None = None) -> ChatTemplate | None:
    """The model's own template, or None. `tokenizer` knows the special tokens' texts; `gguf` saves reading it again.

    Raises ModelError when the model has a template that cannot be read or compiled.
    """
    if spec.format == "gguf":
        sources = _gguf_sources(gguf or read_gguf(spec.path))
    else:
        sources = _directory_sources(Path(spec.path))
    default = sources.get("default", sources.get("tool_use"))
    if default is None:
        return None
    return ChatTemplate(
        default, tokenizer.bos_token, tokenizer.eos_token, sources.get("tool_use"), tokenizer.marker_texts()
    )


def _gguf_sources(gguf: GgufFile) -> dict[str, str]:
    """`tokenizer.chat_template`, and `tokenizer.chat_template.NAME` for further ones."""
    key = "tokenizer.chat_template"
    named = {"default": gguf.get(key, str), "tool_use": gguf.get(f"{key}.tool_use", str)}
    return {name: source for name, source in named.items() if source}


def _directory_sources(directory: Path) -> dict[str, str]:
    """chat_template.jinja and additional_chat_templates/NAME.jinja, else tokenizer_config.json's entry."""
    files = {"default": directory / "chat_template.jinja"}
    files["tool_use"] = directory / "additional_chat_templates" / "tool_use.jinja"
    sources = {name: path.read_text("utf-8") for name, path in files.items() if path.is_file()}
    if "default" in sources:
        return sources
    for name in ("tokenizer_config.json", "chat_template.json"):
        found = _config_sources(directory / name)
        if found:
            return found | sources
    return sources


def _config_sources(path: Path) -> dict[str, str]:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    entry = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(entry, str):
        return {"default": entry}
    if isinstance(entry, list):
        return {e["name"]: e["template"] for e in entry if isinstance(e, dict) and e.keys() >= {"name", "template"}}
    return {}
