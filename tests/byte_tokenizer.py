"""A real tokenizer for tiny models: one token a byte, then an end of sequence, then unused ids."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS = 256


def byte_tokenizer() -> Tokenizer:
    """Ids 0 to 255 are the bytes themselves; `EOS` is a special token."""
    tokenizer = Tokenizer(models.BPE(vocab=_vocabulary(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def _vocabulary() -> dict[str, int]:
    """Each byte's printable stand-in (GPT-2's map)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
