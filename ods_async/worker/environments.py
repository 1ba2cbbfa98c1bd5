"""Gymnasium environments behind one face: rows that are reset together, step together and finish on their own.

Two shapes: :class:`LoopEnvironment` steps single environments one after the other (the default; a finished row is
simply not stepped any more), :class:`VectorEnvironment` drives a gymnasium ``VectorEnv`` (``sync``, ``async``, or one
that simulates all rows at once). Whatever an environment does after the end of an episode, automatic resets included,
is never seen by the caller: a finished row yields ``None``.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array

from ods_async.config.rules import bad
from ods_async.core.schema import FieldSpec
from ods_async.worker.recorder import Moment, Recorder, check_reward
from ods_async.worker.settings import EnvironmentSettings
from ods_async.worker.spaces import SpaceCodec

__all__ = [
    "DemoEnvironment",
    "EnvironmentSettings",
    "LoopEnvironment",
    "VectorEnvironment",
    "as_demo_environment",
    "make_environment",
]

# Gymnasium ids of these namespaces exist once the module is imported.
_NAMESPACES: Final = {"Meta-World": "metaworld", "ods_async": "ods_async.testing"}
_EXTRAS: Final = {"metaworld": "metaworld"}


class DemoEnvironment(ABC):
    """Rows of one environment, and what is recorded of them.

    Attributes:
        num_envs: rows.
        capacity: the longest episode, in steps.
        name: for messages and dashboards.
        observations: how observations become fields below ``obs``.
        actions: how actions become fields at or below ``actions``.
        next_observations: the same below ``next_obs``, or None.
        settings: what the configuration says beside.
    """

    def __init__(
        self,
        name: str,
        num_envs: int,
        capacity: int,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        settings: EnvironmentSettings | None = None,
    ) -> None:
        self.name = name
        self.num_envs = num_envs
        self.capacity = capacity
        self.settings = settings or EnvironmentSettings(name)
        self.observations = SpaceCodec(observation_space, ("obs",))
        self.actions = SpaceCodec(action_space, ("actions",))
        self.next_observations = SpaceCodec(observation_space, ("next_obs",)) if self.settings.next_obs else None

    @property
    def fields(self) -> tuple[FieldSpec, ...]:
        """The environment's own fields: observations, next observations where wanted, actions."""
        following = self.next_observations.fields if self.next_observations else ()
        return self.observations.fields + following + self.actions.fields

    @cached_property
    def recorder(self) -> Recorder:
        """Keeps what happens; its memory is reused from one episode to the next."""
        return Recorder(self.observations, self.actions, self.next_observations, self.num_envs, self.capacity)

    @abstractmethod
    def reset(self, seeds: Sequence[int], episode_index: int = 0) -> list[Moment]:
        """Begin an episode in every row, each with a seed of its own."""

    @abstractmethod
    def step(self, actions: Sequence[Any]) -> list[Moment | None]:
        """One step of every row whose action is not None; None for the others."""

    @abstractmethod
    def row(self, index: int) -> gym.Env[Any, Any] | None:
        """The single environment of a row, or None where there is none in this process."""

    @property
    def whole(self) -> VectorEnv[Any, Any, Any] | None:
        """The vector environment that holds all rows, or None."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Close every environment; the first error is raised after all were tried."""


class LoopEnvironment(DemoEnvironment):
    """Single environments, stepped one after the other.

    Args:
        envs: at least one; all with the same spaces.
        capacity: the longest episode, in steps.
        name: for messages.
        settings: what the configuration says beside.
    """

    def __init__(
        self,
        envs: Sequence[gym.Env[Any, Any]],
        capacity: int,
        name: str = "",
        settings: EnvironmentSettings | None = None,
    ) -> None:
        first = envs[0]
        super().__init__(
            name or _name_of(first), len(envs), capacity, first.observation_space, first.action_space, settings
        )
        self._envs = list(envs)

    def reset(self, seeds: Sequence[int], episode_index: int = 0) -> list[Moment]:
        """Begin an episode in every row. ``episode_index`` is told to environments with ``begin_demo_episode``."""
        found = []
        for env, seed in zip(self._envs, seeds, strict=True):
            if env.has_wrapper_attr("begin_demo_episode"):
                env.get_wrapper_attr("begin_demo_episode")(episode_index)
            # Environments that predate reset(seed=) have a method of their own, and ignore the argument.
            legacy = getattr(env.unwrapped, "seed", None)
            if callable(legacy):
                legacy(int(seed))
            observation, info = env.reset(seed=int(seed))
            found.append(Moment(observation, info))
        return found

    def step(self, actions: Sequence[Any]) -> list[Moment | None]:
        """One step of every row whose action is not None."""
        found: list[Moment | None] = []
        for env, action in zip(self._envs, actions, strict=True):
            if action is None:
                found.append(None)
                continue
            observation, reward, terminated, truncated, info = env.step(action)
            found.append(Moment(observation, info, check_reward(reward), bool(terminated), bool(truncated)))
        return found

    def row(self, index: int) -> gym.Env[Any, Any]:
        """The environment of a row."""
        return self._envs[index]

    def close(self) -> None:
        """Close every environment; the first error is raised after all were tried."""
        errors = []
        for env in self._envs:
            try:
                env.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


