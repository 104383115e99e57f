"""The `llm` command as people use it with a server of their own."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import alive, server_at

OCEAN = "Write one sentence about the ocean."


@pytest.fixture(scope="module")
def home(server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """llm's directory, with a model of ours in it."""
    path = tmp_path_factory.mktemp("llm")
    (path / "extra-openai-models.yaml").write_text(
        f"- model_id: ours\n  model_name: smollm2\n  api_base: {server}/v1\n"
        "  supports_schema: true\n  supports_tools: true\n"
    )
    return path


def llm(home: Path, *arguments: str, options: tuple[str, ...] = ("temperature=0", "max_tokens=24")) -> str:
    flags = [part for option in options for part in ("-o", *option.split("="))]
    done = subprocess.run(
        [sys.executable, "-m", "llm", "-m", "ours", *flags, *arguments],
        env={**os.environ, "LLM_USER_PATH": str(home), "LLM_LOAD_PLUGINS": ""},  # no plugins: the command alone
        capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def chat(url: str, *turns: str) -> str:
    """What the server says by itself to turns of the user and the model."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    body = {"messages": messages, "temperature": 0, "max_tokens": 24}
    return server_at(url).post("/v1/chat/completions", body)["choices"][0]["message"]["content"]


def test_it_streams_and_does_not(home: Path, server: str) -> None:
    assert llm(home, OCEAN) == llm(home, "--no-stream", OCEAN) == chat(server, OCEAN).strip()
    alive(server)


def test_a_conversation_goes_on(home: Path, server: str) -> None:
    llm(home, OCEAN)
    assert llm(home, "-c", "And a lake?") == chat(server, OCEAN, chat(server, OCEAN), "And a lake?").strip()


def test_a_schema(home: Path) -> None:
    properties = {"wet": {"type": "boolean"}, "depth": {"type": "integer", "minimum": 1, "maximum": 9}}
    schema = {"type": "object", "properties": properties, "required": ["wet", "depth"], "additionalProperties": False}
    said = llm(home, "--schema", json.dumps(schema), OCEAN, options=("temperature=0", "max_tokens=100"))
    assert json.loads(said).keys() == {"wet", "depth"}
