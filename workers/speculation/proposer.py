"""`Proposer`: whoever guesses a row's next tokens, and its null twin.

A proposer keeps its own state per batch-table row, which follows the row's tokens: `admit` when the row is handed
out, `accept` with every token that was drawn for it. What it proposes is only a guess: the target draws its own token
at each place, and a draft is kept while it equals that (`verify.py`). So no proposer can change an answer, and a
proposer may forget a row, or be wrong, at any time. Under rejection sampling it cannot bend the distribution.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

    from slipring.workers.batch import Batch
    from slipring.workers.entries import Entries
    from slipring.workers.speculation.verify import Runs

IntArray = NDArray[np.int64]
PROPOSAL = np.dtype([("token_id", np.int64), ("chance", np.float32)])
"""A token that a draft might have been, and the chance that it had."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guesses for each decode entry of a step: a tree that hangs below the row's last token, or a chain.

    A draft stands behind the one that it follows, so the first n of a tree are a tree.
    """

    tokens: IntArray
    """[D, K]; the first num[i] of a row mean something."""
    num: IntArray
    """[D]"""
    parents: IntArray | None = None
    """[D, K]: index of the draft that each one follows, -1: the row's last token; always below its own index, also
    beyond num[i]. None: chains, where each follows the one before it."""
    worth: NDArray[np.float64] | None = None
    """[D, K]: the chance that a draft is accepted, as far as the proposer can tell: never more than that of the one
    that it follows. None: it cannot tell."""
    proposals: NDArray[np.void] | None = None
    """[D, K, C] of `PROPOSAL`: what each draft was drawn from, for chains that are judged by rejection sampling;
    chances are 0 where a draft was chosen. Whether a draft is left out must not depend on what was drawn there or
    later. None: drafts are compared with what the target draws."""

    @classmethod
    def none(cls, num_entries: int, width: int = 0) -> Drafts:
        return cls(np.zeros((num_entries, width), np.int64), np.zeros(num_entries, np.int64))

    def first(self, num: IntArray) -> Drafts:
        """The first num[i] [D] of each entry's; what is a chain then, or was, comes without `parents`."""
        width = int(num.max(initial=0))
        parents = None if self.parents is None else self.parents[:, :width]
        if parents is not None:
            place = np.arange(width)
            forks = (parents != place - 1) & (place < num[:, None])
            parents = parents if forks.any() else None
        worth = None if self.worth is None else self.worth[:, :width]
        proposals = None if self.proposals is None else self.proposals[:, :width]
        return Drafts(self.tokens[:, :width], num, parents, worth, proposals)

    def keep(self, kept: NDArray[np.bool_]) -> Drafts:
        """Those of [D, K] alone; whoever is kept, so is the draft that it follows."""
        num = kept.sum(1)
        if self.parents is None:
            return self.first(num)
        order = np.argsort(~kept, 1, kind="stable")
        index = np.concatenate((np.full((len(num), 1), -1), kept.cumsum(1) - 1), 1)  # of each draft afterwards
        parents = np.take_along_axis(np.take_along_axis(index, self.parents + 1, 1), order, 1)
        worth = None if self.worth is None else np.take_along_axis(self.worth, order, 1)
        return Drafts(np.take_along_axis(self.tokens, order, 1), num, parents, worth).first(num)

    def of(self, at: IntArray, num_entries: int) -> Drafts:
        """These as those of the entries `at`, among so many; the others have none."""
        width = self.tokens.shape[1]
        tokens, num = np.zeros((num_entries, width), np.int64), np.zeros(num_entries, np.int64)
        tokens[at], num[at] = self.tokens, self.num
        parents = worth = proposals = None
        if self.parents is not None:
            parents = Drafts(tokens, num).follows.copy()
            parents[at] = self.parents
        if self.worth is not None:
            worth = np.zeros(tokens.shape)
            worth[at] = self.worth
        if self.proposals is not None:
            proposals = np.zeros((*tokens.shape, self.proposals.shape[2]), PROPOSAL)
            proposals[at] = self.proposals
        return Drafts(tokens, num, parents, worth, proposals)

    def of_those(self, entries: NDArray[np.bool_]) -> Drafts:
        """Those of the entries [D] for which it is true; the others have none."""
        return replace(self, num=np.where(entries, self.num, 0))

    def or_else(self, other: Drafts) -> Drafts:
        """`other`'s for the entries that have none. What drafts are worth is kept if both tell."""
        here, width = self.num > 0, max(self.tokens.shape[1], other.tokens.shape[1])
        both = Drafts(np.zeros((len(here), width), np.int64), np.where(here, self.num, other.num))
        parents = None if self.parents is None and other.parents is None else both.follows.copy()
        worth = None if self.worth is None or other.worth is None else np.zeros(both.tokens.shape)
        given = [drafts.proposals.shape[2] for drafts in (self, other) if drafts.proposals is not None]
        proposals = np.zeros((*both.tokens.shape, max(given)), PROPOSAL) if given else None
        for drafts, at in ((self, np.flatnonzero(here)), (other, np.flatnonzero(~here))):
            own = drafts.tokens.shape[1]
            both.tokens[at, :own] = drafts.tokens[at]
            if parents is not None:
                parents[at, :own] = drafts.follows[at]
            if worth is not None and drafts.worth is not None:
                worth[at, :own] = drafts.worth[at]
            if proposals is not None and drafts.proposals is not None:
                proposals[at, :own, : drafts.proposals.shape[2]] = drafts.proposals[at]
        return replace(both, parents=parents, worth=worth, proposals=proposals)

    @property
    def follows(self) -> IntArray:
        """`parents`, of chains too."""
        if self.parents is not None:
            return self.parents
        return np.broadcast_to(np.arange(-1, self.tokens.shape[1] - 1), self.tokens.shape)


