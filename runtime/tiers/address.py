"""Where another instance is: people, configurations and proxies write the same address in more than one way."""

from __future__ import annotations

import contextlib
import ipaddress
import re

PEER_PREFIX = "p2p:"
"""Of a peer's name; `host:port` follows."""
_MAX_PORT = 65535


def plain_host(host: str) -> str:
    """Without brackets; an address as short as it goes, a name in small letters."""
    host = host.removeprefix("[").removesuffix("]").lower()
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return str(getattr(address, "ipv4_mapped", None) or address)
    return host


def peer_name(host: str, port: int) -> str:
    """`p2p:HOST:PORT`, the same for whatever means the same without a name being looked up."""
    plain = plain_host(host)
    return f"{PEER_PREFIX}[{plain}]:{port}" if ":" in plain else f"{PEER_PREFIX}{plain}:{port}"


def is_everywhere(host: str) -> bool:
    """Every address of a machine, which is none to be reached by."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(plain_host(host)).is_unspecified
    return not host


def check_port(name: str, port: int) -> None:
    """Raises ValueError."""
    if not 1 <= port <= _MAX_PORT:
        raise ValueError(f"`{name}` must be from 1 to {_MAX_PORT}, got {port}")


def split_peer(peer: str) -> tuple[str, int]:
    """(host, port) of `host:port`, an IPv6 address in brackets. Raises ValueError."""
    found = re.fullmatch(r"(?P<host>\[[^\[\]]+\]|[^:\[\]]+):(?P<port>\d{1,5})", peer)
    if found is None or not 1 <= int(found["port"]) <= _MAX_PORT:
        raise ValueError(
            f"`peers` holds {peer!r}; each must be `host:port`, the port from 1 to {_MAX_PORT}, "
            "an IPv6 address in brackets"
        )
    return plain_host(found["host"]), int(found["port"])