class VectorEnvironment(DemoEnvironment):
    """A gymnasium vector environment, whatever its autoreset mode.

    Args:
        env: the vector environment.
        capacity: the longest episode, in steps.
        name: for messages.
        settings: what the configuration says beside.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        capacity: int,
        name: str = "",
        settings: EnvironmentSettings | None = None,
    ) -> None:
        super().__init__(
            name or type(env.unwrapped).__name__,
            env.num_envs,
            capacity,
            env.single_observation_space,
            env.single_action_space,
            settings,
        )
        self._env = env
        self._mode = env.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        self._last: list[Any] = [None] * env.num_envs
        self._ended = np.zeros(env.num_envs, bool)

    def reset(self, seeds: Sequence[int], episode_index: int = 0) -> list[Moment]:
        """Begin an episode in every row."""
        observations, infos = self._env.reset(seed=[int(seed) for seed in seeds])  # type: ignore[arg-type]
        self._ended[:] = False
        self._last = [None] * self.num_envs
        return [
            Moment(self._row_of(observations, index), _row_info(infos, index, self.num_envs))
            for index in range(self.num_envs)
        ]

    def step(self, actions: Sequence[Any]) -> list[Moment | None]:
        """One step of the whole; rows whose action is None repeat their last one, unseen."""
        if self._mode is AutoresetMode.DISABLED and self._ended.any():
            # With automatic resets off, a row that ended must be reset before the whole may step again.
            self._env.reset(options={"reset_mask": self._ended.copy()})
        told: list[Any] = []
        for index, action in enumerate(actions):
            if action is not None:
                self._last[index] = action
            told.append(self._last[index])
        space = self._env.single_action_space
        out: Any = create_empty_array(space, self.num_envs)
        batch = concatenate(space, told, out)
        observations, rewards, terminated, truncated, infos = self._env.step(batch)
        self._ended = np.logical_or(terminated, truncated)
        found: list[Moment | None] = []
        for index, action in enumerate(actions):
            if action is None:
                found.append(None)
                continue
            row, info = self._row_of(observations, index), _row_info(infos, index, self.num_envs)
            if self._ended[index] and self._mode is AutoresetMode.SAME_STEP:
                # The row already shows the next episode; its own last words were put aside.
                row, info = info.get("final_obs", row), info.get("final_info", info)
            found.append(
                Moment(row, info, check_reward(rewards[index]), bool(terminated[index]), bool(truncated[index]))
            )
        return found

    def _row_of(self, observations: Any, index: int) -> Any:
        return _part_of(self._env.single_observation_space, observations, index)

    def row(self, index: int) -> gym.Env[Any, Any] | None:
        """The environment of a row, for a vector environment that keeps them in this process."""
        unwrapped = self._env.unwrapped
        return unwrapped.envs[index] if isinstance(unwrapped, SyncVectorEnv) else None

    @property
    def whole(self) -> VectorEnv[Any, Any, Any]:
        """The vector environment."""
        return self._env

    def close(self) -> None:
        """Close the vector environment."""
        self._env.close()


def _part_of(space: gym.Space[Any], batch: Any, index: int) -> Any:
    """One row of a batched value. Gymnasium's own ``iterate`` loses rows where a group of ``space`` is empty."""
    if isinstance(space, spaces.Dict):
        return {key: _part_of(sub, batch[key], index) for key, sub in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_part_of(sub, part, index) for sub, part in zip(space.spaces, batch, strict=True))
    return batch[index]


def _row_info(infos: Mapping[str, Any], index: int, count: int) -> dict[str, Any]:
    """The info of one row out of the vector's: entries whose mask leaves the row out are not there."""
    found: dict[str, Any] = {}
    for key, value in infos.items():
        if key.startswith("_") and key[1:] in infos:
            continue
        mask = infos.get("_" + key)
        if mask is not None and not mask[index]:
            continue
        if isinstance(value, Mapping):
            found[key] = _row_info(value, index, count)
        elif isinstance(value, np.ndarray | list | tuple) and len(value) == count:
            found[key] = value[index]
        else:
            found[key] = value
    return found


