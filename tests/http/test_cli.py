"""The command line: flags, mistakes and the chat in the terminal."""

from __future__ import annotations

import asyncio
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slipring.http import cli, engine_flags, flag_values, http_flags
from slipring.http.chat_terminal import chat
from slipring.http.config import ServerConfig
from slipring.http.console import Console, base_url
from slipring.http.routes import ROUTES
from slipring.runtime.config import ConfigError, EngineConfig
from slipring.runtime.engine import StartupEvent
from tests.http.engine_double import EngineDouble
from tests.http.test_server import serving

ROOT = Path(__file__).parents[2]


def test_every_engine_flag_is_a_field_with_the_same_default() -> None:
    args = cli.build_parser().parse_args(["serve", "smollm2"])
    defaults = EngineConfig(model="smollm2")
    for name in engine_flags.ENGINE:
        assert getattr(args, name) == getattr(defaults, name), name


def test_no_flag_of_the_engine_is_forgotten() -> None:
    args = cli.build_parser().parse_args(["serve", "smollm2"])
    given = {name: object() for name in EngineConfig.__struct_fields__ if hasattr(args, name)}
    vars(args).update(given)
    config = engine_flags.engine_config(args)
    assert {name: getattr(config, name) for name in given} == given


def test_flags_reach_the_config() -> None:
    line = "serve m --no-enable-prefix-caching --no-async-scheduling --kv-cache-memory-bytes 2G --max-num-seqs 7"
    args = cli.build_parser().parse_args(line.split())
    assert (args.enable_prefix_caching, args.async_scheduling) == (False, False)
    assert (args.kv_cache_memory_bytes, args.max_num_seqs) == (2 << 30, 7)


@pytest.mark.parametrize(
    ("text", "value"),
    [("2G", 2 << 30), ("512M", 512 << 20), ("1.5GiB", 3 << 29), ("64kb", 64 << 10), ("4096", 4096), ("1 T", 1 << 40)],
)
def test_sizes(text: str, value: int) -> None:
    assert flag_values.size(text) == value


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "m", "--max-modellen", "5"], "Did you mean --max-model-len?"),
        (["serve", "m", "--max-num-seq=5"], "Did you mean --max-num-seqs?"),
        (["serve", "m", "--zzz"], "--help"),
        (["chat", "--sytem", "x"], "Did you mean --system?"),
        (["serve", "m", "--port", "99999"], "0 to 65535"),
        (["serve", "m", "--kv-cache-memory-bytes", "lots"], "2G"),
        (["serve"], "MODEL"),
    ],
)
def test_mistakes_are_explained(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--version"], ["--help"], ["serve", "--help"], ["chat", "--help"], []])
def test_help_and_version_load_nothing_heavy(argv: list[str]) -> None:
    code = (
        "import sys\nfrom slipring.http.cli import main\n"
        f"try: main({argv})\nexcept SystemExit as end: assert not end.code\n"
        "assert not {'aiohttp', 'numpy', 'torch'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "slipring" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("model", "name"),
    [("smollm2", "smollm2"), ("/models/Qwen3-0.6B", "Qwen3-0.6B"), ("./x/y.gguf", "y"), ("/models/a/", "a")],
)
def test_the_default_name_of_a_model(model: str, name: str) -> None:
    assert cli.default_model_name(model) == name


def test_origins_are_single_values_or_json_lists() -> None:
    assert flag_values.origins("https://a/") == ["https://a"]
    assert flag_values.origins('["https://b/", "*"]') == ["https://b", "*"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--allowed-origins", "[1]"],
        ["--allowed-origins", "[oops"],
        ["--api-key", ""],
        ["--api-key", "a b"],
        ["--api-key", "é"],
        ["--served-model-name", ""],
        ["--shutdown-timeout=-1"],
        ["--shutdown-timeout", "nan"],
        ["--max-model-len", "many"],
    ],
)
def test_values_that_cannot_be_meant_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.build_parser().parse_args(["serve", "m", *flags])
    assert stopped.value.code == 2 and flags[0].split("=")[0] in capsys.readouterr().err


def test_an_empty_model_is_refused() -> None:
    with pytest.raises(SystemExit):
        cli.build_parser().parse_args(["serve", ""])


@pytest.mark.parametrize(("text", "tokens"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("auto", None), ("-1", None)])
def test_context_lengths_as_people_write_them(text: str, tokens: int | None) -> None:
    assert cli.build_parser().parse_args(["serve", "m", f"--max-model-len={text}"]).max_model_len == tokens


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1"), ("::1", "http://[::1]:1"), ("box", "http://box:1")],
)
def test_the_banner_names_an_address_that_can_be_reached(host: str, url: str) -> None:
    assert base_url(ServerConfig(served_model_names=("m",), host=host), 1) == url


