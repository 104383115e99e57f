"""The ways to write an address."""

from __future__ import annotations

import pytest

from slipring.runtime.tiers.address import is_everywhere, peer_name, split_peer


@pytest.mark.parametrize("host", ["::1", "[::1]", "0:0::1", "[0:0:0:0:0:0:0:1]"])
def test_an_ipv6_address_is_one_however_it_is_written(host: str) -> None:
    assert peer_name(host, 5710) == "p2p:[::1]:5710"


def test_names_and_ipv4_addresses() -> None:
    assert peer_name("Node-A", 1) == peer_name("node-a", 1) == "p2p:node-a:1"
    assert peer_name("::ffff:10.0.0.1", 1) == peer_name("10.0.0.1", 1) == "p2p:10.0.0.1:1"
    assert peer_name("fe80::1%eth0", 1) != peer_name("fe80::1%eth1", 1)


@pytest.mark.parametrize(
    ("peer", "host", "port"), [("a:1", "a", 1), ("[::1]:65535", "::1", 65535), ("10.0.0.1:5710", "10.0.0.1", 5710)]
)
def test_peers_are_split(peer: str, host: str, port: int) -> None:
    assert split_peer(peer) == (host, port)


@pytest.mark.parametrize(
    "peer", ["a", "a:", ":1", "a:0", "a:65536", "::1:5710", "::1", "[::1]", "[]:1", "a:b:1", "a:1 "]
)
def test_what_is_no_peer(peer: str) -> None:
    with pytest.raises(ValueError, match="host:port"):
        split_peer(peer)


def test_every_address_is_none_to_be_reached_by() -> None:
    assert all(map(is_everywhere, ["", "0.0.0.0", "::", "[::]", "0::0"]))
    assert not any(map(is_everywhere, ["a", "127.0.0.1", "::1"]))
