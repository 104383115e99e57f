"""--config FILE: flags from YAML or JSON, beneath those of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipring.http import cli


def parsed(tmp_path: Path, text: str, *given: str) -> Any:
    path = tmp_path / "slipring.yaml"
    path.write_text(text)
    parser = cli.build_parser()
    return parser.parse_args(cli._with_config_file(parser, ["serve", *given, "--config", str(path)]))


WHOLE = {
    "model": "smollm2", "port": 8123, "enable-prefix-caching": False, "max_num_seqs": 7, "api-key": ["a", "b"],
    "served-model-name": ["small", "smollm2"], "kv-cache-memory-bytes": "2G", "access-log": False,
    "allow-long-max-model-len": True, "speculative-config": {"method": "ngram", "num_speculative_tokens": 5},
}  # fmt: skip


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_every_kind_of_value(tmp_path: Path, form: str) -> None:
    text = json.dumps(WHOLE) if form == "json" else "\n".join(f"{k}: {json.dumps(v)}" for k, v in WHOLE.items())
    args = parsed(tmp_path, text)
    assert (args.model, args.port, args.max_num_seqs, args.kv_cache_memory_bytes) == ("smollm2", 8123, 7, 2 << 30)
    assert (args.enable_prefix_caching, args.allow_long_max_model_len, args.access_log) == (False, True, False)
    assert args.served_model_name == ["small", "smollm2"] and args.api_key == ["a", "b"]
    assert json.loads(args.speculative_config) == WHOLE["speculative-config"]


def test_the_command_line_wins(tmp_path: Path) -> None:
    args = parsed(tmp_path, json.dumps(WHOLE), "other", "--port", "9000", "--served-model-name=x", "--access-log")
    assert (args.model, args.port, args.served_model_name, args.access_log) == ("other", 9000, ["x"], True)
    assert args.max_num_seqs == 7


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("prot: 1", "Did you mean port?"), ("enable-prefix-cachin: true", "enable-prefix-caching"), ("[1]", "names"),
        ("port: {a: 1}", "port must be"), ("enable-prefix-caching: 3", "true or false"), ("a: [", "slipring.yaml"),
        ("config: x", "no flag"), ("port: true", "port must be"), ("port: many", "--port"),
        ("port: [1, 2]", "port takes one value, got a list of 2"), ("port: [1]", "port takes one value"),
        ("port: [", "slipring.yaml, line 1: it is neither YAML nor JSON: "),
        ("port: 1\n  a: b", "slipring.yaml, line 2: it is neither YAML nor JSON: mapping values are not allowed here"),
        ("a: \0", "slipring.yaml: it is neither YAML nor JSON: "), ("zzz: 1", "no flag 'zzz'"),
        ("speculative-config: {model: 2026-01-01}", "speculative-config holds what JSON cannot: datetime.date(2026, 1"),
        ("speculative-config: {model: [!!binary aGk=]}", "speculative-config holds what JSON cannot: b'hi'"),
        ("speculative-config: {2026-01-01: ngram}", "speculative-config cannot be written as JSON: keys must be"),
        ("speculative-config: &a {model: *a}", "speculative-config cannot be written as JSON: Circular reference"),
    ],
)  # fmt: skip
def test_mistakes_are_told(tmp_path: Path, text: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parsed(tmp_path, text, "m")
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and hint in told and (told.startswith("usage") or told.count("\n") == 1)


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli._with_config_file(cli.build_parser(), ["serve", "--config=/nowhere/x.yaml"])
    assert "/nowhere/x.yaml" in capsys.readouterr().err
