"""What recorded actions mean, checked against the live environment before the first step (B4, B45, B46).

``expert_controller_command``: the action is what the controller was told; its width is the action space's.
``policy_request``: the action is what a policy asks of the environment's ``action_manager``, which splits it into
terms. A manager has ``total_action_dim``, ``get_term(name)`` and ``descriptors`` in order; each of these has ``name``,
``start``, ``stop`` and ``term`` (with ``contract``, ``action_dim``, ``joint_names``). A term that commands joints
(``command_type`` qpos, qvel or qf) has ``controlled_joint_ids`` into ``robot.joint_names``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import gymnasium as gym

from ods_async.core.schema import path_text
from ods_async.errors import SchemaMismatchError
from ods_async.worker.environments import DemoEnvironment

__all__ = ["check_recording"]

_DEFAULT: Final = "expert_controller_command"
_JOINT_COMMANDS: Final = ("qpos", "qvel", "qf")


def check_recording(
    environment: DemoEnvironment,
    *,
    action_semantics: str = _DEFAULT,
    action_contracts: tuple[str, ...] | None = None,
    action_dim: int | None = None,
    state_dim: int | None = None,
) -> None:
    """Compare what the configuration says is recorded with every row's environment.

    Args:
        environment: the live environment.
        action_semantics: as configured; an environment that says nothing records controller commands.
        action_contracts: ids in order, for ``policy_request``.
        action_dim: width of the action, or None to take the environment's.
        state_dim: width of the state, or None: the values a step of all observation fields with at most one axis.

    Raises:
        SchemaMismatchError: the first disagreement.
    """
    state = [spec for spec in environment.observations.fields if len(spec.shape) <= 1]
    width = sum(spec.shape[0] if spec.shape else 1 for spec in state)
    if state_dim is not None and state_dim != width:
        names = ", ".join(path_text(spec.path) for spec in state) or "none"
        raise _disagree("state_dim", f"{state_dim}, as configured", f"{width} (fields with at most one axis: {names})")
    for env in _lives(environment):
        said = _get(env, "rollout_action_semantics", _DEFAULT)
        if said != action_semantics:
            raise _disagree(
                "action_semantics", f"{action_semantics!r}, as configured", f"{said!r} in {environment.name}"
            )
        if action_semantics == _DEFAULT:
            spec = _get(env, "expert_action_spec", None)
            if spec is not None and spec.width != environment.actions.width:
                found = f"an action space of width {environment.actions.width}"
                raise _disagree("expert_action_spec", f"width {spec.width}", found)
        else:
            _check_manager(env, action_contracts or (), environment.actions.width)
    if action_dim is not None and action_dim != environment.actions.width:
        found = f"{environment.actions.width} in {environment.name}"
        raise _disagree("action_dim", f"{action_dim}, as configured", found)


def _check_manager(env: Any, contracts: tuple[str, ...], space_width: int) -> None:
    manager = _get(env, "action_manager", None)
    if manager is None:
        raise _disagree("action_manager", "an action manager, for policy_request", "none")
    descriptors = tuple(manager.descriptors)
    live = tuple(descriptor.term.contract for descriptor in descriptors)
    for index in range(max(len(live), len(contracts))):
        wanted = repr(contracts[index]) if index < len(contracts) else "no further contract"
        found = repr(live[index]) if index < len(live) else "no further term"
        if wanted != found:
            raise _disagree(f"action_contracts[{index}]", wanted, found)
    width = 0
    for descriptor in descriptors:
        name, span = descriptor.name, f"[{descriptor.start}, {descriptor.stop})"
        if descriptor.start != width:
            raise _disagree(f"action term {name!r}", f"a slice that begins at {width}", span)
        if descriptor.stop - descriptor.start != descriptor.term.action_dim:
            raise _disagree(f"action term {name!r}", f"a slice of width {descriptor.term.action_dim}", span)
        width = descriptor.stop
        term = manager.get_term(name)
        if getattr(term, "command_type", None) in _JOINT_COMMANDS:
            names = _get(env, "robot", None).joint_names
            joints = tuple(names[index] for index in term.controlled_joint_ids)
            if tuple(descriptor.term.joint_names) != joints:
                raise _disagree(f"joints of action term {name!r}", f"{tuple(descriptor.term.joint_names)}", f"{joints}")
    if width != manager.total_action_dim:
        raise _disagree("action_manager.total_action_dim", f"{width}, the sum of the terms", manager.total_action_dim)
    if width != space_width:
        raise _disagree("action space", f"width {width}, that of the action manager", f"width {space_width}")


def _lives(environment: DemoEnvironment) -> Iterator[Any]:
    rows = [environment.row(index) for index in range(environment.num_envs)]
    if all(row is None for row in rows):
        yield environment.whole
    yield from (row for row in rows if row is not None)


def _get(env: Any, name: str, default: Any) -> Any:
    if isinstance(env, gym.Env):
        return env.get_wrapper_attr(name) if env.has_wrapper_attr(name) else default
    return getattr(getattr(env, "unwrapped", env), name, default)


def _disagree(field: str, expected: str, found: object) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"{field}: expected {expected}, found {found}; make configuration and environment agree",
        field=field,
        expected=expected,
        found=str(found),
    )
