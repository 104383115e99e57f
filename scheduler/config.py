"""The scheduler's own frozen config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    num_blocks: int
    """Blocks in the KV pool."""
    block_size: int
    """Tokens per block."""
    max_num_seqs: int
    """Most rows in one step."""
    max_num_batched_tokens: int
    """Most tokens in one step; at least max_num_seqs."""
    num_rows: int
    """Rows of the batch table: max_num_seqs plus headroom for rows in quarantine."""
    max_model_len: int
    max_draft: int = 0
    """Most drafts of a row in one step; 0: no speculation."""
    draft_depth: int = 0
    """How many of them are expected to be accepted at most; 0: all."""
    draft_widths: tuple[int, ...] = ()
    """[max_num_seqs + 1]: drafts of a row by the number of decode rows; empty: `max_draft` for any number."""
    enable_prefix_caching: bool = True
    policy: str = "fcfs"
    """`fcfs` or `priority`."""
    priority_age_s: float = 30.0
    """A waiting request gains one level of priority every so many seconds."""
    max_mixed_chunk: int = 512
    """Most prompt tokens in a step that also decodes, so that decode rows never stall for long."""

    def __post_init__(self) -> None:
        if not self.draft_depth:
            object.__setattr__(self, "draft_depth", self.max_draft)
        if not self.draft_widths:
            object.__setattr__(self, "draft_widths", (self.max_draft,) * (self.max_num_seqs + 1))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError("max_num_batched_tokens must be at least max_num_seqs")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ValueError("block_size must be a power of two")
        if self.num_rows < self.max_num_seqs:
            raise ValueError("num_rows must be at least max_num_seqs")
