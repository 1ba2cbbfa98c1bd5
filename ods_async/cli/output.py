"""What the commands print: tables for people, one JSON value a line for programs, one line for what went wrong."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

from ods_async.errors import OdsError

__all__ = ["describe_failure", "print_json", "print_pairs", "to_json"]


def to_json(value: Any) -> Any:
    """The value as JSON's kinds: dataclasses as objects, tuples as arrays, bytes as hex, other things as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_json(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return value.hex() if isinstance(value, bytes) else str(value)


def print_json(value: Any) -> None:
    """One line, flushed, so that a program at the other end of a pipe gets it now."""
    print(json.dumps(to_json(value)), flush=True)


def print_pairs(values: Mapping[str, Any], indent: str = "") -> None:
    """Names and values, aligned; nested mappings indented; long lists by their length."""
    width = max((len(key) for key in values), default=0)
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            print(f"{indent}{key}")
            print_pairs(value, indent + "  ")
        elif value not in ({}, [], ()):
            print(f"{indent}{key:<{width}}  {_short(value)}")


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}"
    return "-" if value is None or value == "" else str(value)


def describe_failure(error: BaseException) -> None:
    """The reason on standard error: one line, then what more is known."""
    first, *rest = str(error).splitlines() or [""]
    if not isinstance(error, OdsError):
        first = f"{type(error).__name__}: {first}" if first else type(error).__name__
    print(f"ods-async: error: {first}", file=sys.stderr)
    details = [*rest, *getattr(error, "__notes__", ())]
    cause = error.fields.get("traceback_text") if isinstance(error, OdsError) else None
    if cause:
        details += str(cause).rstrip().splitlines()
    for line in details:
        print(f"  {line}", file=sys.stderr)
