"""Who may call: API keys and CORS. Every route but health checks and preflights asks for a key when one is set.

The comparison takes the same time whatever the client sent: digests are compared, all keys, no early exit.
"""

from __future__ import annotations

import hashlib
import hmac
import re

from slipring.http.errors import ApiError
from slipring.http.exchange import ApiRequest

_HEADER_NAMES = re.compile(r"[A-Za-z0-9-]+(?:[ ,]+[A-Za-z0-9-]+)*")


class KeyRing:
    def __init__(self, keys: tuple[str, ...]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, request: ApiRequest) -> None:
        """`Authorization: Bearer KEY` (any case of Bearer) or `x-api-key: KEY`. Raises ApiError (401)."""
        if not self._digests:
            return
        given = _bearer(request.headers.get("authorization", "")) or request.headers.get("x-api-key", "").strip()
        # Faces hand on bytes that are no ASCII as lone surrogates.
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not given or not any(matches):
            raise ApiError(
                401,
                "A valid API key is needed: send the header `Authorization: Bearer KEY`.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _bearer(header: str) -> str:
    scheme, _, key = header.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


class Cors:
    """Answers browsers. Without allowed origins there are no CORS headers, so that browsers refuse."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)

    def headers(self, request: ApiRequest) -> dict[str, str]:
        origin = request.headers.get("origin")
        if not self._origins or origin is None:
            return {}
        if "*" in self._origins:
            allowed = {"Access-Control-Allow-Origin": "*"}
        elif origin in self._origins:
            allowed = {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
        else:
            return {"Vary": "Origin"}
        return {**allowed, "Access-Control-Expose-Headers": "x-request-id, request-id, retry-after"}

    def preflight(self, request: ApiRequest, allow: str) -> dict[str, str]:
        headers = self.headers(request)
        if "Access-Control-Allow-Origin" not in headers:
            return headers
        # Asked-for names are echoed: `*` would not cover Authorization, and SDKs send many x-stainless-* headers.
        asked = request.headers.get("access-control-request-headers", "")
        names = asked if _HEADER_NAMES.fullmatch(asked) else "authorization, content-type"
        return {
            **headers,
            "Access-Control-Allow-Methods": allow,
            "Access-Control-Allow-Headers": names,
            "Access-Control-Max-Age": "600",
        }
