"""The rules of the settings: what each value must be, and the sentence that says so (B1).

A rule takes a field's name and value; it returns the value to keep, or raises with field, value and rule.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from ods_async.errors import ConfigError, EndpointError

if TYPE_CHECKING:
    from ods_async.config.settings import OnlineDataEngineCfg

__all__ = ["DEFAULT_LIMITS", "GYM_KEYS", "RULES", "bad", "check_together", "plain_copy", "refuse_unknown"]

# The names and defaults of ``core.requests.Limits``; a test keeps the two the same.
DEFAULT_LIMITS: Final[Mapping[str, int]] = {
    "header_bytes": 4 * 1024 * 1024,
    "rollout_bytes": 4 * 1024 * 1024 * 1024,
    "batch_bytes": 2 * 1024 * 1024 * 1024,
    "batch_windows": 65_536,
    "plans_per_request": 64,
    "parked_per_session": 4,
    "sessions": 1024,
    "schema_fields": 1024,
    "nesting": 16,
    "text_bytes": 65_536,
    "episodes_per_rollout": 65_536,
    "leases_per_session": 256,
}
# Below these a limit would refuse the service's own first messages.
_LIMIT_FLOORS: Final[Mapping[str, int]] = {
    "header_bytes": 65_536,
    "rollout_bytes": 4096,
    "batch_bytes": 4096,
    "schema_fields": 16,
    "nesting": 4,
    "text_bytes": 256,
    "leases_per_session": 2,
}

_MAX_SECONDS: Final = 1e9
_MAX_DEPTH: Final = 32
_INT64: Final = (1 << 63) - 1


Rule = Callable[[str, Any], Any]


def bad(name: str, value: object, rule: str, hint: str = "") -> ConfigError:
    """The error that names field, value and rule; ``hint`` is added to the sentence only."""
    shown = repr(value)
    shown = shown if len(shown) <= 200 else shown[:197] + "..."
    return ConfigError(f"{name}={shown}: {rule}{hint}", argument=name, value=shown, rule=rule)


def refuse_unknown(given: Mapping[Any, Any], known: tuple[str, ...], what: str, prefix: str = "") -> None:
    """Raise for the first key that is not in ``known``, with the nearest one that is."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
            raise bad(f"{prefix}{key}", given[key], f"is not {what}", hint)


def _integer(low: int, high: int = _INT64, *, optional: bool = False) -> Rule:
    words = {0: "a non-negative integer", 1: "a positive integer"}.get(low, f"an integer of at least {low}")
    words += " below 2**63" if high == _INT64 else f" of at most {high}"
    words += " (or None)" if optional else ""

    def rule(name: str, value: Any) -> Any:
        if optional and value is None:
            return None
        if type(value) is not int or not low <= value <= high:
            raise bad(name, value, f"must be {words}")
        return value

    return rule


def _number(*, optional: bool = False) -> Rule:
    words = "must be a finite number above 0 (and at most 1e9)" + (" or None" if optional else "")

    def rule(name: str, value: Any) -> Any:
        if optional and value is None:
            return None
        real = type(value) in (int, float)
        if not real or not (math.isfinite(value) if type(value) is float else True) or not 0 < value <= _MAX_SECONDS:
            raise bad(name, value, words)
        return float(value)

    return rule


def _one_of(*choices: str | None) -> Rule:
    def rule(name: str, value: Any) -> Any:
        if not (value is None or type(value) is str) or value not in choices:
            words = [repr(c) for c in choices]
            near = difflib.get_close_matches(str(value), [c for c in choices if c], n=1, cutoff=0.6)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise bad(name, value, f"must be {', '.join(words[:-1])} or {words[-1]}", hint)
        return value

    return rule


def _flag(name: str, value: Any) -> Any:
    if type(value) is not bool:
        raise bad(name, value, "must be True or False")
    return value


def _device(name: str, value: Any) -> Any:
    if value != "cpu" or type(value) is not str:
        raise bad(name, value, "must be 'cpu': the buffer is in host memory", "; a consumer's device= moves batches")
    return value


def _name(name: str, value: Any) -> Any:
    if type(value) is not str or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}", value):
        raise bad(name, value, "must be 1 to 32 letters, digits, '_', '-' or '.', beginning with a letter or digit")
    return value


