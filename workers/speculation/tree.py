"""The shape of draft trees: how deep each token hangs, and which others it sees.

A step's tokens lie in the cache at consecutive positions from an entry's `root` on: the row's last token, then its
drafts in their order. What a draft sees there is the row's past, its ancestors and itself; its place in the sequence,
which turns its keys and names its noise, is root + depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipring.workers.speculation.proposer import Drafts

IntArray = NDArray[np.int64]
MAX_TOKENS = 63
"""Of a tree, the row's last one included: the bits of a mask."""


@dataclass(frozen=True, slots=True)
class Branches:
    """How W tokens of each of D decode entries hang together."""

    root: IntArray
    """[D]: position in the cache that bit 0 of `sees` stands for; what lies before it is seen by all."""
    depth: IntArray
    """[D, W]: place in the sequence, counted from `root`."""
    sees: IntArray
    """[D, W]: bit b: the token sees position root + b of the cache."""


def depths(parents: IntArray) -> IntArray:
    """parents [D, K] as in `Drafts` -> [D, 1 + K]: 0 for the row's last token, then each draft's depth."""
    found = np.zeros((len(parents), 1 + parents.shape[1]), np.int64)
    entry = np.arange(len(parents))
    for draft in range(parents.shape[1]):
        found[:, draft + 1] = found[entry, parents[:, draft] + 1] + 1
    return found


def lineage(parents: IntArray) -> IntArray:
    """parents [D, K] as in `Drafts` -> [D, 1 + K]: bits of each token's ancestors and its own."""
    found = np.ones((len(parents), 1 + parents.shape[1]), np.int64)
    entry = np.arange(len(parents))
    for draft in range(parents.shape[1]):
        found[:, draft + 1] = found[entry, parents[:, draft] + 1] | (1 << (draft + 1))
    return found


def ranks(parents: IntArray) -> IntArray:
    """parents [D, K] as in `Drafts` -> [D, K]: how many children stand before each draft or one of its ancestors, each
    among its own siblings."""
    entries, width = parents.shape
    found = np.zeros((entries, 1 + width), np.int64)
    born = np.zeros((entries, 1 + width), np.int64)
    entry = np.arange(entries)
    for draft in range(width):
        parent = parents[:, draft] + 1
        found[:, draft + 1] = found[entry, parent] + born[entry, parent]
        born[entry, parent] += 1
    return found[:, 1:]


def branches_of(start: IntArray, drafts: Drafts) -> Branches | None:
    """Of the drafts that entries verify which begin at start [D]; None for chains, which need no telling."""
    if drafts.parents is None:
        return None
    return Branches(start, depths(drafts.parents), lineage(drafts.parents))
