"""Scripted Meta-World experts as demonstrations in named segments (the extra ``metaworld``).

``{"id": "Meta-World/MT1", "kwargs": {"env_name": "reach-v3"}, "policy": "ods_async.worker.metaworld:expert"}`` makes
episodes of one task, ``{"id": "Meta-World/MT1", "tasks": ["reach-v3", "push-v3"], …}`` of several in turn. Success is
Meta-World's own ``info["success"]``; an episode goes on for a few steps after it, so that the goal is seen held.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ods_async.config.rules import bad
from ods_async.worker.plans import DemoSegment, DemoView

try:
    from metaworld.env_dict import ALL_V3_ENVIRONMENTS
    from metaworld.policies import ENV_POLICY_MAP
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "metaworld":
        raise
    rule = "is for Meta-World, whose module metaworld is not here: pip install 'ods-async[metaworld]'"
    raise bad("gym_config", __name__, rule) from error

__all__ = ["TaskCycle", "expert"]

_Observation = NDArray[np.float64]
# The scripted experts take hold of an object this far from its centre (x, y in metres).
_GRIP_OFFSET: Final = np.array([-0.005, 0.0])


@dataclass(frozen=True, slots=True)
class _Phase:
    """A stretch of a task: it lasts until ``over`` holds of an observation (or for ever)."""

    name: str
    instruction: str
    over: Callable[[_Observation], bool] = lambda observation: False


def _above(observation: _Observation) -> bool:
    """The hand is over the object, within the 2 cm at which the scripted experts begin to go down."""
    return bool(np.linalg.norm(observation[:2] - observation[4:6] - _GRIP_OFFSET) <= 0.02)


def _down(observation: _Observation) -> bool:
    return _above(observation) and bool(abs(observation[2] - observation[6]) <= 0.05)


def _held(observation: _Observation) -> bool:
    return _down(observation) and bool(observation[3] <= 0.73)


@dataclass(frozen=True, slots=True)
class _Task:
    instruction: str
    phases: tuple[_Phase, ...]


_TASKS: Final[Mapping[str, _Task]] = {
    "reach-v3": _Task("reach the goal", (_Phase("reach", "move the hand to the goal"),)),
    "push-v3": _Task(
        "push the puck to the goal",
        (
            _Phase("approach", "move the hand above the puck", _above),
            _Phase("descend", "lower the hand onto the puck", _down),
            _Phase("push", "push the puck to the goal"),
        ),
    ),
    "pick-place-v3": _Task(
        "pick up the puck and place it at the goal",
        (
            _Phase("reach", "move the hand above the puck", _above),
            _Phase("descend", "lower the hand around the puck", _down),
            _Phase("grasp", "close the gripper around the puck", _held),
            _Phase("place", "carry the puck to the goal"),
        ),
    ),
}


def _task(name: str) -> _Task:
    words = name.rsplit("-v", 1)[0].replace("-", " ")
    return _TASKS.get(name) or _Task(words, (_Phase("perform", words),))


def _task_name(env: Any) -> str:
    """The task that the row's environment is playing now."""
    if env is None:
        raise bad(
            'gym_config["vectorization"]',
            "async",
            "must keep the environments in the worker's process for a scripted expert: use 'loop' or 'sync'",
        )
    if isinstance(env.unwrapped, TaskCycle):
        return env.unwrapped.playing
    kind = type(env.unwrapped)
    for name, cls in ALL_V3_ENVIRONMENTS.items():
        if cls is kind:
            return str(name)
    raise bad('gym_config["id"]', kind.__name__, "must be a Meta-World environment for this expert")


def expert(view: DemoView, *, settle: int = 4, noise: float = 0.0) -> Iterator[DemoSegment]:
    """Meta-World's scripted expert for the task of ``view.env``, in segments by what it is doing.

    Args:
        view: the row to play.
        settle: steps with success in a row after which the episode ends.
        noise: standard deviation of Gaussian noise on the commanded motion, for more varied episodes.
    """
    name = _task_name(view.env)
    task = _task(name)
    policy: Any = ENV_POLICY_MAP[name]()  # type: ignore[abstract]
    view.instruction = view.instruction or task.instruction
    view.metadata["task"] = name
    good = 0

    def act(phase: _Phase) -> Iterator[NDArray[np.float32]]:
        nonlocal good
        while good < settle and not phase.over(view.observation):
            with warnings.catch_warnings():
                # "Environments clip response to [-1, 1]": done here, so that the recorded command is the one obeyed.
                warnings.simplefilter("ignore")
                action = np.asarray(policy.get_action(view.observation), np.float32)
            if noise:
                action[:3] += view.rng.normal(0.0, noise, 3).astype(np.float32)
            yield np.clip(action, -1.0, 1.0)
            good = good + 1 if view.info.get("success") else 0

    for phase in task.phases:
        if good >= settle:
            return
        if phase is task.phases[-1] or not phase.over(view.observation):
            yield DemoSegment(
                actions=partial(act, phase),
                name=phase.name,
                instruction=phase.instruction,
                target=name,
            )


class TaskCycle(gym.Env[_Observation, NDArray[np.float32]]):
    """Several Meta-World tasks behind one environment; each episode plays the next one.

    The observation is Meta-World's 39 float64, the same for every task; bounds are left open, as tasks differ in them.

    Args:
        tasks: names such as "reach-v3".
        capacity: the longest episode, in steps.
        kwargs: for ``Meta-World/MT1``.
        offset: which task is first, so that several rows do not play the same one at the same time.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium's own declaration

    def __init__(
        self, tasks: Sequence[str], capacity: int, kwargs: Mapping[str, Any] | None = None, offset: int = 0
    ) -> None:
        for name in tasks:
            if name not in ENV_POLICY_MAP:
                raise bad('gym_config["tasks"]', name, f"must be Meta-World tasks: {', '.join(ENV_POLICY_MAP)}")
        self._tasks = tuple(tasks)
        self._offset = offset
        self._envs: dict[str, gym.Env[Any, Any]] = {}
        try:
            for name in dict.fromkeys(tasks):
                self._envs[name] = gym.make(
                    "Meta-World/MT1",
                    max_episode_steps=capacity,
                    disable_env_checker=True,
                    **{**(kwargs or {}), "env_name": name},
                )
        except BaseException:
            self.close()
            raise
        self.playing = self._tasks[offset % len(self._tasks)]
        first = self._envs[self._tasks[0]]
        shape = first.observation_space.shape
        assert shape is not None
        self.observation_space = spaces.Box(-np.inf, np.inf, shape, np.float64)
        self.action_space = first.action_space

    def begin_demo_episode(self, episode_index: int) -> None:
        """Choose the task of the next episode; all tries of one episode play the same task."""
        self.playing = self._tasks[(episode_index + self._offset) % len(self._tasks)]

    def seed(self, seed: int) -> list[int]:
        """Meta-World draws goals from a generator that only this method seeds; ``reset(seed=)`` does nothing."""
        found: list[int] = self._envs[self.playing].unwrapped.seed(seed)  # type: ignore[attr-defined]
        return found

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[_Observation, dict[str, Any]]:
        """Begin an episode of the chosen task."""
        return self._envs[self.playing].reset(seed=seed, options=options)

    def step(self, action: NDArray[np.float32]) -> tuple[_Observation, float, bool, bool, dict[str, Any]]:
        """One step of the chosen task."""
        observation, reward, terminated, truncated, info = self._envs[self.playing].step(action)
        return observation, float(reward), terminated, truncated, info

    def close(self) -> None:
        """Close every task's environment."""
        for env in self._envs.values():
            env.close()