def _endpoint(name: str, value: Any) -> str:
    if type(value) is not str or not re.fullmatch(r"(tcp|ipc)://\S+", value):
        rule = "must be an address such as 'tcp://127.0.0.1:5555' or 'ipc:///tmp/ods.sock'"
        raise EndpointError(f"{name}={value!r}: {rule}", argument=name, value=repr(value), rule=rule)
    return value


def _optional_endpoint(name: str, value: Any) -> Any:
    return None if value is None else _endpoint(name, value)


def _endpoints(name: str, value: Any) -> Any:
    if not isinstance(value, list | tuple):
        raise bad(name, value, "must be a list of addresses")
    return tuple(_endpoint(f"{name}[{index}]", item) for index, item in enumerate(value))


def _contracts(name: str, value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value or any(type(c) is not str or not c.strip() for c in value):
        raise bad(name, value, "must be a tuple of contract ids that are not blank (or None)")
    return tuple(value)


def plain_copy(value: Any, where: str, depth: int = 0) -> Any:
    """A deep copy of plain data: None, bool, int, float, str, lists of these, dicts of these with text keys.

    Tuples become lists, since that is what arrives in a worker.

    Args:
        value: the data.
        where: the key path, for the message.
        depth: levels already gone down.

    Raises:
        ConfigError: naming the key path of the first value that is not plain.
    """
    if depth > _MAX_DEPTH:
        raise bad(where, "...", f"must not be nested deeper than {_MAX_DEPTH} levels (does it contain itself?)")
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return [plain_copy(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                raise bad(f"{where}[{key!r}]", value[key], "must have a text key: settings travel as JSON")
        return {key: plain_copy(item, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}
    rule = f"must be plain data (None, bool, int, float, str, list, dict), not {type(value).__qualname__}"
    hint = "; name code by its import path, as in 'my_package.experts:pick_place'" if callable(value) else ""
    raise bad(where, value, rule + ": settings travel to other processes as JSON", hint)


def _plain_dict(name: str, value: Any) -> Any:
    if type(value) is not dict:
        raise bad(name, value, "must be a dict")
    return plain_copy(value, name)


def _gym_config(name: str, value: Any) -> Any:
    kept = _plain_dict(name, value)
    refuse_unknown(kept, GYM_KEYS, "a key of gym_config (arguments of the environment go under 'kwargs')", f"{name}.")
    for key, rule in _GYM_RULES.items():
        if key in kept:
            kept[key] = rule(f'{name}["{key}"]', kept[key])
    return kept


def _text(name: str, value: Any) -> Any:
    if type(value) is not str or not value.strip():
        raise bad(name, value, "must be text that is not blank")
    return value


def _optional_text(name: str, value: Any) -> Any:
    return None if value is None else _text(name, value)


def _optional_path(name: str, value: Any) -> Any:
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if text is not None and (type(text) is not str or not text.strip() or "\0" in text):
        raise bad(name, value, "must be the path of a file or folder (or None)")
    return text


def _policy(name: str, value: Any) -> Any:
    if value is not None and (type(value) is not str or not re.fullmatch(r"[\w.]+:[\w.]+", value)):
        raise bad(name, value, "must name an object as 'module:attribute' (or be None)")
    return value


def _texts(name: str, value: Any) -> Any:
    if type(value) is not list:
        raise bad(name, value, "must be a list of names")
    return [_text(f"{name}[{index}]", item) for index, item in enumerate(value)]


def _limits(name: str, value: Any) -> Any:
    kept = _plain_dict(name, value)
    refuse_unknown(kept, tuple(DEFAULT_LIMITS), "a limit", f"{name}.")
    return {
        key: _integer(_LIMIT_FLOORS.get(key, 1))(f'{name}["{key}"]', kept.get(key, default))
        for key, default in DEFAULT_LIMITS.items()
    }


_GYM_RULES: Final[Mapping[str, Rule]] = {
    "id": _text,
    "num_envs": _integer(1),
    "max_episode_steps": _integer(1, 2**31 - 1, optional=True),
    "kwargs": _plain_dict,
    "policy": _policy,
    "policy_kwargs": _plain_dict,
    "tasks": _texts,
    "instruction": _optional_text,
    "accept": _one_of("success", "any", None),
    "vectorization": _one_of("loop", "sync", "async", "vector_entry_point"),
    "imports": _texts,
    "next_obs": _flag,
    "allow_nonfinite": _flag,
}
GYM_KEYS: Final = tuple(_GYM_RULES)

RULES: Final[Mapping[str, Rule]] = {
    "buffer_size": _integer(1, 2**31 - 1),
    "max_episode_steps": _integer(1, 2**31 - 1),
    "state_dim": _integer(1, optional=True),
    "action_dim": _integer(1, optional=True),
    "buffer_device": _device,
    "gym_config": _gym_config,
    "action_config": _plain_dict,
    "refill_threshold": _integer(1),
    "refill_policy": _one_of("sample_threshold", "manual", "continuous"),
    "max_generation_attempts": _integer(1),
    "initialization_timeout": _number(),
    "shutdown_timeout": _number(),
    "language_buffer_bytes": _integer(1),
    "include_provenance": _flag,
    "episode_sample_budget": _integer(1, optional=True),
    "episode_sample_hard_limit": _integer(1, optional=True),
    "lifecycle_event_capacity": _integer(0),
    "action_semantics": _one_of("expert_controller_command", "policy_request"),
    "action_contracts": _contracts,
    "num_workers": _integer(0, 4096),
    "max_worker_restarts": _integer(0),
    "worker_failure": _one_of("fail", "tolerate", None),
    "endpoint": _optional_endpoint,
    "extra_endpoints": _endpoints,
    "allow_insecure_bind": _flag,
    "server_keys": _optional_path,
    "allowed_clients": _optional_path,
    "client_keys": _optional_path,
    "shared_memory": _one_of("auto", "on", "off"),
    "spare_rows": _integer(1, 2**31 - 1, optional=True),
    "lease_seconds": _number(),
    "ticket_start_timeout": _number(),
    "ticket_finish_timeout": _number(),
    "heartbeat_interval": _number(),
    "heartbeat_timeout": _number(),
    "event_history": _integer(1),
    "seed": _integer(0, optional=True),
    "samples_per_insert": _number(optional=True),
    "limits": _limits,
    "name": _name,
}


def check_together(cfg: OnlineDataEngineCfg) -> None:
    """The rules that concern several settings."""
    if cfg.num_envs > cfg.buffer_size:
        raise bad('gym_config["num_envs"]', cfg.num_envs, f"must not exceed buffer_size={cfg.buffer_size}")
    if cfg.spare < cfg.num_envs:
        raise bad("spare_rows", cfg.spare_rows, f"must hold one rollout, that is num_envs={cfg.num_envs} episodes")
    budget, ceiling = cfg.episode_sample_budget, cfg.episode_sample_hard_limit
    if (budget is None) != (ceiling is None):
        missing = "episode_sample_hard_limit" if ceiling is None else "episode_sample_budget"
        given = budget if ceiling is None else ceiling
        rule = f"must be given together with its partner (which is {given}), or neither"
        raise bad(missing, None, rule)
    if budget is not None and ceiling is not None and budget > ceiling:
        raise bad("episode_sample_budget", budget, f"must not exceed episode_sample_hard_limit={ceiling}")
    if cfg.lifecycle_event_capacity:
        first_fill = 2 * cfg.rollouts_per_generation * cfg.num_envs - cfg.buffer_size
        needed = max(2 * cfg.buffer_size, first_fill)
        if cfg.lifecycle_event_capacity < needed:
            rule = f"must be 0, or at least {needed}: twice buffer_size and the records of the first fill"
            raise bad("lifecycle_event_capacity", cfg.lifecycle_event_capacity, rule)
    if cfg.action_semantics == "policy_request":
        for name in ("action_dim", "action_contracts"):
            if getattr(cfg, name) is None:
                raise bad(name, None, "must be given when action_semantics is 'policy_request'")
    elif cfg.action_contracts is not None:
        rule = "may be given only when action_semantics is 'policy_request'"
        raise bad("action_contracts", cfg.action_contracts, rule)
    if cfg.samples_per_insert is not None and cfg.refill_policy != "continuous":
        raise bad("samples_per_insert", cfg.samples_per_insert, "may be given only when refill_policy is 'continuous'")
    if cfg.allowed_clients is not None and cfg.server_keys is None:
        raise bad("allowed_clients", cfg.allowed_clients, "may be given only together with server_keys")
    if cfg.heartbeat_timeout < 2 * cfg.heartbeat_interval:
        rule = f"must be at least twice heartbeat_interval={cfg.heartbeat_interval}"
        raise bad("heartbeat_timeout", cfg.heartbeat_timeout, rule)
