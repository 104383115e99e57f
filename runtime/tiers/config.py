"""`KvTransferConfig`: what `--kv-transfer-config` may say, in vLLM's keys; `--kv-offloading-size` is its short form.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both",
     "kv_connector_extra_config": {
        "cpu_bytes_to_use": 4294967296, "eviction_policy": "lru", "store_threshold": 0, "offload_prompt_only": false,
        "secondary_tiers": [
            {"type": "fs", "root_dir": "/var/cache/kv", "quota_bytes": 107374182400},
            {"type": "obj", "store_config": {"bucket": "kv", "endpoint_override": "10.0.0.2:9000"}},
            {"type": "p2p", "host": "10.0.0.1", "port": 5710, "peers": ["10.0.0.3:5710"]}]}}

`kv_role` is about peers: a kv_producer serves its pages and asks nobody for any, a kv_consumer asks and does not serve,
kv_both (the default) does what its p2p tiers say.

An unknown key is an error that names the nearest known one. Where we differ from vLLM: an answer's KV is kept by
default, a page on a slow tier has a digest, a directory may have a quota, and a load that fails is always recomputed.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from typing import Literal, get_args, get_origin

import msgspec

from slipring.runtime.tiers.address import check_port, is_everywhere, peer_name, split_peer
from slipring.scheduler.offload.policy import POLICIES


class FileTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="fs"):
    root_dir: str
    quota_bytes: int | None = None
    """Of all files in the directory together, whoever writes them. None: until the disk is full."""
    n_read_threads: int = 4
    n_write_threads: int = 2
    load_timeout_s: float = 5.0
    """After that a page is recomputed, and the tier is left alone for a while."""


class ObjectStoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the service is. Credentials not given here come from the usual AWS_* variables."""

    bucket: str
    endpoint_override: str | None = None
    """`host:port` or a URL; None: AWS."""
    scheme: str = "http"
    region: str = "us-east-1"
    access_key_id: str | None = None
    secret_access_key: str | None = None
    session_token: str | None = None


class ObjectTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="obj"):
    store_config: ObjectStoreConfig
    prefix: str = "slipring"
    quota_bytes: int | None = None
    io_threads: int = 4
    load_timeout_s: float = 5.0


class PeerTier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="p2p"):
    """The CPU tiers of other instances of the same model, and ours for them."""

    peers: list[str] = []
    """`host:port` of each, asked in this order."""
    host: str | None = None
    """Where we listen, 127.0.0.1 if that is not said. The network is trusted: a private address."""
    port: int | None = None
    """Where we serve our own pages; None: we do not."""
    advertise_host: str | None = None
    """By which the others reach us, where that is not `host`."""
    num_threads: int = 4
    load_timeout_s: float = 2.0

    @property
    def listens_at(self) -> str:
        return "127.0.0.1" if self.host is None else self.host


_MAX_THREADS = 256
_MAX_TIMEOUT_S = 3600.0
SecondaryTier = FileTier | ObjectTier | PeerTier


class ExtraConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cpu_bytes_to_use: int
    """Of the CPU tier, which all replicas share."""
    eviction_policy: str = "lru"
    store_threshold: int = 0
    """A block is stored only when it has been offered so many times."""
    offload_prompt_only: bool = False
    secondary_tiers: list[SecondaryTier] = []
    # Given by vLLM's users, and true here whatever they say.
    spec_name: Literal["CPUOffloadingSpec", "TieringOffloadingSpec"] | None = None
    blocks_per_chunk: Literal[1] = 1
    canonical_layout: bool = True


class KvTransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kv_connector_extra_config: ExtraConfig
    kv_connector: Literal["OffloadingConnector"] = "OffloadingConnector"
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    kv_load_failure_policy: Literal["recompute"] = "recompute"


def parse(text: str) -> KvTransferConfig:
    """Raises ValueError, in words for people."""
    try:
        config = msgspec.json.decode(text, type=KvTransferConfig)
    except msgspec.ValidationError as error:
        raise ValueError(_explain(str(error))) from None
    except msgspec.DecodeError as error:
        raise ValueError(f"is not valid JSON: {error}") from None
    _check(config.kv_connector_extra_config)
    _check_role(config)
    return config


def of_size(gibibytes: float) -> KvTransferConfig:
    """`--kv-offloading-size`. Raises ValueError."""
    if not math.isfinite(gibibytes):
        raise ValueError(f"must be a number of GiB, got {gibibytes}")
    if gibibytes * 2**30 < 1:
        raise ValueError(f"must be more than 0 GiB, got {gibibytes:g}")
    extra = ExtraConfig(cpu_bytes_to_use=int(gibibytes * 2**30))
    _check(extra)
    return KvTransferConfig(kv_connector_extra_config=extra)


def _check(extra: ExtraConfig) -> None:
    if extra.cpu_bytes_to_use < 1:
        raise ValueError(f"`cpu_bytes_to_use` must be at least 1, got {extra.cpu_bytes_to_use}")
    if extra.eviction_policy not in POLICIES:
        known = ", ".join(sorted(POLICIES))
        raise ValueError(f"`eviction_policy` must be one of {known}; got {extra.eviction_policy!r}")
    if extra.store_threshold < 0:
        raise ValueError(f"`store_threshold` must be 0 or more, got {extra.store_threshold}")
    for tier in extra.secondary_tiers:
        _check_tier(tier)
    _check_asked_once([peer for tier in extra.secondary_tiers if isinstance(tier, PeerTier) for peer in tier.peers])


