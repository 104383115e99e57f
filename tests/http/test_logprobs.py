"""Where tokens begin in a completion's text, also when one character takes several of them."""

from __future__ import annotations

import pytest

from slipring.http.logprobs import LogprobWriter, TextOffset
from slipring.runtime.model import open_model
from slipring.runtime.request import TokenLogprob


def test_text_offsets_count_whole_characters() -> None:
    tokenizer = open_model("smollm2").tokenizer()
    text = "a \U0001f98a\U0001f98a dog"
    ids = tokenizer.encode(text)
    entries = [TokenLogprob(i, -0.5, 1, ()) for i in ids]
    writer = LogprobWriter(tokenizer)  # type: ignore[arg-type]
    whole = writer.completion(entries, TextOffset(10))
    assert whole["text_offset"][-1] == 10 + text.index(" dog")
    offset = TextOffset(10)
    pieces = [writer.completion([entry], offset)["text_offset"][0] for entry in entries]
    assert pieces == whole["text_offset"], "streamed, one token at a time, they are the same"


@pytest.mark.parametrize("skips", [True, False])
def test_bytes_and_offsets_are_those_of_the_text(skips: bool) -> None:
    """Special tokens in its middle, as after an ignored end, add to them what they add to the text."""
    tokenizer = open_model("smollm2").tokenizer()
    ids = [*tokenizer.encode("a b"), *sorted(tokenizer.special_ids)[:2], *tokenizer.encode(" c")]
    entries = [TokenLogprob(i, -0.5, 1, ((i, -0.5),)) for i in ids]
    text = tokenizer.decode(ids, skip_special_tokens=skips)
    writer = LogprobWriter(tokenizer, skips_special_tokens=skips)  # type: ignore[arg-type]
    content = writer.chat(entries)["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == text
    assert content[2]["token"] == tokenizer.token_text(ids[2]) != "", "it is named all the same"
    assert writer.completion(entries, TextOffset(0))["text_offset"][-1] == text.index(" c")
