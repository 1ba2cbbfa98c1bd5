"""Finds the policy that a configuration names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ods_async.config.rules import bad
from ods_async.errors import ConfigError

__all__ = ["resolve_policy"]


def resolve_policy(name: str, kwargs: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The callable that ``name`` ("module:attribute", attributes may be dotted) stands for, with ``kwargs`` bound.

    A policy is called once an episode and row with a :class:`~ods_async.worker.demonstration.DemoView` and returns an
    iterable of segments, or of actions.

    Raises:
        ConfigError: a malformed name, a module that cannot be found, no such attribute, or nothing callable.
        Exception: whatever the module raises while it is imported.
    """
    module_name, colon, attribute = name.partition(":")
    if not colon or not module_name or not attribute:
        raise _bad(name, 'must be written "module:attribute", for instance "my_package.experts:pick_place"')
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        raise _bad(name, f"names the module {error.name}, which is not on the path") from error
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise _bad(name, f"names {part!r}, which {getattr(found, '__name__', found)} does not have") from error
    if not callable(found):
        raise _bad(name, f"names a {type(found).__name__}, which cannot be called")
    return partial(found, **kwargs) if kwargs else found


def _bad(name: str, rule: str) -> ConfigError:
    return bad('gym_config["policy"]', name, rule)
