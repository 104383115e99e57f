"""Combinations of parameters without their whole product."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations, one value of each axis, in which any two values of different axes meet at least once."""

    def meetings(places: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(places), 2))

    product = list(itertools.product(*(range(len(axis)) for axis in axes)))
    left = set().union(*map(meetings, product))
    chosen = []
    while left:
        best = max(product, key=lambda places: len(meetings(places) & left))
        left -= meetings(best)
        chosen.append(best)
    return [tuple(axis[place] for axis, place in zip(axes, places, strict=True)) for places in sorted(chosen)]
