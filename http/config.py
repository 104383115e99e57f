"""`ServerConfig`: what the outside face may be told. Frozen; the engine's own settings live in `runtime.config`."""

from __future__ import annotations

import msgspec

MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 1024
MAX_BAD_WORDS = 512
MAX_CHOICES = 128
"""Most completions of one prompt (`n`)."""
MAX_PROMPTS = 2048
"""Most prompts of one request."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Flags carry the same names."""

    served_model_names: tuple[str, ...]
    """At least one; the first is the name in answers to requests that name no model."""
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    """Path of a unix socket to listen on, instead of host and port."""
    ssl_certfile: str | None = None
    """TLS, when given; PEM, with the chain."""
    ssl_keyfile: str | None = None
    """None: the key stands in `ssl_certfile`, too."""
    ssl_ca_certs: str | None = None
    """When given, clients must show a certificate that one of these has signed."""
    root_path: str = ""
    """Where a proxy has put us: `/api` makes `/api/v1/models` work like `/v1/models`."""
    access_log: bool = True
    otlp_traces_endpoint: str | None = None
    """URL of an OTLP/HTTP collector; None: no traces."""
    otlp_traces_ratio: float = 1.0
    """Share of requests that are traced, unless their caller has decided (`traceparent`)."""
    request_timeout_s: float | None = None
    """Longest time for a request, its answer included; None: as long as it takes."""
    api_keys: tuple[str, ...] = ()
    """Empty: no key is asked for."""
    metrics_names: str = "both"
    """Whose names /metrics uses: `slipring`, `vllm` or `both`."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose browsers may call us; `*` is any. Empty: no CORS headers at all."""
    max_body_bytes: int = 8 << 20
    """Many times what the longest context needs; decoding it takes well under a second."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls (`tool_formats.py`); `none`: its calls are content."""
    reasoning_parser: str = "auto"
    """How it shows its reasoning (`reasoning.py`); `none`: that is content."""
    max_stored_responses: int = 1000
    """Responses of /v1/responses kept to be asked for again or answered. 0: none."""
    max_stored_response_bytes: int = 64 << 20
    """Memory for them, conversations included."""
    keep_alive_timeout_s: float = 100.0
    """More than the 60 to 90 seconds for which proxies keep connections, or they lose requests."""
    enable_fault_tolerance: bool = False
    """Answer on /v1/fault_tolerance/*."""
    write_buffer_bytes: int = 256 << 10
    """A stream whose client leaves more than this unread is congested: pieces are merged until it reads on."""
    stall_timeout_s: float = 30.0
    """A congested client that reads nothing for so long is dropped."""
    shutdown_timeout_s: float = 30.0
    """How long streams in flight may go on after SIGTERM."""
