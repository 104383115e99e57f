"""Where tokens begin in a completion's text, also when one character takes several of them."""

from __future__ import annotations

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
