"""As much of JSON Schema as the compose specification's own schema uses, so that the check needs no network."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_KINDS: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}
_SAID = {"$schema", "$id", "id", "title", "description", "definitions", "default", "deprecated", "format"}


def faults(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "") -> Iterator[str]:
    """What is wrong with ``value``; an unknown keyword of the schema is an error, not something passed over."""
    if "$ref" in schema:
        target = root
        for part in schema["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        yield from faults(value, target, root, path)
    for keyword, rule in schema.items():
        if keyword == "type":
            if not any(_is(value, kind) for kind in ([rule] if isinstance(rule, str) else rule)):
                yield f"{path}: {value!r} is not of type {rule}"
        elif keyword == "enum":
            if value not in rule:
                yield f"{path}: {value!r} is not one of {rule}"
        elif keyword in ("oneOf", "anyOf"):
            tried = [list(faults(value, choice, root, path)) for choice in rule]
            fits = sum(not found for found in tried)
            if fits == 0 or (keyword == "oneOf" and fits > 1):
                yield f"{path}: {fits} of {len(rule)} forms fit: {tried}"
        elif keyword in ("minimum", "maximum"):
            if _is(value, "number") and not (value >= rule if keyword == "minimum" else value <= rule):
                yield f"{path}: {value} breaks {keyword} {rule}"
        elif keyword == "items":
            for index, item in enumerate(value if isinstance(value, list) else ()):
                yield from faults(item, rule, root, f"{path}[{index}]")
        elif keyword == "uniqueItems":
            if isinstance(value, list) and any(item in value[:index] for index, item in enumerate(value)):
                yield f"{path}: something is there twice"
        elif keyword == "required":
            yield from (f"{path}: {name} is missing" for name in rule if isinstance(value, dict) and name not in value)
        elif keyword not in _SAID | {"$ref", "properties", "patternProperties", "additionalProperties"}:
            raise AssertionError(f"the schema uses {keyword}, which is not understood here")
    if isinstance(value, dict):
        yield from _members(value, schema, root, path)


def _members(value: dict[str, Any], schema: dict[str, Any], root: dict[str, Any], path: str) -> Iterator[str]:
    for name, member in value.items():
        rules = [schema["properties"][name]] if name in schema.get("properties", {}) else []
        rules += [rule for pattern, rule in schema.get("patternProperties", {}).items() if re.search(pattern, name)]
        rest = schema.get("additionalProperties", True)
        if not rules and rest is False:
            yield f"{path}: {name} is not known"
        if not rules and isinstance(rest, dict):
            rules = [rest]
        for rule in rules:
            yield from faults(member, rule, root, f"{path}.{name}")


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _KINDS[kind]) and not (isinstance(value, bool) and kind in ("integer", "number"))
