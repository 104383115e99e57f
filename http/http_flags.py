"""The flags of `slipring serve` that concern the outside face, and the `ServerConfig` that they make."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from slipring.http.fault_flags import commands_enabled
from slipring.http.flag_values import (
    body_size,
    count,
    key,
    keys_of_file,
    not_empty,
    origins,
    port,
    root_path,
    seconds,
    share,
    size,
    timeout,
    url,
)

if TYPE_CHECKING:
    from slipring.http.config import ServerConfig

METRICS_NAMES = ("slipring", "vllm", "both")


def add_http_flags(serve: argparse.ArgumentParser) -> None:
    _listening(serve.add_argument_group("HTTP"))
    _access(serve.add_argument_group("TLS and keys"))
    _limits(serve.add_argument_group("limits"))
    _telling(serve.add_argument_group("logs, metrics and traces"))
    _parsers(serve.add_argument_group("tools and reasoning"))


def _listening(group: Any) -> None:
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 is all (default: %(default)s)"
    )
    group.add_argument("--port", type=port, default=8000, help="0: any free one (default: %(default)s)")
    group.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        type=not_empty,
        metavar="NAME",
        help="names that requests may use (default: the alias, or the last part of MODEL's path)",
    )
    group.add_argument("--uds", type=not_empty, metavar="PATH", help="listen on a unix socket instead of host and port")
    group.add_argument(
        "--root-path",
        type=root_path,
        default="",
        metavar="PATH",
        help="where a proxy has put the server: paths work with and without it",
    )
    group.add_argument(
        "--allowed-origins",
        action="append",
        default=[],
        type=origins,
        metavar="ORIGIN",
        help="let browsers at this origin call (several times, or a JSON list; '*' is any; default: none)",
    )


def _access(group: Any) -> None:
    group.add_argument(
        "--api-key",
        action="append",
        default=[],
        type=key,
        metavar="KEY",
        help="asked for on every route but /health and /ping; several times for several keys; SLIPRING_API_KEY in the "
        "environment adds one",
    )
    group.add_argument(
        "--api-key-file", type=keys_of_file, default=[], metavar="FILE", help="one key a line, seen by no `ps`"
    )
    group.add_argument("--ssl-certfile", type=not_empty, metavar="FILE", help="serve HTTPS with this certificate (PEM)")
    group.add_argument("--ssl-keyfile", type=not_empty, metavar="FILE", help="its key, if not in the same file")
    group.add_argument(
        "--ssl-ca-certs", type=not_empty, metavar="FILE", help="clients must show a certificate signed by one of these"
    )


def _limits(group: Any) -> None:
    group.add_argument(
        "--request-timeout",
        type=timeout,
        metavar="SECONDS",
        help="longest time for a request and its answer; a header x-request-timeout may ask for less (default: none)",
    )
    group.add_argument(
        "--max-body-size", type=body_size, default=8 << 20, metavar="SIZE", help="413 for larger ones (default: 8M)"
    )
    group.add_argument(
        "--keep-alive-timeout",
        type=seconds,
        default=100.0,
        metavar="SECONDS",
        help="how long an idle connection stays open (default: %(default)g)",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=seconds,
        default=30.0,
        metavar="SECONDS",
        help="time for answers in flight after SIGTERM (default: %(default)g)",
    )
    group.add_argument(
        "--max-stored-responses",
        type=count,
        default=1000,
        metavar="N",
        help="responses of /v1/responses kept to be asked for or answered; 0: none (default: %(default)s)",
    )
    group.add_argument(
        "--max-stored-response-bytes",
        type=size,
        default=64 << 20,
        metavar="SIZE",
        help="memory for them (default: 64M)",
    )


def _telling(group: Any) -> None:
    group.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="one line for each request, health checks and scrapes left out (default: on)",
    )
    for flag in ("--disable-access-log", "--disable-uvicorn-access-log"):
        group.add_argument(flag, dest="access_log", action="store_false", help=argparse.SUPPRESS)
    group.add_argument(
        "--metrics-names",
        choices=METRICS_NAMES,
        default="both",
        help="whose names /metrics uses; vLLM's serve dashboards made for it (default: %(default)s)",
    )
    group.add_argument(
        "--otlp-traces-endpoint",
        type=url,
        metavar="URL",
        help="send a span for each request to this OTLP/HTTP collector (needs slipring[otel])",
    )
    group.add_argument(
        "--otlp-traces-sample-ratio",
        type=share,
        default=1.0,
        metavar="SHARE",
        help="of requests without a traceparent (default: %(default)g)",
    )
    # vLLM wants to be told; here they are always there.
    group.add_argument("--enable-request-id-headers", action="store_true", help=argparse.SUPPRESS)


def _parsers(group: Any) -> None:
    group.add_argument(
        "--tool-call-parser",
        type=_tool_call_parser,
        default="auto",
        metavar="NAME",
        help="how the model writes tool calls: auto (by its chat template), none, hermes, llama3_json, mistral, ...",
    )
    group.add_argument(
        "--reasoning-parser",
        type=_reasoning_parser,
        default="auto",
        metavar="NAME",
        help="how it shows its reasoning: auto (by its chat template), none, think, deepseek_r1, mistral, ...",
    )
    # vLLM wants to be told; here tools work anyway.
    group.add_argument("--enable-auto-tool-choice", action="store_true", help=argparse.SUPPRESS)


def _tool_call_parser(text: str) -> str:
    from slipring.http.tool_formats import ALIASES, FORMATS

    return _parser_name(text, (*FORMATS, *ALIASES))


def _reasoning_parser(text: str) -> str:
    from slipring.http.reasoning import ALIASES, FORMATS

    return _parser_name(text, (*FORMATS, *ALIASES))


def _parser_name(text: str, known: tuple[str, ...]) -> str:
    if text in ("auto", "none", *known):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is none of auto, none, {', '.join(sorted(known))}")


def server_config(args: argparse.Namespace, model_name: str) -> ServerConfig:
    """Raises ConfigError."""
    from slipring.http.config import ServerConfig
    from slipring.runtime.config import ConfigError, environment_api_keys

    if args.ssl_certfile is None and (args.ssl_keyfile or args.ssl_ca_certs):
        raise ConfigError("--ssl-keyfile and --ssl-ca-certs need --ssl-certfile")
    return ServerConfig(
        served_model_names=tuple(args.served_model_name or [model_name]),
        host=args.host,
        port=args.port,
        uds=args.uds,
        root_path=args.root_path,
        api_keys=(*args.api_key, *args.api_key_file, *environment_api_keys()),
        allowed_origins=tuple(origin for group in args.allowed_origins for origin in group),
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        ssl_ca_certs=args.ssl_ca_certs,
        request_timeout_s=args.request_timeout,
        max_body_bytes=args.max_body_size,
        keep_alive_timeout_s=args.keep_alive_timeout,
        shutdown_timeout_s=args.shutdown_timeout,
        access_log=args.access_log,
        metrics_names=args.metrics_names,
        otlp_traces_endpoint=args.otlp_traces_endpoint,
        otlp_traces_ratio=args.otlp_traces_sample_ratio,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        enable_fault_tolerance=commands_enabled(args),
        max_stored_responses=args.max_stored_responses,
        max_stored_response_bytes=args.max_stored_response_bytes,
    )
