"""The bounded store of responses against a plain model of it."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given, settings
from hypothesis import strategies as st

from slipring.http.response_store import ResponseStore, StoredResponse
from slipring.http.responses_bodies import Item

names = st.sampled_from("abcdef")
operations = st.lists(
    st.tuples(st.just("put"), names, st.integers(0, 120))
    | st.tuples(st.just("get"), names, st.just(0))
    | st.tuples(st.just("remove"), names, st.just(0)),
    max_size=40,
)


def stored(name: str, size: int) -> StoredResponse:
    return StoredResponse.of(b"x" * size, [Item(id=f"i{name}", role="user", content=name)], [])


@given(operations, st.integers(0, 4), st.integers(50, 300))
@settings(max_examples=300, deadline=None)
def test_it_keeps_what_was_asked_for_last_within_its_bounds(
    done: list[tuple[str, str, int]], max_responses: int, max_bytes: int
) -> None:
    store, model = ResponseStore(max_responses, max_bytes), OrderedDict[str, StoredResponse]()
    for operation, name, size in done:
        if operation == "put":
            entry = stored(name, size)
            store.put(name, entry)
            model.pop(name, None)
            if entry.num_bytes <= max_bytes:
                model[name] = entry
            while len(model) > max_responses or sum(e.num_bytes for e in model.values()) > max_bytes:
                model.popitem(last=False)
        elif operation == "get":
            assert store.get(name) is model.get(name)
            if name in model:
                model.move_to_end(name)
        else:
            assert store.remove(name) == (model.pop(name, None) is not None)
        assert len(store) == len(model) and store.num_bytes == sum(e.num_bytes for e in model.values())
    for name in "abcdef":
        found = store.find_item(f"i{name}")
        assert (found is not None) == (name in model) and (found is None or found.content == name)


def test_a_conversation_comes_back_as_it_was() -> None:
    read = [Item(id="1", type="message", role="user", content="é")]
    answered = [Item(id="2", type="function_call", call_id="c", name="f", arguments="{}")]
    entry = StoredResponse.of(b"{}", read, answered)
    assert entry.conversation() == read + answered and entry.num_read == 1 and entry.item_ids == ("1", "2")
