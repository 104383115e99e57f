"""`slipring`: the command line. Flags are named as in vLLM wherever they mean the same; `serve` has those of the
outside face (`http_flags.py`) and of the engine (`engine_flags.py`).

Heavy imports wait until the command is known, so that --help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import difflib
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from slipring.http import engine_flags, http_flags
from slipring.http.flag_values import not_empty


def main(argv: list[str] | None = None) -> NoReturn:
    try:
        _run(argv)
    except KeyboardInterrupt:  # before the server has its own way of being stopped
        sys.exit(130)


def _run(argv: list[str] | None) -> NoReturn:
    parser = build_parser()
    args, unknown = parser.parse_known_args(_with_config_file(parser, sys.argv[1:] if argv is None else argv))
    if unknown:
        parser.exit(2, f"slipring: {_explain_unknown(unknown, args)}\n")
    if args.command == "serve":
        sys.exit(_serve(args))
    if args.command == "chat":
        sys.exit(_chat(args))
    if args.command == "train-draft":
        from slipring.http import train_draft

        sys.exit(train_draft.run(args))
    if args.command == "doctor":
        sys.exit(_doctor(args))
    if args.command == "blackbox":
        sys.exit(_blackbox(args))
    parser.print_help()
    sys.exit(0)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipring", description="Low-latency LLM serving from one node.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"slipring {version('slipring')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_serve(commands)
    _add_chat(commands)
    _add_doctor(commands)
    _add_blackbox(commands)
    _add_train_draft(commands)
    return parser


def _with_config_file(parser: argparse.ArgumentParser, argv: list[str]) -> list[str]:
    """The command line, with what `serve --config FILE` adds to it."""
    if argv[:1] != ["serve"]:
        return argv
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    path, given = finder.parse_known_args(argv[1:])
    if path.config is None:
        return argv
    from slipring.http.config_file import ConfigFileError, arguments

    (commands,) = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    try:
        return ["serve", *arguments(path.config, commands.choices["serve"], given), *given]
    except ConfigFileError as error:
        parser.exit(2, f"slipring: {error}\n")


def _add_serve(commands: Any) -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over the OpenAI API",
        description="Serve MODEL over the OpenAI API. Stops on Ctrl-C or SIGTERM after the answers in flight.",
        usage="slipring serve MODEL [flags]",
        allow_abbrev=False,
    )
    serve.add_argument(
        "model", metavar="MODEL", type=not_empty, help="a model directory, a .gguf file, or an alias such as smollm2"
    )
    serve.add_argument("--config", metavar="FILE", help="flags from a YAML or JSON file; those given here win")
    http_flags.add_http_flags(serve)
    engine_flags.add_engine_flags(serve)
    serve.set_defaults(flags=_flags_of(serve))


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser(
        "chat",
        help="talk to a running server",
        description="A chat in the terminal. Ctrl-C stops an answer, Ctrl-D ends. Piped input is one question.",
        allow_abbrev=False,
    )
    chat.add_argument("--url", default="http://127.0.0.1:8000/v1", help="(default: %(default)s)")
    chat.add_argument("--model", help="(default: the first that the server names)")
    chat.add_argument("--api-key", help="when the server asks for one")
    chat.add_argument("--system", help="a system message to begin with")
    chat.set_defaults(flags=_flags_of(chat))


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="say what this machine has, what will be used and what is missing",
        description="Look at this machine: CPU, memory, limits, GPU, driver, packages. Status 0 if it can serve.",
        allow_abbrev=False,
    )
    doctor.add_argument("--device", default="auto", help="the device to serve on, as of serve (default: auto, the CPU)")
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(flags=_flags_of(doctor))


def _add_blackbox(commands: Any) -> None:
    blackbox = commands.add_parser(
        "blackbox",
        help="tell what a flight record holds: the last steps before a fault",
        description="Tell what the file holds that was written when a worker broke.",
        allow_abbrev=False,
    )
    blackbox.add_argument("file", metavar="FILE")
    blackbox.add_argument("--json", action="store_true", help="for programs")
    blackbox.set_defaults(flags=_flags_of(blackbox))


def _add_train_draft(commands: Any) -> None:
    train = commands.add_parser(
        "train-draft",
        help="train a draft head for a model, for --speculative-config",
        description="Let MODEL write text, and train a head that guesses its next tokens. Takes an hour or two.",
        allow_abbrev=False,
    )
    train.add_argument("model", metavar="MODEL", type=not_empty, help="as for slipring serve")
    train.add_argument("--method", choices=("eagle", "medusa"), default="eagle", help="(default: %(default)s)")
    train.add_argument("--output", required=True, metavar="DIR", help="where the head is written")
    train.add_argument("--from", dest="start", metavar="DIR", help="a head of this model to go on with")
    train.add_argument("--tokens", type=int, default=200_000, metavar="N", help="that are written (%(default)s)")
    train.add_argument("--text", metavar="FILE", help="paragraphs that the model shall answer or continue as well")
    train.add_argument("--epochs", type=int, default=6, metavar="N", help="(default: %(default)s)")
    train.add_argument("--vocab-size", type=int, metavar="N", help="tokens that it can guess (default: 4096)")
    train.add_argument("--seed", type=int, default=1, metavar="N", help="(default: %(default)s)")
    train.add_argument("--cpu-threads", type=int, metavar="N", help="(default: all CPUs)")
    train.set_defaults(flags=_flags_of(train))


def _serve(args: argparse.Namespace) -> int:
    # Only now: these import aiohttp and numpy.
    from slipring.http.serve import run
    from slipring.runtime.config import ConfigError

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    engine_config = engine_flags.engine_config(args)
    try:
        server_config = http_flags.server_config(args, default_model_name(args.model))
    except ConfigError as error:
        print(f"slipring: {error}", file=sys.stderr)
        return 2
    return run(engine_config, server_config)


def _chat(args: argparse.Namespace) -> int:
    from slipring.http.chat_terminal import chat

    return chat(args.url, args.model, args.api_key, args.system)


def _blackbox(args: argparse.Namespace) -> int:
    from slipring.http.blackbox import blackbox

    return blackbox(args.file, args.json)


def _doctor(args: argparse.Namespace) -> int:
    from slipring.http.doctor import doctor

    return doctor(args.json, args.device)


def default_model_name(model: str) -> str:
    """An alias as it is; of a path the last part, without .gguf."""
    return Path(model).name.removesuffix(".gguf") or model


def _flags_of(parser: argparse.ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]


def _explain_unknown(unknown: list[str], args: argparse.Namespace) -> str:
    flag = unknown[0].partition("=")[0]
    known = getattr(args, "flags", ["--version", "--help"])
    near = difflib.get_close_matches(flag, known, 1, 0.5)
    return f"unknown argument {flag}." + (f" Did you mean {near[0]}?" if near else " See slipring serve --help.")


if __name__ == "__main__":
    main()
