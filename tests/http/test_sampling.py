"""Ranges, defaults and limits of the sampling fields, through the API."""

from __future__ import annotations

from typing import Any

import pytest

from slipring.runtime.request import SamplingParams
from slipring.shm.spec import SamplingDefaults
from tests.http.calls import CHAT, COMPLETIONS, HELLO, call, make_api, refused
from tests.http.engine_double import EOS, VOCAB, EngineDouble


def sent(fields: dict[str, Any], path: str = CHAT, engine: EngineDouble | None = None) -> SamplingParams:
    """What the engine is given for a request with these fields."""
    engine = engine or EngineDouble()
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hi"}
    response = call(make_api(engine), "POST", path, {**prompt, **fields})
    assert response.status == 200, response.body
    return engine.requests[-1].params


def param_refused(fields: dict[str, Any], path: str = CHAT) -> str | None:
    engine = EngineDouble()
    prompt = {"messages": HELLO} if path == CHAT else {"prompt": "hi"}
    response = call(make_api(engine), "POST", path, {**prompt, **fields})
    assert engine.requests == [], "refused before the engine sees it"
    return refused(response)["param"]


def test_defaults_are_openais_without_advice_from_the_model() -> None:
    params = sent({})
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.max_tokens == 200 - len(b"<user>hi</user><assistant>") and params.logprobs == -1
    assert sent({}, COMPLETIONS).max_tokens == 16


def test_the_models_advice_comes_before_openais_defaults_and_after_the_request() -> None:
    advice = SamplingDefaults(temperature=0.3, top_p=0.8, top_k=20, min_p=0.1, repetition_penalty=1.2)
    params = sent({}, engine=EngineDouble(defaults=advice))
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.3, 0.8, 20, 0.1)
    assert params.repetition_penalty == 1.2
    own = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    params = sent(own, engine=EngineDouble(defaults=advice))
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0, 1, 0, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1}, {"temperature": 2.1}, {"top_p": 0}, {"top_p": -0.1}, {"top_p": 1.1}, {"top_k": -2},
        {"min_p": 1.1}, {"min_p": -0.1}, {"presence_penalty": 2.1}, {"presence_penalty": 1e308},
        {"frequency_penalty": -2.1}, {"repetition_penalty": 0}, {"repetition_penalty": -1},
        {"repetition_penalty": 1e-300}, {"repetition_penalty": 1e300}, {"n": 0}, {"n": 129}, {"n": -1},
        {"seed": 1 << 63}, {"seed": -(1 << 63) - 1}, {"seed": 1 << 64}, {"max_tokens": 0}, {"max_tokens": -1},
        {"max_tokens": -(1 << 70)}, {"min_tokens": -1}, {"min_tokens": 9, "max_tokens": 8}, {"priority": 1 << 40},
        {"stop": ""}, {"stop": [""]}, {"stop": ["", "END"]}, {"stop": ["x"] * 17}, {"stop": ["a" * 1025]},
        {"stop_token_ids": [VOCAB]}, {"stop_token_ids": [-3]}, {"stop_token_ids": [1 << 70]},
        {"stop_token_ids": list(range(64))}, {"logit_bias": {"cat": 1}}, {"logit_bias": {"1.5": 1}},
        {"logit_bias": {"": 1}}, {"logit_bias": {"-1": 1}}, {"logit_bias": {"٣": 1}}, {"logit_bias": {str(VOCAB): 1}},
        {"logit_bias": {"1": 101}}, {"logit_bias": {"1": -100.5}}, {"logit_bias": {"9" * 5000: 1}},
        {"logit_bias": {str(i): 1 for i in range(2000)}}, {"cache_salt": ""}, {"best_of": 0}, {"best_of": 129},
        {"n": 2, "best_of": 1}, {"bad_words": [" "]}, {"bad_words": ["x"] * 513}, {"bad_words": ["y" * 1025]},
        {"bad_words": [f"{i}" + "y" * 1000 for i in range(9)]},
        {"allowed_token_ids": [VOCAB]}, {"allowed_token_ids": list(range(299)) * 9},
        {"stream_options": {"include_usage": True}},
        {"prompt_logprobs": 21}, {"prompt_logprobs": -1}, {"prompt_logprobs": VOCAB}, {"prompt_logprobs": VOCAB - 1},
        {"cache_salt": "s" * (1 << 20)}, {"min_tokens": 9, "max_tokens": 8},
        {"truncate_prompt_tokens": -2}, {"use_beam_search": True}, {"length_penalty": 2},
        {"early_stopping": True}, {"logits_processors": ["a.b"]},
    ],
    ids=lambda fields: str(fields)[:50],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_out_of_range_names_the_first_bad_field(fields: dict[str, Any], path: str) -> None:
    assert param_refused(fields, path) == next(reversed(fields) if "best_of" in fields else iter(fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2}, {"temperature": 1e-9}, {"top_p": 1e-9}, {"top_k": -1}, {"top_k": 10**9}, {"min_p": 1},
        {"n": 128, "max_tokens": 1}, {"seed": -1}, {"seed": (1 << 63) - 1}, {"stop": ["x"] * 16}, {"stop": []},
        {"logit_bias": {}}, {"metadata": {}}, {"stop_token_ids": []}, {"best_of": 1}, {"bad_words": []},
        {"max_tokens": 10**9}, {"min_tokens": 8, "max_tokens": 8}, {"user": ""}, {"prompt_logprobs": None},
        {"stop": ["a" * 1024]}, {"stream": False, "stream_options": None},
    ],
    ids=lambda fields: str(fields)[:50],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_the_edges_are_accepted(fields: dict[str, Any], path: str) -> None:
    sent(fields, path)


