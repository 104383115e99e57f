"""`truncation: "auto"` of the Responses API: a conversation too long for the context loses its oldest turns."""

from __future__ import annotations

from slipring.http.bodies import ChatBody
from slipring.http.chat import encode_prompt
from slipring.http.errors import ApiError
from slipring.http.served import ServedModel

_ROOM = 256
"""Tokens kept free for the answer when nothing says how long it may become."""


async def truncate(model: ServedModel, chat: ChatBody, size: int) -> None:
    """Leave out the oldest turns of `chat.messages`, but never the instructions, until the rest fits.

    Turns begin at the user's messages; the last one stays in any case. `size` as for `plan_chat`.
    """
    whole = chat.messages
    turns = [i for i, message in enumerate(whole) if message.role == "user"]
    first = turns[0] if turns else 0
    kept = [message for message in whole[:first] if message.role in ("system", "developer")]
    low, high = 0, max(0, len(turns) - 1)
    while low < high:  # the least number of turns to leave out, by halves
        middle = (low + high) // 2
        chat.messages = kept + whole[turns[middle] :] if middle else whole
        if await _fits(model, chat, size):
            high = middle
        else:
            low = middle + 1
    chat.messages = kept + whole[turns[low] :] if low else whole


async def _fits(model: ServedModel, chat: ChatBody, size: int) -> bool:
    limit = model.engine.max_model_len
    room = min(chat.max_completion_tokens or _ROOM, limit // 4)
    try:
        return len(await encode_prompt(model, chat, size)) + room <= limit
    except ApiError as error:
        if error.code != "context_length_exceeded":
            raise
        return False
