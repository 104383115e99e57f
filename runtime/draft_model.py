"""The model that drafts for another one: found like any model, and refused where its vocabulary is another."""

from __future__ import annotations

from slipring.runtime.model import ModelError, open_model
from slipring.runtime.speculation import SpeculationError
from slipring.shm.spec import ModelSpec


def resolve_draft_model(name: str, target: str) -> ModelSpec:
    """The spec of the model `name`, which is to draft for the model `target`. Raises SpeculationError."""
    try:
        draft, ours = open_model(name), open_model(target)
        theirs, known = draft.tokenizer().vocabulary(), ours.tokenizer().vocabulary()
    except ModelError as error:
        raise SpeculationError(f"model: {error}") from None
    if theirs != known:
        other = next(token for token in theirs.keys() | known.keys() if theirs.get(token) != known.get(token))
        raise SpeculationError(
            f"model: {draft.spec.name} (in {name!r}) has another vocabulary than {ours.spec.name} (in {target!r}): "
            f"{len(theirs)} tokens and {len(known)}; {other!r} is {theirs.get(other)} and {known.get(other)}. "
            "A draft model must share its target's"
        )
    return draft.spec
