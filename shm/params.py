"""`SamplingParams`: how one request wants its tokens drawn. Written to the batch table, read by the sampler."""

from __future__ import annotations

import msgspec

MAX_LOGPROBS = 20
"""Most alternatives per position that a request may ask for (OpenAI's limit for chat)."""
MAX_LOGIT_BIAS = 1024
"""Most logit-bias entries per request; the batch table keeps room for this many in each row."""
MAX_STOP_TOKEN_IDS = 64
"""Most stop token ids per request, the model's own end-of-sequence ids included."""
MAX_ALLOWED_TOKEN_IDS = 2048
"""Most ids that a request may restrict itself to."""
MAX_BAD_WORD_TOKENS = 4096
"""Room for a request's bad words: tokens of all their spellings, and one more for each spelling."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Resolved and validated; nothing in here is optional any more except where None has a meaning of its own.

    Order of operations (the sampler's contract): logit bias, then the masks (allowed ids, bad words, min_tokens),
    penalties, temperature, min_p, top_k, top_p, then Gumbel noise keyed by (seed, choice, position). A temperature
    below 1e-5 is greedy.
    """

    max_tokens: int
    """Most tokens to generate; already cut to the context. 0: the prompt is computed and nothing is drawn."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    """64 bits, unsigned; an unseeded request has drawn its own at submit."""
    choice: int = 0
    """Index of this completion among the request's n; part of the noise key."""
    min_tokens: int = 0
    """Before so many tokens are out, stop token ids cannot be drawn."""
    grammar: int = 0
    """Id, given out by the engine, of the grammar that the output must match; 0: none."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the request when drawn: the request's own, and the model's end-of-sequence ids unless ignored."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int = -1
    """Alternatives to report for each position (0: the drawn token alone); -1: none at all."""
    allowed_token_ids: tuple[int, ...] = ()
    """Only these may be drawn; empty: all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences: where the output ends with all of one but its last token, that one is not drawn."""
    prompt_logprobs: int = -1
    """As `logprobs`, for the prompt's own tokens from the second on."""
    embedding_size: int = 0
    """Not 0: report the last hidden state of the prompt, which has so many numbers; with `max_tokens` 0 only."""
