"""An environment that does what its script says, episode by episode: lengths, ends, texts, errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from ods_async.worker.plans import DemoSegment

SCRIPTED_ID = "ods_tests/Scripted-v0"
LIMITED_ID = "ods_tests/Limited-v0"  # the same, registered with a limit of 6 steps


class ScriptedEnv(gym.Env[Any, Any]):
    """Plays ``episodes`` in turn, one a reset, and stays with the last one.

    The observation is ``[number of the episode, steps so far]``, float32. An entry has any of: ``plan`` (actions in
    its plan; without it, no end), ``goal`` and ``limit`` (the flag is set after so many steps), ``raises`` (that
    step does), ``task`` (instruction), ``says`` (``[steps, instruction]`` of each segment), ``info`` (what is said
    after that number of steps), ``reward`` (of each step), ``marker`` (a file: raise only while it is missing;
    it is made then).
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium's own declaration

    def __init__(self, episodes: list[dict[str, Any]]) -> None:
        self.observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.action_space = spaces.Box(-9, 9, (1,), np.float32)
        self.episodes, self.number, self.steps = episodes, -1, 0

    @property
    def said(self) -> dict[str, Any]:
        return self.episodes[min(self.number, len(self.episodes) - 1)]

    @property
    def instruction(self) -> str | None:
        return self.said.get("task")

    def seen(self) -> Any:
        return np.array([self.number, self.steps], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.number, self.steps = self.number + 1, 0
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        said = self.said
        self.steps += 1
        if self.steps == said.get("raises") and _missing(said.get("marker")):
            raise ValueError(f"no step is allowed after step {self.steps - 1}, the limit of this simulator")
        goal, limit = self.steps == said.get("goal"), self.steps == said.get("limit")
        return self.seen(), said.get("reward", 1.0), goal, limit, said.get("info", {}).get(self.steps, {})

    def create_demo_segments(self) -> Iterator[DemoSegment]:
        action = np.zeros(1, np.float32)
        for index, (count, text) in enumerate(self.said.get("says", [])):
            yield DemoSegment([action] * count, f"part {index}", text)
        plan = self.said.get("plan")
        if plan is not None or "says" not in self.said:
            yield DemoSegment(itertools.repeat(action) if plan is None else [action] * plan, "all")


def _missing(marker: str | None) -> bool:
    if marker is None:
        return True
    missing = not Path(marker).exists()
    Path(marker).touch()
    return missing


def register() -> None:
    """Make both ids known here; in a process of its own, name this module in ``gym_config["imports"]``."""
    for name, limit in ((SCRIPTED_ID, None), (LIMITED_ID, 6)):
        if name not in gym.registry:
            gym.register(name, entry_point=f"{__name__}:ScriptedEnv", max_episode_steps=limit)


register()
