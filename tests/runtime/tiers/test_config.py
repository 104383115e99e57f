"""`--kv-transfer-config` in vLLM's keys."""

from __future__ import annotations

import json
from typing import Any

import pytest

from slipring.runtime.tiers.config import FileTier, ObjectTier, of_size, parse


def extra(**keys: Any) -> str:
    return json.dumps({"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 20} | keys})


def test_what_vllm_users_write() -> None:
    text = json.dumps(
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "TieringOffloadingSpec",
                "cpu_bytes_to_use": 4 << 30,
                "eviction_policy": "arc",
                "secondary_tiers": [
                    {"type": "fs", "root_dir": "/tmp/kv", "n_read_threads": 8},
                    {"type": "obj", "store_config": {"bucket": "kv", "endpoint_override": "localhost:9000"}},
                ],
            },
        }
    )
    config = parse(text).kv_connector_extra_config
    assert (config.cpu_bytes_to_use, config.eviction_policy, config.offload_prompt_only) == (4 << 30, "arc", False)
    files, objects = config.secondary_tiers
    assert isinstance(files, FileTier) and files.n_read_threads == 8
    assert isinstance(objects, ObjectTier) and objects.store_config.bucket == "kv"


def test_the_short_form() -> None:
    assert of_size(0.5).kv_connector_extra_config.cpu_bytes_to_use == 1 << 29
    for too_small in (0, -4):
        with pytest.raises(ValueError, match=f"must be more than 0 GiB, got {too_small}"):
            of_size(too_small)
    for nothing in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="number of GiB"):
            of_size(nothing)


SERVES, ASKS = {"type": "p2p", "port": 5710}, {"type": "p2p", "peers": ["a:5710"]}


def with_role(role: str, *tiers: dict[str, Any]) -> str:
    return json.dumps({"kv_role": role} | json.loads(extra(secondary_tiers=list(tiers))))


def test_roles_are_about_peers() -> None:
    everywhere = SERVES | {"host": "0.0.0.0", "advertise_host": "node-a"}
    assert parse(with_role("kv_producer", everywhere)).kv_role == "kv_producer"
    six = {"type": "p2p", "host": "[::1]", "port": 5710, "peers": ["[::1]:5711"]}
    for role, tiers in (
        ("kv_both", [six]),
        ("kv_producer", [SERVES]),
        ("kv_consumer", [ASKS]),
        ("kv_both", [SERVES | ASKS]),
    ):
        assert parse(with_role(role, *tiers)).kv_role == role


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("{}", "kv_connector_extra_config"),
        (extra(evicton_policy="lru"), "unknown key `evicton_policy`; did you mean `eviction_policy`"),
        (extra(eviction_policy="fifo"), "one of arc, lru"),
        (extra(cpu_bytes_to_use=0), "at least 1"),
        (extra(cpu_bytes_to_use="4G"), "int"),
        (extra(store_threshold=-1), "0 or more"),
        (extra(blocks_per_chunk=4), "blocks_per_chunk"),
        (extra(secondary_tiers=[{"type": "nfs"}]), "nfs"),
        (extra(secondary_tiers=[{"type": "fs"}]), "root_dir"),
        (extra(secondary_tiers=[{"type": "fs", "root_dir": "/x", "quota": 1}]), "did you mean `quota_bytes`"),
        (extra(secondary_tiers=[{"type": "fs", "root_dir": "/x", "quota_bytes": 0}]), "at least 1"),
        (extra(secondary_tiers=[{"type": "fs", "root_dir": ""}]), "root_dir"),
        (
            extra(secondary_tiers=[{"type": "fs", "root_dir": "/x", "n_read_threads": 0}]),
            "n_read_threads. must be from 1",
        ),
        (extra(secondary_tiers=[{"type": "fs", "root_dir": "/x", "n_write_threads": 1000}]), "n_write_threads"),
        (extra(secondary_tiers=[{"type": "fs", "root_dir": "/x", "load_timeout_s": 0}]), "load_timeout_s"),
        (extra(secondary_tiers=[{"type": "obj", "store_config": {"bucket": "b"}, "io_threads": 0}]), "io_threads"),
        (extra(secondary_tiers=[ASKS | {"num_threads": -1}]), "num_threads"),
        (extra(secondary_tiers=[{"type": "p2p"}]), "needs `peers` that it asks, a `port`"),
        (extra(secondary_tiers=[ASKS | {"host": "10.0.0.1"}]), "`host` says nothing without a `port`"),
        (extra(secondary_tiers=[ASKS | {"advertise_host": "b"}]), "`advertise_host` says nothing without a `port`"),
        (extra(secondary_tiers=[SERVES | {"advertise_host": ""}]), "`advertise_host` must be a name or an address"),
        (extra(secondary_tiers=[ASKS, {"type": "p2p", "peers": ["b:1", "A:5710"]}]), "a:5710. twice"),
        (extra(secondary_tiers=[{"type": "p2p", "peers": ["[::1]:1", "[0:0::1]:1"]}]), "twice"),
        (extra(secondary_tiers=[{"type": "p2p", "peers": ["2001:db8::1"]}]), "in brackets"),
        (extra(secondary_tiers=[{"type": "p2p", "port": 1, "host": "[::]"}]), "advertise_host"),
        (extra(secondary_tiers=[{"type": "p2p", "peers": ["here"]}]), "host:port"),
        (extra(secondary_tiers=[{"type": "p2p", "peers": [":5710"]}]), "host:port"),
        (extra(secondary_tiers=[{"type": "p2p", "peers": ["a:99999"]}]), "from 1 to 65535"),
        (extra(secondary_tiers=[{"type": "p2p", "peers": ["a:1", "a:1"]}]), "twice"),
        (extra(secondary_tiers=[{"type": "p2p", "port": 0}]), "port. must be from 1"),
        (extra(secondary_tiers=[{"type": "p2p", "port": 1, "host": "0.0.0.0"}]), "advertise_host"),
        (with_role("kv_producer"), "kv_producer needs a tier of type p2p with a `port`"),
        (with_role("kv_producer", SERVES | ASKS), "no `peers`"),
        (with_role("kv_consumer", SERVES | ASKS), "no `port`"),
        (with_role("kv_consumer", SERVES), "with `peers`"),
        (with_role("kv_both", SERVES, SERVES), "only one"),
        (with_role("kv_neither", ASKS), "kv_neither"),
        (
            '{"kv_connector": "NixlConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 1}}',
            "`kv_connector` must be OffloadingConnector; got 'NixlConnector'",
        ),
        (
            '{"kv_role": "x", "kv_connector_extra_config": {"cpu_bytes_to_use": 1}}',
            "must be kv_both or kv_producer or kv_consumer; got 'x'",
        ),
        (extra(store_threshold="a"), "`kv_connector_extra_config.store_threshold` must be of type int, got str"),
        (extra(secondary_tiers=[{"type": "zip"}]), "must be fs or obj or p2p; got 'zip'"),
        ("[]", "it must be of type object, got array"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=".*" + words.replace("`", ".").replace("?", "")):
        parse(text)
