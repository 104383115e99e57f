"""The rules that keep the house in order: who imports whom, no torch in the engine, no `http/__init__.py`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {
    "shm": set(),
    "kernels": set(),
    "scheduler": {"shm"},
    "workers": {"shm", "kernels"},
    "runtime": {"shm", "scheduler"},
    "http": {"runtime"},
}
# Third-party packages by folder, where the design names them; the others may use what pyproject.toml lists.
MAY_USE = {
    "shm": {"numpy", "posix_ipc", "msgspec"},
    "kernels": {"torch", "triton", "cupy", "numpy"},
    "scheduler": {"numpy"},
}
FILES = sorted(path for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py"))


def imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write `from slipring...` instead of a relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        top, *rest = name.split(".")
        if top == "slipring":
            assert rest[0] in MAY_IMPORT[folder] | {folder}, f"{folder}/ may not import {name}"
        elif top not in sys.stdlib_module_names:
            assert top not in MAY_IMPORT, f"write slipring.{name}"
            assert top in MAY_USE.get(folder, {top}), f"{folder}/ may not use {top}"
            assert top not in {"torch", "triton", "cupy"} or folder in {"kernels", "workers"}, "torch stays in workers"


def test_the_engine_process_never_loads_torch_and_starts_quickly() -> None:
    code = (
        "import sys, slipring.http.cli, slipring.runtime.engine, slipring.scheduler.scheduler\n"
        "assert not {'torch', 'transformers', 'gguf', 'triton', 'cupy', 'llguidance'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_http_has_no_init_and_the_standard_library_wins() -> None:
    assert not (ROOT / "http" / "__init__.py").exists()
    code = "import http.client, slipring.http.cli, sys; assert 'site-packages' not in http.client.__file__"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_every_module_imports_alone() -> None:
    names = [
        "slipring." + ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in FILES
        if path.name not in {"__init__.py", "__main__.py"} and path.parts[-2] not in {"workers", "kernels", "models"}
    ]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for loaded in [m for m in sys.modules if m.startswith('slipring')]: del sys.modules[loaded]\n"
        "    importlib.import_module(name)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code, *names], check=True, cwd=ROOT)


def test_sync_comments_are_paired() -> None:
    """Each publishing store and the load that relies on it carry the same words."""
    labels: dict[str, int] = {}
    for path in (ROOT / "shm").glob("*.py"):
        for label in re.findall(r"# (SYNC: .+)", path.read_text()):
            labels[label] = labels.get(label, 0) + 1
    assert labels and all(count >= 2 for count in labels.values()), labels


def test_no_grab_bags() -> None:
    names = {path.stem for path in FILES}
    assert not names & {"utils", "util", "helpers", "misc", "common"}


def test_only_config_reads_the_environment() -> None:
    for folder in ("shm", "scheduler", "runtime"):
        for path in (ROOT / folder).glob("*.py"):
            if path.name not in {"config.py", "tokenizer.py"}:
                assert "os.environ" not in path.read_text(), f"{path}: the environment is read in runtime/config.py"
