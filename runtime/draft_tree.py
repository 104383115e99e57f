"""`speculative_token_tree`: a fixed tree of drafts, as vLLM and Medusa write it, checked.

A tree is a list of paths. (0,) is the best guess behind the row's last token, (1,) the second best, (0, 2) the third
best behind the best one. A path's beginnings are paths of the tree, too.
"""

from __future__ import annotations

import ast

MAX_NODES = 62
"""Drafts of a tree: what a mask of 63 bits holds beside the row's last token."""
_MAX_RANK = 31
Path = tuple[int, ...]


def parse_tree(given: str | list[list[int]]) -> tuple[Path, ...]:
    """Paths, shorter ones first; `given` is a list, or one in a string. Raises ValueError, which says what is wrong."""
    found = _literal(given) if isinstance(given, str) else given
    if not isinstance(found, list | tuple) or not found:
        raise ValueError("must be a list of paths, such as [[0], [1], [0, 0]]")
    paths: set[Path] = set()
    for path in found:
        if not isinstance(path, list | tuple) or not path or not all(_is_rank(rank) for rank in path):
            raise ValueError(f"{path!r} is no path: a list of ranks from 0 to {_MAX_RANK}, such as [0, 1]")
        if tuple(path) in paths:
            raise ValueError(f"{list(path)} stands there twice")
        paths.add(tuple(path))
    for path in sorted(paths):
        if path[:-1] and path[:-1] not in paths:
            raise ValueError(f"{list(path)} has no parent: add {list(path[:-1])}")
    if len(paths) > MAX_NODES:
        raise ValueError(f"has {len(paths)} paths; at most {MAX_NODES} can be verified at once")
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(f"{text[:60]!r} cannot be read as a list of paths, such as '[(0,), (1,), (0, 0)]'") from None


def _is_rank(rank: object) -> bool:
    return isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank <= _MAX_RANK