class Proposer(Protocol):
    @property
    def is_free(self) -> bool:
        """Proposing costs next to nothing, so it may be asked for more than will be used."""
        ...

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        """The row belongs to another request now, whose tokens so far are `token_ids`."""
        ...

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        """tokens[i, :counts[i]] [R, W] were drawn for rows[i]; `rows` are distinct."""
        ...

    def saw(self, entries: Entries, batch: Batch, hidden: Tensor, runs: Runs | None) -> None:
        """A step is over: hidden [T, hidden] of its tokens, in the batch's order, and what was drawn.

        The hidden state behind which run i's k-th token was drawn is that of the entry's token `runs.path[i, k]`:
        hidden[batch.entry_at[i] + runs.path[i, k]] for a decode entry. `accept` has been told the tokens already.
        """
        ...

    def catch_up(self, rows: IntArray) -> None:
        """Drafts are about to be asked for these rows: do now what was put off for them."""
        ...

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        """At most most[i] drafts for rows[i], to follow its last token. Whoever asks has called `catch_up` for the rows
        that it asks for any, since their last tokens were accepted."""
        ...

    def step_took(self, num_tokens: int, seconds: float) -> None:
        """A step of decode rows alone has computed so many tokens, drafts included."""
        ...

    def overwritten(self, blocks: IntArray) -> None:
        """These blocks [n] of the pool hold something else now, which no step computed: it came from a KV tier.

        Called from another thread, while no step has these blocks.
        """
        ...


class NullProposer:
    """Guesses nothing."""

    is_free = True

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        """Nothing to remember."""

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        """Nothing to remember."""

    def saw(self, entries: Entries, batch: Batch, hidden: Tensor, runs: Runs | None) -> None:
        """Nothing to remember."""

    def catch_up(self, rows: IntArray) -> None:
        """Nothing to make up for."""

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        return Drafts.none(len(rows))

    def step_took(self, num_tokens: int, seconds: float) -> None:
        """Nothing to learn."""

    def overwritten(self, blocks: IntArray) -> None:
        """Nothing to forget."""


class ProposerAround:
    """Another proposer, of which a subclass changes a part. That one catches up once it is known for which rows it is
    asked (`_ask_inner`)."""

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner

    @property
    def is_free(self) -> bool:
        return self._inner.is_free

    def admit(self, row: int, token_ids: NDArray[np.int32]) -> None:
        self._inner.admit(row, token_ids)

    def accept(self, rows: IntArray, tokens: IntArray, counts: IntArray) -> None:
        self._inner.accept(rows, tokens, counts)

    def saw(self, entries: Entries, batch: Batch, hidden: Tensor, runs: Runs | None) -> None:
        self._inner.saw(entries, batch, hidden, runs)

    def catch_up(self, rows: IntArray) -> None:
        """Nothing yet: perhaps not all of these rows will be asked for."""

    def propose(self, rows: IntArray, most: IntArray) -> Drafts:
        return self._ask_inner(rows, most)

    def step_took(self, num_tokens: int, seconds: float) -> None:
        self._inner.step_took(num_tokens, seconds)

    def overwritten(self, blocks: IntArray) -> None:
        self._inner.overwritten(blocks)

    def _ask_inner(self, rows: IntArray, most: IntArray) -> Drafts:
        self._inner.catch_up(rows[most > 0])
        return self._inner.propose(rows, most)
