"""`slipring doctor`: what this machine has, what will be used, what is missing, and the command that fixes it."""

from __future__ import annotations

import orjson

from slipring.runtime.doctor import Diagnosis, Finding, Level, diagnose
from slipring.runtime.machine import inspect_machine

_MARKS = {Level.OK: " ", Level.NOTE: " ", Level.ADVICE: "!", Level.PROBLEM: "x"}


def doctor(as_json: bool) -> int:
    """Print the diagnosis. Exit status 0 if this machine can serve."""
    diagnosis = diagnose(inspect_machine())
    print(_json(diagnosis) if as_json else report(diagnosis))
    return 0 if diagnosis.can_serve else 1


def report(diagnosis: Diagnosis) -> str:
    """One line a finding, its fix beneath it, and the verdict."""
    lines = [line for finding in diagnosis.findings for line in _lines(finding)]
    return "\n".join([*lines, "", verdict(diagnosis)])


def verdict(diagnosis: Diagnosis) -> str:
    if not diagnosis.can_serve:
        return "This machine cannot serve yet: see the lines marked x."
    device = "The GPU path is complete here." if diagnosis.cuda else "Models will run on the CPU."
    advised = any(finding.level is Level.ADVICE for finding in diagnosis.findings)
    return f"This machine can serve. {device}" + (" Lines marked ! would make it better." if advised else "")


def _lines(finding: Finding) -> list[str]:
    lines = [f"{_MARKS[finding.level]} {finding.subject:<13} {finding.text}"]
    return [*lines, f"{'':<15} fix: {finding.fix}"] if finding.fix else lines


def _json(diagnosis: Diagnosis) -> str:
    findings = [
        {"subject": found.subject, "level": found.level.value, "text": found.text, "fix": found.fix}
        for found in diagnosis.findings
    ]
    answer = {"can_serve": diagnosis.can_serve, "cuda": diagnosis.cuda, "findings": findings}
    return orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode()
