"""Settings from a file: YAML, JSON or TOML, by its suffix."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from ods_async.config.rules import bad

__all__ = ["read_settings"]

_KNOWN = ".yaml, .yml, .json or .toml"


def read_settings(path: Path) -> dict[str, Any]:
    """The mapping in the file; an empty YAML file is an empty mapping.

    Raises:
        ConfigError: an unknown suffix, text that cannot be parsed, a key given twice, no mapping at the top, or a YAML
            file where PyYAML is missing.
        OSError: the file cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix not in (".yaml", ".yml", ".json", ".toml"):
        raise bad("file", str(path), f"must end in {_KNOWN}")
    data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
        if suffix == ".json":
            found = json.loads(text, object_pairs_hook=_once)
        elif suffix == ".toml":
            found = tomllib.loads(text)
        else:
            found = _read_yaml(text)
    except (ValueError, RecursionError) as error:
        if hasattr(error, "rule"):
            raise
        raise bad("file", str(path), f"cannot be read as {suffix[1:]}: {_one_line(error)}") from error
    found = {} if found is None and suffix in (".yaml", ".yml") else found
    if not isinstance(found, dict):
        raise bad("file", str(path), f"must hold a mapping of settings, not {type(found).__name__}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise bad(key, value, "is given twice in the file")
        found[key] = value
    return found


def _read_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        rule = "needs PyYAML: pip install 'ods-async[yaml]', or write the settings as .json or .toml"
        raise bad("file", "*.yaml", rule) from error

    class Loader(yaml.SafeLoader):
        """Safe, and strict about doubled keys, which YAML would let the last one win."""

    def mapping(loader: Loader, node: yaml.MappingNode) -> dict[Any, Any]:
        own = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        doubled = next((key for key in own if own.count(key) > 1), None)
        if doubled is not None:
            raise bad(str(doubled), "...", "is given twice in the file")
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(_one_line(error)) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