def test_top_k_is_off_for_minus_one_and_bounded_by_the_vocabulary() -> None:
    assert sent({"top_k": -1}).top_k == sent({"top_k": 0}).top_k == 0
    assert sent({"top_k": 10**30}).top_k == VOCAB


def test_seed_zero_is_a_seed_and_null_is_none() -> None:
    assert sent({"seed": 0}).seed == 0
    assert sent({"seed": -1}).seed == (1 << 64) - 1
    assert sent({"seed": None}).seed == 1000  # drawn by the engine


def test_every_unseeded_prompt_of_a_batch_draws_its_own_seed() -> None:
    engine = EngineDouble()
    call(make_api(engine), "POST", COMPLETIONS, {"prompt": ["a", "a"]})
    assert len({request.params.seed for request in engine.requests}) == 2
    call(make_api(engine), "POST", COMPLETIONS, {"prompt": ["a", "a"], "seed": 5})
    assert [request.params.seed for request in engine.requests[2:]] == [5, 5]


def test_end_of_sequence_ids_join_the_requests_own_unless_ignored() -> None:
    assert sent({}).stop_token_ids == (EOS,)
    assert sent({"stop_token_ids": [7, 7, 8]}).stop_token_ids == (7, 8, EOS)
    assert sent({"stop_token_ids": [7], "ignore_eos": True}).stop_token_ids == (7,)
    assert len(sent({"stop_token_ids": list(range(63))}).stop_token_ids) == 64


def test_max_tokens_is_cut_to_the_room_left() -> None:
    assert sent({"max_tokens": 10**9}, COMPLETIONS).max_tokens == 198
    assert sent({"max_completion_tokens": 5, "max_tokens": 9}).max_tokens == 5


def test_logit_bias_and_min_tokens_reach_the_engine() -> None:
    params = sent({"logit_bias": {"5": -100, "6": 2.5}, "min_tokens": 3})
    assert params.logit_bias == ((5, -100.0), (6, 2.5)) and params.min_tokens == 3


def test_the_rest_of_the_request_reaches_the_engine() -> None:
    engine = EngineDouble()
    fields = {
        "stop": "END", "include_stop_str_in_output": True, "skip_special_tokens": False, "cache_salt": "s",
        "priority": -3, "n": 2,
    }  # fmt: skip
    sent(fields, engine=engine)
    request = engine.requests[-1]
    assert (request.stop, request.include_stop_str_in_output, request.skip_special_tokens) == (("END",), True, False)
    assert (request.cache_salt, request.priority, request.n) == ("s", -3, 2)


def test_bad_words_and_allowed_ids_reach_the_engine() -> None:
    params = sent({"bad_words": ["no", " way"], "allowed_token_ids": [7, 8, 7]})
    assert params.bad_words == (tuple(b"no"), tuple(b" no"), tuple(b"way"), tuple(b" way"))
    assert params.allowed_token_ids == (7, 8)


def test_fifty_thousand_bad_words_are_refused_quickly() -> None:
    assert param_refused({"bad_words": [f"w{i}" for i in range(50_000)]}) == "bad_words"


def test_half_a_million_stop_strings_are_refused_quickly() -> None:
    assert param_refused({"stop": [f"x{i}" for i in range(500_000)]}) == "stop"
