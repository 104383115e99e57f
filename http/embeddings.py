"""POST /v1/embeddings: a text as the hidden state that the model has at its end.

What comes out of the final norm at the last token, as vLLM pools decoder models, cut to `dimensions` and scaled to
length 1. Texts that are cut lose their end (`truncation_side` right), as a text's meaning is thought to be in front.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson

from slipring.http.bodies import EmbeddingBody, decode
from slipring.http.errors import bad_request
from slipring.http.exchange import JSON, ApiRequest, ApiResponse
from slipring.http.generation import Flights, Generation, collect
from slipring.http.placement import Placement, placement
from slipring.http.prompts import Prompt, Wanted, cut_of, read_prompts
from slipring.http.ranges import Range, check_range
from slipring.http.reply import Choice, Collector, Usage
from slipring.http.sampling import check_salt
from slipring.http.served import ServedModel
from slipring.runtime.request import GenerationRequest, SamplingParams

_FORMATS = ("float", "base64")
_SIZE_OF_A_NUMBER = 0.2
"""What writing one takes, in characters of text work."""


async def create_embeddings(model: ServedModel, flights: Flights, request: ApiRequest) -> ApiResponse:
    body = decode(await request.read(), EmbeddingBody)
    name = model.check_name(body.model)
    _check(model, body)
    cut = cut_of(model, body.truncate_prompt_tokens, body.truncation_side, "right", 0)
    prompts = await read_prompts(model, body.input, Wanted("input", body.add_special_tokens is not False, cut))
    lengths = [len(prompt.token_ids) for prompt in prompts]
    model.check_choices(len(lengths), sum(lengths))
    place = placement(request)
    requests = [_request(model, body, prompt, request.request_id, place) for prompt in prompts]
    generation = Generation(model, requests, "input", len(requests))
    choices = await collect(flights, generation, Collector([""] * len(prompts), Usage(lengths, 1)))
    size = len(choices) * model.engine.spec.hidden_size * _SIZE_OF_A_NUMBER
    data = await model.engine.text_work(int(size), _write, body, name, choices, sum(lengths))
    return ApiResponse(200, data, {"Content-Type": JSON})


def _check(model: ServedModel, body: EmbeddingBody) -> None:
    if body.encoding_format not in (None, *_FORMATS):
        raise bad_request('`encoding_format` must be "float" or "base64".', "encoding_format")
    check_range("dimensions", body.dimensions, Range(1, model.engine.spec.hidden_size))
    check_range("priority", body.priority)
    check_salt(body.cache_salt)


def _request(
    model: ServedModel, body: EmbeddingBody, prompt: Prompt, request_id: str, place: Placement
) -> GenerationRequest:
    model.room(len(prompt.token_ids), "input", least=0)
    return GenerationRequest(
        request_id=model.engine_id(f"embd-{request_id}"),
        prompt_token_ids=prompt.token_ids,
        params=SamplingParams(max_tokens=0, embedding_size=model.engine.spec.hidden_size),
        cache_salt=body.cache_salt,
        priority=body.priority or 0,
        data_parallel_rank=place.rank,
        session=place.session,
    )


def _write(body: EmbeddingBody, name: str, choices: list[Choice], num_tokens: int) -> bytes:
    """The answer's bytes."""
    vectors = [_vector(choice, body.dimensions) for choice in choices]
    shown: list[Any] = vectors
    if body.encoding_format == "base64":
        shown = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    answer = {
        "object": "list",
        "data": [{"object": "embedding", "index": i, "embedding": value} for i, value in enumerate(shown)],
        "model": name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)


def _vector(choice: Choice, dimensions: int | None) -> np.ndarray:
    """[dimensions] float32 of length 1."""
    assert choice.embedding is not None
    vector = choice.embedding[:dimensions].astype(np.float64)
    norm = float(np.linalg.norm(vector))
    return (vector / norm if norm else vector).astype(np.float32)
