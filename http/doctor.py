"""`slipring doctor`: what this machine has, what --device uses of it, what is missing, and what fixes it."""

from __future__ import annotations

import sys

import orjson

from slipring.runtime.config import ConfigError, device_name
from slipring.runtime.doctor import Diagnosis, Finding, Level, diagnose
from slipring.runtime.machine import inspect_machine

_MARKS = {Level.OK: " ", Level.NOTE: " ", Level.ADVICE: "!", Level.PROBLEM: "x"}


def doctor(as_json: bool, device: str = "auto") -> int:
    """Print the diagnosis. Exit status 0 if this machine can serve on `device`, 2 if there is no such device name."""
    try:
        name = device_name(device)
    except ConfigError as error:
        print(f"slipring: {error}", file=sys.stderr)
        return 2
    diagnosis = diagnose(inspect_machine(), name)
    print(_json(diagnosis) if as_json else report(diagnosis))
    return 0 if diagnosis.can_serve else 1


def report(diagnosis: Diagnosis) -> str:
    """One line a finding, its fix beneath it, and the verdict."""
    lines = [line for finding in diagnosis.findings for line in _lines(finding)]
    return "\n".join([*lines, "", verdict(diagnosis)])


def verdict(diagnosis: Diagnosis) -> str:
    if not diagnosis.can_serve:
        return f"This machine cannot serve with --device {diagnosis.device} yet: see the lines marked x."
    advised = any(finding.level is Level.ADVICE for finding in diagnosis.findings)
    return f"This machine can serve. {_used(diagnosis)}" + (" Lines marked ! would make it better." if advised else "")


def _used(diagnosis: Diagnosis) -> str:
    if diagnosis.device != "cpu":
        return f"Models will run on the GPU with --device {diagnosis.device}."
    more = " A GPU is ready too: --device cuda:N uses it." if diagnosis.cuda else ""
    return f"Models will run on the CPU.{more}"


def _lines(finding: Finding) -> list[str]:
    lines = [f"{_MARKS[finding.level]} {finding.subject:<13} {finding.text}"]
    return [*lines, f"{'':<15} fix: {finding.fix}"] if finding.fix else lines


def _json(diagnosis: Diagnosis) -> str:
    findings = [
        {"subject": found.subject, "level": found.level.value, "text": found.text, "fix": found.fix}
        for found in diagnosis.findings
    ]
    verdicts = {"can_serve": diagnosis.can_serve, "device": diagnosis.device, "cuda": diagnosis.cuda}
    answer = {**verdicts, "findings": findings}
    return orjson.dumps(answer, option=orjson.OPT_INDENT_2).decode()
