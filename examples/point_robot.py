"""A point robot and its expert: the environment that ``04_your_own_environment.py`` streams from.

Importing this module registers it, so workers find it under ``"point_robot:examples/PointRobot-v0"``.
"""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import ods_async as ods


class PointRobot(gym.Env):
    """A point that is to visit a via point and then the goal."""

    observation_space = spaces.Dict(
        {"position": spaces.Box(-2, 2, (2,), np.float32), "goal": spaces.Box(-1, 1, (2,), np.float32)}
    )
    action_space = spaces.Box(-0.1, 0.1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None):
        super().reset(seed=seed)
        self.position = np.zeros(2, np.float32)
        self.via, self.goal = self.np_random.uniform(-1, 1, (2, 2)).astype(np.float32)
        return self._observe(), {}

    def step(self, action):
        self.position = self.position + np.clip(action, -0.1, 0.1).astype(np.float32)
        distance = float(np.linalg.norm(self.position - self.goal))
        return self._observe(), -distance, False, False, {}

    def _observe(self):
        return {"position": self.position, "goal": self.goal}

    def _go_to(self, target: np.ndarray) -> Iterator[np.ndarray]:
        while np.linalg.norm(self.position - target) > 0.02:
            yield np.clip(target - self.position, -0.1, 0.1)

    def create_demo_segments(self) -> list[ods.DemoSegment]:
        return [
            ods.DemoSegment(lambda: self._go_to(self.via), "detour", instruction="move to the via point"),
            ods.DemoSegment(
                lambda: self._go_to(self.goal),
                "approach",
                instruction="move to the goal",
                validator=lambda *_: bool(np.linalg.norm(self.position - self.goal) < 0.05),
            ),
        ]


gym.register("examples/PointRobot-v0", entry_point="point_robot:PointRobot")