def _name_of(env: gym.Env[Any, Any]) -> str:
    return env.spec.id if env.spec is not None else type(env.unwrapped).__name__


def as_demo_environment(
    env: gym.Env[Any, Any] | VectorEnv[Any, Any, Any] | DemoEnvironment, capacity: int
) -> DemoEnvironment:
    """``env`` behind the common face; one that has it already is returned as it is."""
    if isinstance(env, DemoEnvironment):
        return env
    return VectorEnvironment(env, capacity) if isinstance(env, VectorEnv) else LoopEnvironment([env], capacity)


def make_environment(
    gym_config: Mapping[str, Any], capacity: int, action_config: Mapping[str, Any] | None = None
) -> DemoEnvironment:
    """The environment that ``gym_config`` describes (see :class:`EnvironmentSettings`).

    Args:
        gym_config: what to make.
        capacity: the longest episode, in steps; ``gym_config["max_episode_steps"]`` wins where given. The environment
            itself is told to truncate there, or at the limit it was registered with if that is lower and ``gym_config``
            has none: beyond their own limit, some environments raise.
        action_config: more keyword arguments for the environment.

    Raises:
        ConfigError: a bad setting, a missing extra, or the same keyword given twice.
        SchemaMismatchError: a space that cannot be recorded, with its path.
        Exception: whatever the environment's constructor raises.
    """
    settings = EnvironmentSettings.from_config(gym_config)
    capacity = settings.max_episode_steps or capacity
    doubled = sorted(set(settings.kwargs) & set(action_config or {}))
    if doubled:
        raise bad("action_config", doubled[0], "must not repeat a key of gym_config['kwargs']")
    kwargs = {**settings.kwargs, **(action_config or {})}
    _import_first(settings)
    if settings.tasks:
        from ods_async.worker.metaworld import TaskCycle

        cycles = [TaskCycle(settings.tasks, capacity, kwargs, offset=row) for row in range(settings.num_envs)]
        return LoopEnvironment(cycles, capacity, ", ".join(settings.tasks), settings)
    limit = _truncated_at(settings, capacity)
    if settings.vectorization == "loop":
        envs: list[gym.Env[Any, Any]] = []
        try:
            for _ in range(settings.num_envs):
                envs.append(  # noqa: PERF401 - what was made before an error must be closed
                    gym.make(settings.id, max_episode_steps=limit, disable_env_checker=True, **kwargs)
                )
            return LoopEnvironment(envs, capacity, settings.id, settings)
        except BaseException:
            for env in envs:
                env.close()
            raise
    if settings.vectorization == "async":
        from ods_async.worker.asynchronous import make_async

        return make_async(settings, capacity, limit, kwargs)
    return _make_vector(settings, capacity, limit, kwargs)


def _truncated_at(settings: EnvironmentSettings, capacity: int) -> int:
    """The step at which the environment is told to truncate."""
    module, _, name = settings.id.rpartition(":")
    if module:
        importlib.import_module(module)
    try:
        own = gym.spec(name).max_episode_steps
    except gym.error.Error:  # no such environment, or one without its version: making it tells more
        own = None
    return capacity if own is None or settings.max_episode_steps is not None else min(capacity, own)


def _make_vector(
    settings: EnvironmentSettings, capacity: int, limit: int, kwargs: Mapping[str, Any]
) -> VectorEnvironment:
    options: dict[str, Any] = {}
    if settings.vectorization != "vector_entry_point":
        options["vector_kwargs"] = {"autoreset_mode": AutoresetMode.DISABLED}
        kwargs = {"max_episode_steps": limit, "disable_env_checker": True, **kwargs}
    vector = gym.make_vec(
        settings.id, settings.num_envs, vectorization_mode=settings.vectorization, **options, **kwargs
    )
    try:
        return VectorEnvironment(vector, capacity, settings.id, settings)
    except BaseException:
        vector.close()
        raise


def _import_first(settings: EnvironmentSettings) -> None:
    names = list(settings.imports)
    namespace = settings.id.partition("/")[0]
    if "/" in settings.id and namespace in _NAMESPACES:
        names.append(_NAMESPACES[namespace])
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            remedy = f"pip install 'ods-async[{_EXTRAS[name]}]'" if name in _EXTRAS else "install it, or add its folder"
            raise bad(
                'gym_config["id"]', settings.id, f"needs the module {name}, which is not here: {remedy}"
            ) from error
