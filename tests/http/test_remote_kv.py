"""One instance computes a prompt, another goes on from its pages: two real servers, and the requests of a proxy."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.tier_rig import TINY_BLOCK_BYTES, save_tiny_model
from tests.serving import Server, free_port

PROMPT = [4 + 11 * number % 250 for number in range(90)]
NUM_REUSED = 88
NOWHERE = {"remote_host": "10.1.1.1", "remote_port": 1}


def flags(role: str, **tier: Any) -> list[str]:
    extra = {"cpu_bytes_to_use": 200 * TINY_BLOCK_BYTES, "secondary_tiers": [{"type": "p2p", **tier}]}
    config = json.dumps({"kv_role": role, "kv_connector_extra_config": extra})
    return ["--block-size", "4", "--cpu-threads", "1", "--dtype", "float32", "--kv-transfer-config", config]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    model = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    port = free_port()
    producer = Server(*flags("kv_producer", port=port), model=model)
    consumer = Server(*flags("kv_consumer", peers=[f"localhost:{port}"]), model=model)
    with producer, consumer:
        yield producer, consumer


def complete(server: Server, prompt: list[int], max_tokens: int, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)


def test_the_consumer_goes_on_where_the_producer_has_been(pair: tuple[Server, Server]) -> None:
    producer, consumer = pair
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}
    first = complete(producer, PROMPT, 1, kv_transfer_params={**asked, "remote_host": None, "remote_port": None}).json()
    assert "kv_transfer_params" in first, first
    handed = first["kv_transfer_params"]
    assert handed["do_remote_prefill"] is True and handed["remote_host"] == "127.0.0.1"
    second = complete(consumer, PROMPT, 8, kv_transfer_params=handed).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == NUM_REUSED
    assert "kv_transfer_params" not in second
    alone = complete(producer, PROMPT, 8).json()
    assert second["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
    assert second["choices"][0]["token_ids"][:1] == first["choices"][0]["token_ids"]


def test_vllms_own_words_for_its_p2p_tier(pair: tuple[Server, Server]) -> None:
    producer, consumer = pair
    prompt = PROMPT[::-1]
    first = complete(producer, prompt, 1, kv_transfer_params={"remote_decoder": {"kv_request_id": "a"}}).json()
    handed = first["kv_transfer_params"]
    where = {"kv_request_id": "a", "remote_host": handed["remote_host"], "remote_port": handed["remote_port"]}
    second = complete(consumer, prompt, 2, kv_transfer_params={"remote_kv_source": where}).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == NUM_REUSED


def test_the_producer_pulls_nothing_and_the_consumer_serves_nothing(pair: tuple[Server, Server]) -> None:
    producer, consumer = pair
    prompt = [7, *PROMPT]
    complete(consumer, prompt, 1)
    assert complete(producer, prompt, 1).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("consumer", "params", "words"),
    [
        (True, {"do_remote_decode": True}, "serves no KV pages"),
        (True, {"do_remote_prefill": True, "remote_port": 1}, "remote_host` is missing"),
        (True, {"do_remote_prefill": True, **NOWHERE}, "not among the peers"),
        (True, {"remote_prefiller": {"remote_host": "10.1.1.1"}}, "remote_prefiller.remote_port"),
        (False, {"do_remote_prefill": True, **NOWHERE}, r"\(none\)"),
        (False, {"do_remote_decode": True, "do_remote_prefill": True, **NOWHERE}, "exclude each other"),
        (False, {"load_tier_filter": ["x"]}, "Unknown field `kv_transfer_params.load_tier_filter`"),
    ],
)
def test_what_cannot_be_done_is_refused(
    pair: tuple[Server, Server], consumer: bool, params: dict[str, Any], words: str
) -> None:
    answer = complete(pair[consumer], PROMPT, 1, kv_transfer_params=params)
    assert answer.status_code == 400
    assert re.search(words, answer.json()["error"]["message"])


def test_a_handover_is_no_stream(pair: tuple[Server, Server]) -> None:
    answer = complete(pair[0], PROMPT, 1, stream=True, kv_transfer_params={"do_remote_decode": True})
    assert answer.status_code == 400 and "stream" in answer.json()["error"]["message"]
