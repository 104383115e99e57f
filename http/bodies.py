"""Typed request bodies, and how a body that does not fit its type is explained.

msgspec decodes strictly: a bool is no integer, a string no number, NaN no JSON. Every optional field takes null for
absent, and unknown fields are skipped. Ranges and meanings are checked later (`sampling.py`, `chat.py`,
`completions.py`); this file only knows shapes.
"""

from __future__ import annotations

import functools
import re
from typing import Any, TypeVar

import msgspec

from slipring.http.body_depth import check_depth
from slipring.http.errors import ApiError, bad_request
from slipring.http.ranges import RANGES


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    """OpenAI pads its chunks against who counts bytes on the line; here there is nothing to switch."""


class RemoteKv(msgspec.Struct):
    """Another instance, as vLLM's p2p tier names it."""

    kv_request_id: str | None = None
    remote_host: str | None = None
    remote_port: int | None = None


class KvTransferParams(msgspec.Struct, forbid_unknown_fields=True):
    """What a request lets the KV tiers do, in vLLM's names. See `remote_kv.py` for what other instances are told."""

    max_offload_tokens: int | None = None
    max_load_tokens: int | None = None
    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    remote_host: str | None = None
    remote_port: int | None = None
    remote_decoder: RemoteKv | None = None
    remote_prefiller: RemoteKv | None = None
    remote_kv_source: RemoteKv | None = None
    # What a proxy hands on from the one to the other. Here pages are found by their content, so it says nothing.
    remote_engine_id: str | None = None
    remote_block_ids: Any = None
    remote_request_id: str | None = None
    tp_size: int | None = None


class SamplingBody(msgspec.Struct, kw_only=True):
    """What completions and chat have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    echo: bool | None = None
    cache_salt: str | None = None
    kv_transfer_params: KvTransferParams | None = None
    priority: int | None = None
    user: str | None = None
    prompt_logprobs: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    # Known, and refused while they are not supported: silently ignoring them would give a wrong answer.
    use_beam_search: Any = None
    early_stopping: Any = None
    logits_processors: Any = None
    length_penalty: Any = None


class CompletionBody(SamplingBody, kw_only=True):
    prompt: str | list[int | str | list[int]] | None = None
    logprobs: int | None = None
    suffix: str | None = None
    prompt_embeds: Any = None
    response_format: Any = None


class EmbeddingBody(msgspec.Struct, kw_only=True):
    input: str | list[int | str | list[int]] | None = None
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatBody(SamplingBody, kw_only=True):
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    modalities: Any = None
    functions: Any = None
    function_call: Any = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class Invocation(msgspec.Struct):
    """Enough of a body to tell a chat from a completion."""

    messages: msgspec.Raw = msgspec.Raw(b"null")


class AbortBody(msgspec.Struct, kw_only=True):
    request_ids: list[str] | None = None
    """Ids of answers, or the x-request-id of their requests. None: everything."""


Body = TypeVar("Body", bound=msgspec.Struct)


@functools.cache
def _decoder(kind: type[Body]) -> msgspec.json.Decoder[Body]:
    return msgspec.json.Decoder(kind)


def decode(data: bytes, kind: type[Body]) -> Body:
    """Raises ApiError (400) naming the field and what would be accepted."""
    check_depth(data)
    try:
        return _decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        words = "half a UTF-16 surrogate pair" if _ends_in_half_a_pair(data, error) else error
        raise bad_request(f"The body is not valid JSON: {words}.", code="invalid_json") from None


def _ends_in_half_a_pair(data: bytes, error: Exception) -> bool:
    """Near the end msgspec calls it truncated, since the other half does not fit any more."""
    return "truncated" in str(error) and _HALF_A_PAIR.search(data[-12:]) is not None


_HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_WORDS = {"str": "a string", "int": "an integer", "float": "a number", "bool": "a boolean",
          "array": "an array", "object": "an object", "null": "null"}  # fmt: skip
_EXPECTED = re.compile(r"Expected `(?P<wanted>[^`]+)`, got `(?P<got>[^`]+)`")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")
_UNKNOWN = re.compile(r"contains unknown field `(?P<name>[^`]+)`")
_PATH = re.compile(r" - at `(?P<path>[^`]+)`$")
_STEP, _INDEX = re.compile(r"\[\.\.\.\]|\[\d+\]|[^.\[\]]+"), re.compile(r"\[\d+\]")


def _explain(text: str, kind: type[msgspec.Struct]) -> ApiError:
    """msgspec's sentence in our words: "Expected `int | null`, got `str` - at `$.n`" becomes an error on `n`."""
    at = _PATH.search(text)
    full = at["path"].removeprefix("$").lstrip(".") if at else ""
    path = full.replace("[...]", "")  # values of an object, whose key is not told
    where = "The body" if not path else f"`{path}`" if path == full else f"A value of `{path}`"
    if missing := _MISSING.search(text):
        path = f"{path}.{missing['name']}" if path else missing["name"]
        return bad_request(f"Missing required field `{path}`.", path, "missing_required_parameter")
    if expected := _EXPECTED.search(text):
        wanted = _in_words(expected["wanted"])
        got = _WORDS.get(expected["got"], expected["got"])
        return bad_request(f"{where} must be {wanted}, got {got}.", path or None, "invalid_type")
    if unknown := _UNKNOWN.search(text):
        path = f"{path}.{unknown['name']}" if path else unknown["name"]
        return bad_request(f"Unknown field `{path}`.", path, "unknown_parameter")
    if text.startswith("Number out of range"):
        limits = RANGES.get(path)
        wanted = _instead_of_a_number(full, kind) if limits is None else limits.words()
        return bad_request(f"{where} must be {wanted}, got a number out of range.", path or None, "invalid_value")
    return bad_request(f"{where}: {text[: at.start()] if at else text}.", path or None, "invalid_value")


def _in_words(types: str) -> str:
    return " or ".join(_WORDS.get(word, word) for word in types.split(" | "))


def _instead_of_a_number(path: str, kind: type[msgspec.Struct]) -> str:
    """What a field accepts: msgspec looks at a number's size before it asks whether there may be one."""
    value: object = 0.5
    for part in reversed(_STEP.findall(path)):
        value = [value] if _INDEX.fullmatch(part) else {part: value}
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        if expected := _EXPECTED.search(str(error)):
            return _in_words(expected["wanted"])
    return "a number of at most 1.8e308 in size"
