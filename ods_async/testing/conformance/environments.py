"""Environments for the suite: episodes whose every annotation follows from their fingerprint, spaces of every kind.

Named in ``gym_config`` by their ids, with this module under ``imports``.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from ods_async.testing.counting import expected_action, expected_state
from ods_async.worker.plans import DemoSegment

__all__ = [
    "CONTRACTS",
    "CONTRACTS_ID",
    "MODULE",
    "SPACES_ID",
    "VARIED_ID",
    "ContractsEnv",
    "Part",
    "SpacesEnv",
    "Story",
    "VariedEnv",
    "samples_of",
    "story_of",
]

MODULE: Final = "ods_async.testing.conformance.environments"
VARIED_ID: Final = "ods_async_conformance/Varied-v0"
SPACES_ID: Final = "ods_async_conformance/Spaces-v0"
CONTRACTS_ID: Final = "ods_async_conformance/Contracts-v0"
CONTRACTS: Final = ("arm.delta.v1", "grip.v2")
WIDTH, ACTION_WIDTH = 5, 3


@dataclass(frozen=True, slots=True)
class Part:
    """A segment of a story."""

    start: int
    end: int
    instruction: str | None
    accepted: bool


@dataclass(frozen=True, slots=True)
class Story:
    """All that is known of an episode from its fingerprint: one value a step, lists of ``length``."""

    length: int
    capacity: int
    end: str  # plan, terminated, truncated, both
    task: str | None
    parts: tuple[Part, ...]
    continuity: tuple[int, ...]

    def part_of(self, step: int) -> int:
        """Index of the segment that holds ``step``."""
        return next(index for index, part in enumerate(self.parts) if part.start <= step < part.end)

    def annotations(self, step: int) -> dict[str, Any]:
        """The annotations of one step."""
        index = self.part_of(step)
        part, last = self.parts[index], step == self.length - 1
        return {
            "valid": True,
            "terminated": last and self.end in ("terminated", "both"),
            "truncated": last and (self.end in ("truncated", "both") or self.length == self.capacity),
            "episode_step": step,
            "segment_id": index,
            "segment_step": step - part.start,
            "segment_start": step == part.start,
            "segment_end": step == part.end - 1,
            "segment_accepted": part.accepted,
            "continuity_id": self.continuity[step],
        }

    def texts(self, step: int) -> tuple[str, str]:
        """Task and subtask of one step."""
        task = self.task if self.task is not None else "unknown_task"
        said = self.parts[self.part_of(step)].instruction
        return task, said if said is not None else task


def story_of(fingerprint: int, min_length: int, max_length: int) -> Story:
    """The story of the episode with that fingerprint, ``min_length`` to ``max_length`` (the row's capacity) steps."""
    rng = np.random.default_rng(fingerprint)
    length = int(rng.integers(min_length, max_length + 1))
    cuts = sorted({0, length, *rng.integers(0, length + 1, 3).tolist()})
    parts = tuple(
        Part(start, end, (None, f"reach for {index}", "grasp ☕")[int(rng.integers(3))], bool(rng.random() < 0.7))
        for index, (start, end) in enumerate(itertools.pairwise(cuts))
    )
    continuity, at = [], 0
    for _ in range(length):
        at += int(rng.random() < 0.15)
        continuity.append(at)
    if rng.random() < 0.25:
        lost = int(rng.integers(length))
        continuity[lost] = -1
    end = ("plan", "terminated", "truncated", "both")[int(rng.integers(4))]
    task = (None, "stack the cups", "stack  the cups ", "räume auf")[int(rng.integers(4))]
    return Story(length, max_length, end, task, parts, tuple(continuity))


class VariedEnv(gym.Env[dict[str, Any], Any]):
    """Tells the story of its fingerprint: lengths, segments (some not accepted), jumps in time, ends of all kinds.

    Observation: ``fingerprint``, ``step`` (int64), ``state`` (float32 ``[5]``); values as in ``ods_async/Counting-v0``.
    Every ``fail_every``-th attempt fails (0: none does), which must never show.

    Args:
        min_length: shortest episode, in steps.
        max_length: longest episode, in steps.
        fail_every: which attempts fail.
        delay: seconds that a step takes.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium's own declaration

    def __init__(self, *, min_length: int = 3, max_length: int = 11, fail_every: int = 0, delay: float = 0.0) -> None:
        self.min_length, self.max_length, self.fail_every, self.delay = min_length, max_length, fail_every, delay
        big = 2**62
        self.observation_space = spaces.Dict(
            {
                "fingerprint": spaces.Box(0, big, (), np.int64),
                "step": spaces.Box(0, big, (), np.int64),
                "state": spaces.Box(0.0, 65_521.0, (WIDTH,), np.float32),
            }
        )
        self.action_space = spaces.Box(0.0, 1.0, (ACTION_WIDTH,), np.float32)
        self.instruction: str | None = None
        self._attempts = 0
        self._fingerprint, self._step = 0, 0
        self._story = story_of(0, min_length, max_length)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin a story."""
        super().reset(seed=seed)
        self._attempts += 1
        self._fingerprint, self._step = int(self.np_random.integers(1, 2**62)), 0
        self._story = story_of(self._fingerprint, self.min_length, self.max_length)
        self.instruction = self._story.task
        return self._seen(), self._told()

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Go on with it."""
        wanted = expected_action(self._fingerprint, self._step, ACTION_WIDTH)
        if not np.array_equal(action, wanted):
            raise ValueError(f"step {self._step}: told {action!r}, planned was {wanted!r}")
        if self.delay:
            time.sleep(self.delay)
        reward = float(self._step)
        self._step += 1
        over = self._step >= self._story.length
        info = self._told()
        if over and self.fail_every and self._attempts % self.fail_every == 0:
            info["failure"] = True
        end = self._story.end
        return self._seen(), reward, over and end in ("terminated", "both"), over and end in ("truncated", "both"), info

    def create_demo_segments(self) -> Iterator[DemoSegment]:
        """The plan."""
        for index, part in enumerate(self._story.parts):
            yield DemoSegment(
                actions=lambda part=part: (
                    expected_action(self._fingerprint, step, ACTION_WIDTH) for step in range(part.start, part.end)
                ),
                name=f"part {index}",
                instruction=part.instruction,
                validator=lambda part=part: part.accepted,
            )

    def _seen(self) -> dict[str, Any]:
        return {
            "fingerprint": np.int64(self._fingerprint),
            "step": np.int64(self._step),
            "state": expected_state(self._fingerprint, self._step, WIDTH),
        }

    def _told(self) -> dict[str, Any]:
        here = self._step if self._step < self._story.length else -1
        return {"continuity_id": self._story.continuity[here]}


_BOXES: Final = (
    "bool_",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)


def _box(name: str) -> spaces.Box:
    kind = np.dtype(name.rstrip("_"))
    if kind.kind == "b":
        return spaces.Box(0, 1, (2,), np.bool_)  # type: ignore[arg-type]
    if kind.kind == "f":
        return spaces.Box(-4.0, 4.0, (2, 3), kind.type)
    info = np.iinfo(kind)
    return spaces.Box(info.min, info.max, (2,), kind.type)


def _many() -> spaces.Dict:
    return spaces.Dict(
        {
            **{f"box_{name.rstrip('_')}": _box(name) for name in _BOXES},
            "depth": spaces.Box(0, 65_535, (4, 6), np.uint16),
            "scalar": spaces.Box(-1.0, 1.0, (), np.float64),
            "nothing": spaces.Box(-1.0, 1.0, (0, 3), np.float32),
            "choice": spaces.Discrete(7, start=-3),
            "switches": spaces.MultiBinary((2, 3)),
            "choices": spaces.MultiDiscrete([3, 5, 7]),
            "a.b": spaces.Discrete(5),
            "a": spaces.Dict({"b": spaces.Box(0, 9, (3,), np.int32)}),
            "pair": spaces.Tuple(
                (spaces.Discrete(2), spaces.Dict({"in": spaces.Box(-1.0, 1.0, (2,), np.float32)}), spaces.Tuple(()))
            ),
        }
    )


def samples_of(seed: int, count: int) -> list[Any]:
    """The first ``count`` observations of an episode of :class:`SpacesEnv` begun with that seed."""
    space = _many()
    space.seed(seed)
    return [space.sample() for _ in range(count)]


class SpacesEnv(gym.Env[Any, Any]):
    """Observations and actions of every space that can be stored, or one that cannot (``refuse``).

    ``("obs", "seed")`` tells which samples an episode shows: :func:`samples_of`.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium's own declaration

    def __init__(self, *, length: int = 6, refuse: str | None = None) -> None:
        self.length = length
        inner: dict[str, spaces.Space[Any]] = {**_many().spaces, "seed": spaces.Box(0, 2**31, (), np.int64)}
        bad: dict[str, spaces.Space[Any]] = {
            "text": spaces.Text(8),
            "sequence": spaces.Sequence(spaces.Discrete(2)),
            "graph": spaces.Graph(spaces.Discrete(2), None),
            "oneof": spaces.OneOf((spaces.Discrete(2), spaces.Discrete(3))),
        }
        if refuse is not None:
            inner["outer"] = spaces.Dict({"deep": spaces.Tuple((spaces.Discrete(2), bad[refuse]))})
        self.observation_space = spaces.Dict(inner)
        self.action_space = spaces.Dict({"arm": spaces.Box(-1.0, 1.0, (3,), np.float32), "grip": spaces.Discrete(2)})
        self._rest: list[Any] = []
        self._seed = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        self._seed = int(self.np_random.integers(2**31))
        self._rest = samples_of(self._seed, self.length + 1)
        return self._next(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One sample further."""
        return self._next(), 0.5, False, False, {}

    def create_demo_segments(self) -> list[DemoSegment]:
        """The plan: one segment, which is never accepted."""
        actions = [{"arm": [step / 8, 0.25, -0.5], "grip": step % 2} for step in range(self.length)]
        return [DemoSegment(actions, "only", validator=lambda: False)]

    def _next(self) -> Any:
        return {**self._rest.pop(0), "seed": np.int64(self._seed)}


class ContractsEnv(gym.Env[Any, Any]):
    """Records raw policy requests of two terms, three and two values wide.

    Args:
        semantics: what it says that it records.
        flaw: None, "order", "gap", "width", "joints", or "ids": what is wrong with it.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium's own declaration

    def __init__(self, *, semantics: str = "policy_request", flaw: str | None = None) -> None:
        self.observation_space = spaces.Dict({"qpos": spaces.Box(-1, 1, (4,), np.float32)})
        self.action_space = spaces.Box(-9.0, 9.0, (5,), np.float32)
        self.rollout_action_semantics = semantics
        self.robot = SimpleNamespace(joint_names=["base", "elbow", "wrist"])
        ids = ("other.v9", CONTRACTS[1]) if flaw == "ids" else CONTRACTS[:: -1 if flaw == "order" else 1]
        arm = SimpleNamespace(
            contract=ids[0], action_dim=2 if flaw == "width" else 3, joint_names=("elbow", "base", "wrist")
        )
        grip = SimpleNamespace(contract=ids[1], action_dim=2, joint_names=())
        start = 4 if flaw == "gap" else 3
        terms = {
            "arm": SimpleNamespace(
                command_type="qpos", controlled_joint_ids=[0, 1, 2] if flaw == "joints" else [1, 0, 2]
            ),
            "grip": SimpleNamespace(command_type="binary"),
        }
        self.action_manager = SimpleNamespace(
            descriptors=[
                SimpleNamespace(name="arm", start=0, stop=3, term=arm),
                SimpleNamespace(name="grip", start=start, stop=5, term=grip),
            ],
            total_action_dim=5,
            get_term=terms.__getitem__,
        )

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode."""
        super().reset(seed=seed)
        return {"qpos": np.zeros(4, np.float32)}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """What was asked for is seen at once."""
        return {"qpos": np.asarray(action[:4], np.float32) / 9}, 0.0, False, False, {}

    def create_demo_action_list(self) -> list[list[float]]:
        """Requests beyond what any controller would be told: they are kept as they are."""
        return [[8.5, -8.25, 0.125 * step, 3.0, -3.0] for step in range(4)]


for _id, _name in ((VARIED_ID, "VariedEnv"), (SPACES_ID, "SpacesEnv"), (CONTRACTS_ID, "ContractsEnv")):
    if _id not in gym.registry:
        gym.register(_id, entry_point=f"{MODULE}:{_name}")