def _check_tier(tier: SecondaryTier) -> None:
    if isinstance(tier, PeerTier):
        _check_peers(tier)
    elif tier.quota_bytes is not None and tier.quota_bytes < 1:
        raise ValueError(f"`quota_bytes` must be at least 1, got {tier.quota_bytes}")
    for name in ("n_read_threads", "n_write_threads", "io_threads", "num_threads"):
        if not 1 <= (count := getattr(tier, name, 1)) <= _MAX_THREADS:
            raise ValueError(f"`{name}` must be from 1 to {_MAX_THREADS}, got {count}")
    if not 0 < tier.load_timeout_s <= _MAX_TIMEOUT_S:
        raise ValueError(f"`load_timeout_s` must be above 0 and at most {_MAX_TIMEOUT_S:g}, got {tier.load_timeout_s}")
    if isinstance(tier, FileTier) and not tier.root_dir:
        raise ValueError("`root_dir` must not be empty")


def _check_peers(tier: PeerTier) -> None:
    if tier.port is None:
        for name in ("host", "advertise_host"):
            if getattr(tier, name) is not None:
                raise ValueError(
                    f"`{name}` says nothing without a `port`: that is where a tier of type p2p serves pages"
                )
        if not tier.peers:
            raise ValueError("a tier of type p2p needs `peers` that it asks, a `port` that it serves pages at, or both")
        return
    check_port("port", tier.port)
    if tier.advertise_host is None and is_everywhere(tier.listens_at):
        raise ValueError(
            f"`host` {tier.host!r} is every address of this machine: `advertise_host` must say by which the others "
            "reach us"
        )
    if tier.advertise_host is not None and is_everywhere(tier.advertise_host):
        raise ValueError(f"`advertise_host` must be a name or an address, got {tier.advertise_host!r}")


def _check_asked_once(peers: list[str]) -> None:
    """Of all tiers together: the second would only ask again what the first has not got."""
    times = Counter(peer_name(*split_peer(peer)) for peer in peers)
    for peer in peers:
        if times[peer_name(*split_peer(peer))] > 1:
            raise ValueError(f"`peers` holds {peer!r} twice; each is asked by one tier, and once")


def _check_role(config: KvTransferConfig) -> None:
    tiers = [tier for tier in config.kv_connector_extra_config.secondary_tiers if isinstance(tier, PeerTier)]
    num_serving, asks = sum(tier.port is not None for tier in tiers), any(tier.peers for tier in tiers)
    if num_serving > 1:
        raise ValueError("only one tier of type p2p may have a `port`")
    role = config.kv_role
    if role == "kv_producer" and (asks or not num_serving):
        raise ValueError("`kv_role` kv_producer needs a tier of type p2p with a `port`, and no `peers`: it only serves")
    if role == "kv_consumer" and (num_serving or not asks):
        raise ValueError("`kv_role` kv_consumer needs a tier of type p2p with `peers`, and no `port`: it only asks")


_UNKNOWN = re.compile(r"Object contains unknown field `(?P<field>[^`]+)`(?: - at `(?P<path>[^`]+)`)?")
_FIELDS = [
    field
    for struct in (KvTransferConfig, ExtraConfig, FileTier, ObjectTier, ObjectStoreConfig, PeerTier)
    for field in struct.__struct_fields__
]


_AT = re.compile(r" - at `(?P<path>[^`]+)`$")
_VALUE = re.compile(r"Invalid (?:enum )?value (?P<value>'[^']*')")
_EXPECTED = re.compile(r"Expected `(?P<wanted>[^`]+)`, got `(?P<got>[^`]+)`")
_CHOICES = {
    field.name: get_args(field.type)
    for field in msgspec.structs.fields(KvTransferConfig)
    if get_origin(field.type) is Literal
} | {"type": [tier.__struct_config__.tag for tier in get_args(SecondaryTier)]}


def _named(sentence: str) -> str:
    """msgspec's "Expected `int`, got `str` - at `$.a.b`" in our words, on `a.b`."""
    at = _AT.search(sentence)
    path = at["path"].removeprefix("$").lstrip(".") if at is not None else ""
    choices = _CHOICES.get(path.rpartition(".")[2])
    if (value := _VALUE.match(sentence)) is not None and choices is not None:
        return f"`{path}` must be {' or '.join(choices)}; got {value['value']}"
    if (expected := _EXPECTED.match(sentence)) is not None:
        wanted = expected["wanted"].replace(" | ", " or ")
        return f"{f'`{path}`' if path else 'it'} must be of type {wanted}, got {expected['got']}"
    words = sentence if at is None else sentence[: at.start()]
    return f"`{path}`: {words}" if path else words


def _explain(sentence: str) -> str:
    unknown = _UNKNOWN.match(sentence)
    if unknown is None:
        return _named(sentence)
    near = difflib.get_close_matches(unknown["field"], _FIELDS, n=1)
    hint = f"; did you mean `{near[0]}`?" if near else ""
    return f"unknown key `{unknown['field']}`{hint}"
