"""The tables of the README and of docs/figures.md, rendered from `perf/results/*.json` between markers, so that no
number is typed by hand.

<!-- perf:NAME -->
...rewritten...
<!-- /perf:NAME -->
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

from perf.figure import RESULTS, ROOT

PAGES = ROOT / "README.md", ROOT / "docs" / "figures.md"
_BLOCK = re.compile(r"(<!-- perf:([\w-]+) -->\n).*?(<!-- /perf:\2 -->)", re.DOTALL)


def render(check: bool) -> int:
    """Exit status 0; 1 with `check` when a page and the results differ."""
    status = 0
    for page in PAGES:
        text = page.read_text()
        rendered = _BLOCK.sub(lambda match: match[1] + table_of(match[2]) + match[3], text)
        if not check:
            page.write_text(rendered)
        elif text != rendered:
            print(f"{page.name} differs from perf/results: run `python -m perf render`", file=sys.stderr)
            status = 1
    return status


def table_of(name: str) -> str:
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    rows = record["table"]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows]
    machine = record["machine"]
    lines.append("")
    lines.append(
        f"`.venv/bin/python -m perf run {name}`, {record['date']}, commit {record['commit']}, "
        f"{machine['cores']} cores of {machine['cpu']}, Python {record['versions']['python']}."
    )
    return "\n".join(lines) + "\n"