def test_start_up_lines_without_a_terminal() -> None:
    out = io.StringIO()
    console = Console(out)
    for done in range(5):
        console.on_startup(StartupEvent(phase="load weights", done=done << 20, total=4 << 20))
    console.on_startup(StartupEvent(phase="load weights", seconds=1.5, final=True))
    assert out.getvalue().splitlines() == ["  load weights: 4 MiB ...", "  load weights     1.50 s"]


def test_a_bar_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    console = Console(out)
    console.on_startup(StartupEvent(phase="load weights", done=2 << 20, total=4 << 20))
    console.on_startup(StartupEvent(phase="load weights", seconds=1.5, final=True))
    assert "50% of 4 MiB" in out.getvalue() and out.getvalue().endswith("\r\x1b[K  load weights     1.50 s\n")


def talk(engine: EngineDouble, monkeypatch: pytest.MonkeyPatch, question: str, **options: object) -> int:
    """`slipring chat` with a piped question against a server over the double."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(question))

    async def main() -> int:
        async with serving(engine, **options) as port:
            return await asyncio.to_thread(chat, f"http://127.0.0.1:{port}/v1/", None, "K", "be brief")

    return asyncio.run(main())


def test_a_piped_question_is_answered(monkeypatch, capsys) -> None:
    engine = EngineDouble(script="The sea is wide.")
    assert talk(engine, monkeypatch, "hi?", api_keys=("K",)) == 0
    assert capsys.readouterr().out == "The sea is wide.\n"
    prompt = bytes(engine.requests[0].prompt_token_ids)
    assert prompt == b"<system>be brief</system><user>hi?</user><assistant>"


def test_the_servers_refusal_is_a_sentence(monkeypatch, capsys) -> None:
    assert talk(EngineDouble(), monkeypatch, "x" * 500) == 1
    assert "maximum context length" in capsys.readouterr().err
    assert talk(EngineDouble(), monkeypatch, "x", api_keys=("other",)) == 1
    assert "API key" in capsys.readouterr().err


def test_chat_without_a_server_says_how_to_start_one(capsys) -> None:
    assert chat("http://127.0.0.1:9/v1", None, None, None) == 1
    assert "slipring serve" in capsys.readouterr().err


def server_config(*flags: str) -> ServerConfig:
    return http_flags.server_config(cli.build_parser().parse_args(["serve", "m", *flags]), "m")


def test_every_flag_of_the_outside_face_has_the_configs_default() -> None:
    assert server_config() == ServerConfig(served_model_names=("m",))


def test_flags_of_the_outside_face_reach_its_config() -> None:
    found = server_config(
        "--uds", "/run/s", "--root-path", "/api/", "--disable-access-log", "--metrics-names", "vllm",
        "--request-timeout", "2.5", "--max-body-size", "1M", "--ssl-certfile", "c", "--ssl-keyfile", "k",
        "--otlp-traces-endpoint", "http://c:4318", "--otlp-traces-sample-ratio", "0.25", "--enable-request-id-headers",
    )  # fmt: skip
    assert (found.uds, found.root_path, found.access_log, found.metrics_names) == ("/run/s", "/api", False, "vllm")
    assert (found.request_timeout_s, found.max_body_bytes) == (2.5, 1 << 20)
    assert (found.ssl_certfile, found.ssl_keyfile) == ("c", "k")
    assert (found.otlp_traces_endpoint, found.otlp_traces_ratio) == ("http://c:4318", 0.25)


def test_keys_come_from_flags_files_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nfile-1\n\n  file-2\n")
    monkeypatch.setenv("SLIPRING_API_KEY", "env")
    assert server_config("--api-key", "a", "--api-key-file", str(path)).api_keys == ("a", "file-1", "file-2", "env")
    monkeypatch.setenv("SLIPRING_API_KEY", "two words")
    with pytest.raises(ConfigError, match="SLIPRING_API_KEY"):
        server_config()


@pytest.mark.parametrize("text", ["0", "0M", "0.2", "-1", "many"])
def test_a_body_size_that_leaves_room_for_none_is_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        server_config(f"--max-body-size={text}")


@pytest.mark.parametrize("text", ["", "# nothing", "two words", "clé"])
def test_a_file_without_a_usable_key_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(SystemExit):
        server_config("--api-key-file", str(tmp_path / "keys"))


def test_a_key_file_without_a_certificate_is_refused() -> None:
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        server_config("--ssl-keyfile", "k")


def test_the_docs_name_flags_and_routes_that_there_are() -> None:
    text = (ROOT / "docs" / "serving.md").read_text()
    known = cli.build_parser().parse_args(["serve", "m"]).flags
    assert set(re.findall(r"`(--[a-z-]+)", text)) <= set(known)
    paths = {route.pattern for route in ROUTES}
    assert set(re.findall(r"`(?:GET|POST) (/[a-z_/]+)", text)) <= paths
