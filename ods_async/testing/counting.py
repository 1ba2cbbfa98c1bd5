"""A small environment that needs nothing, for tests and a first try: every step carries its episode's fingerprint.

``ods_async/Counting-v0`` makes its own plans, in named segments. An episode's fingerprint is drawn at reset; from it
follow the episode's length, and every value of every step (:func:`expected_state` and its sisters say which). So a
window that was torn, crossed or overwritten shows it: :func:`window_faults` looks.

The environment hands out the *same* observation arrays at every step, on purpose: who keeps one without copying it
will find the last step everywhere.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from ods_async.worker.plans import DemoSegment

__all__ = [
    "COUNTING_ID",
    "CountingEnv",
    "expected_action",
    "expected_image",
    "expected_length",
    "expected_state",
    "register",
    "window_faults",
]

COUNTING_ID: Final = "ods_async/Counting-v0"
_ENDS: Final = ("plan", "terminated", "truncated", "both")
_PHASES: Final = (None, "make", "reset", "plan", "step", "close")
_KINDS: Final = ("error", "failure", "nan", "inf", "shape", "exit", "kill", "hang")


class CountingError(RuntimeError):
    """What the environment raises where it was told to fail; not picklable, since it holds a generator."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.unpicklable = (number for number in (1, 2, 3))


def expected_length(fingerprint: int, min_length: int, max_length: int) -> int:
    """Length of the episode with that fingerprint."""
    return min_length + fingerprint % (max_length - min_length + 1)


def expected_state(fingerprint: Any, step: Any, width: int) -> NDArray[np.float32]:
    """``[..., width]`` float32, exact whole numbers, for fingerprints and steps of shape ``[...]``."""
    base = np.asarray(fingerprint, np.int64) % 65_521 + np.asarray(step, np.int64) * 7
    found: NDArray[np.float32] = ((base[..., None] + np.arange(width)) % 65_521).astype(np.float32)
    return found


def expected_action(fingerprint: Any, step: Any, width: int) -> NDArray[np.float32]:
    """``[..., width]`` float32 in [0, 1), exact eighths, for fingerprints and steps of shape ``[...]``."""
    base = np.asarray(fingerprint, np.int64) + np.asarray(step, np.int64)
    found: NDArray[np.float32] = ((base[..., None] + np.arange(width)) % 8 / 8).astype(np.float32)
    return found


def expected_image(fingerprint: Any, step: Any) -> NDArray[np.uint8]:
    """``[...]`` uint8: the one value of every pixel."""
    base = np.asarray(fingerprint, np.int64) + 3 * np.asarray(step, np.int64)
    found: NDArray[np.uint8] = (base % 251).astype(np.uint8)
    return found


class CountingEnv(gym.Env[dict[str, Any], NDArray[np.float32]]):
    """Counts its steps and shows the episode's fingerprint in everything.

    An action that is not the plan's is an error, until the episode is over.

    Observation: ``fingerprint`` and ``step`` (int64), ``state`` (float32 ``[width]``) and, with ``image_shape``,
    ``image`` (uint8). Action: float32 ``[action_width]``. Reward: the step.

    Args:
        min_length: shortest episode, in steps.
        max_length: longest episode, in steps.
        width: of ``state``.
        action_width: of the action.
        image_shape: of ``image``, or None for none.
        segments: parts of a plan, of lengths as equal as can be.
        step_delay: seconds that a step takes.
        reset_delay: seconds that a reset takes.
        end: "plan" (the plan is used up, no flag), "terminated", "truncated" or "both".
        report_success: say ``info["success"]`` at the last step.
        endless: go on as long as somebody asks (the caller's capacity cuts it).
        fail_phase: make, reset, plan, step or close: where to fail; None: nowhere.
        fail_step: at which step, for "step".
        fail_episode: from which episode on (counted from 0).
        fail_times: how often to fail; after that all is well.
        fail_kind: "error" raises an exception that cannot be pickled; "failure" reports ``info["failure"]``; "nan"
            puts NaN into the state; "inf" gives an infinite reward; "shape" returns a state of another shape; "exit"
            leaves the process with code 3; "kill" kills it; "hang" blocks for an hour.
        fail_marker: a file: fail only when it is missing, and make it (so that a restarted process does well).
        stderr_bytes: print so much to stderr before failing.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012 - gymnasium's own declaration

    def __init__(
        self,
        *,
        min_length: int = 5,
        max_length: int = 40,
        width: int = 6,
        action_width: int = 2,
        image_shape: tuple[int, ...] | list[int] | None = None,
        segments: int = 3,
        step_delay: float = 0.0,
        reset_delay: float = 0.0,
        end: str = "plan",
        report_success: bool = True,
        endless: bool = False,
        fail_phase: str | None = None,
        fail_step: int = 0,
        fail_episode: int = 0,
        fail_times: int = 1_000_000_000,
        fail_kind: str = "error",
        fail_marker: str | None = None,
        stderr_bytes: int = 0,
    ) -> None:
        if not 1 <= min_length <= max_length:
            raise ValueError(f"min_length={min_length} and max_length={max_length}: must be 1 <= min <= max")
        if end not in _ENDS or fail_phase not in _PHASES or fail_kind not in _KINDS:
            raise ValueError(f"end={end!r}, fail_phase={fail_phase!r}, fail_kind={fail_kind!r}: no such choice")
        self.min_length, self.max_length = min_length, max_length
        self.width, self.action_width, self.segments = width, action_width, segments
        self.step_delay, self.reset_delay = step_delay, reset_delay
        self.end, self.report_success, self.endless = end, report_success, endless
        self.fail_phase, self.fail_step, self.fail_episode = fail_phase, fail_step, fail_episode
        self.fail_kind, self.fail_marker, self.stderr_bytes = fail_kind, fail_marker, stderr_bytes
        self._failures_left = fail_times
        big = 2**62
        parts: dict[str, spaces.Space[Any]] = {
            "fingerprint": spaces.Box(0, big, (), np.int64),
            "step": spaces.Box(0, big, (), np.int64),
            "state": spaces.Box(0.0, 65_521.0, (width,), np.float32),
        }
        if image_shape is not None:
            parts["image"] = spaces.Box(0, 255, tuple(image_shape), np.uint8)
        self.observation_space = spaces.Dict(parts)
        self.action_space = spaces.Box(0.0, 1.0, (action_width,), np.float32)
        self.instruction = "count to the end"
        self._observation: dict[str, Any] = {
            key: np.zeros(space.shape or (), space.dtype) for key, space in parts.items()
        }
        self._episode, self._fingerprint, self._step, self._length = -1, 0, 0, 0
        self._fail_in("make")

    def _fail_in(self, phase: str) -> bool:
        """Fail if this is the place; True where the caller has to report the failure."""
        if phase != self.fail_phase or self._failures_left < 1:
            return False
        if phase in ("reset", "plan", "step") and self._episode < self.fail_episode:
            return False
        if phase == "step" and self._step != self.fail_step:
            return False
        if self.fail_marker is not None:
            marker = Path(self.fail_marker)
            if marker.exists():
                return False
            marker.touch()
        self._failures_left -= 1
        if self.stderr_bytes:
            sys.stderr.write("x" * self.stderr_bytes + "\n")
            sys.stderr.flush()
        if self.fail_kind == "exit":
            os._exit(3)
        if self.fail_kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fail_kind == "hang":
            time.sleep(3600)
        if self.fail_kind == "error":
            raise CountingError(f"told to fail in {phase} (step {self._step} of episode {self._episode})")
        return True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin an episode: draw its fingerprint, from which its length follows."""
        super().reset(seed=seed)
        if self.reset_delay:
            time.sleep(self.reset_delay)
        self._episode += 1
        self._step = 0
        self._fail_in("reset")
        self._fingerprint = int(self.np_random.integers(1, 2**62))
        self._length = expected_length(self._fingerprint, self.min_length, self.max_length)
        self._show()
        return self._observation, {}

    def step(self, action: NDArray[np.float32]) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        """Count one up."""
        if self.step_delay:
            time.sleep(self.step_delay)
        failing = self._fail_in("step")
        wanted = expected_action(self._fingerprint, self._step, self.action_width)
        over = self._step >= self._length and not self.endless  # in a vector, the others go on and take this one along
        if not over and (action.dtype != np.float32 or not np.array_equal(action, wanted)):
            raise ValueError(f"step {self._step}: told {action!r}, planned was {wanted!r}")
        action.fill(-1.0)  # who records the command must have copied it before
        reward = float(self._step)
        self._step += 1
        self._show()
        over = self._step >= self._length and not self.endless
        info: dict[str, Any] = {}
        if over and self.report_success:
            info["success"] = True
        if failing and self.fail_kind == "failure":
            info["failure"] = True
        elif failing and self.fail_kind == "nan":
            self._observation["state"][-1] = np.nan
        elif failing and self.fail_kind == "inf":
            reward = float("inf")
        elif failing:
            return {**self._observation, "state": np.zeros(self.width + 1, np.float32)}, reward, False, False, info
        terminated = over and self.end in ("terminated", "both")
        truncated = over and self.end in ("truncated", "both")
        return self._observation, reward, terminated, truncated, info

    def _show(self) -> None:
        self._observation["fingerprint"][...] = self._fingerprint
        self._observation["step"][...] = self._step
        self._observation["state"][...] = expected_state(self._fingerprint, self._step, self.width)
        if "image" in self._observation:
            self._observation["image"][...] = expected_image(self._fingerprint, self._step)

    def create_demo_segments(self) -> Iterator[DemoSegment]:
        """The plan: count to the end, in parts; each is planned when the one before is done."""
        self._fail_in("plan")
        bounds = np.linspace(0, self._length, self.segments + 1).astype(int)
        for index, (start, end) in enumerate(itertools.pairwise(bounds)):
            last = index == self.segments - 1
            yield DemoSegment(
                actions=self._actions(int(start), None if last and self.endless else int(end)),
                name=f"part {index}",
                instruction=f"count part {index}",
                target=f"{end}",
            )

    def _actions(self, start: int, end: int | None) -> Iterator[NDArray[np.float32]]:
        step = start
        while end is None or step < end:
            yield expected_action(self._fingerprint, step, self.action_width)
            step += 1

    def close(self) -> None:
        """Close; fails if told so."""
        self._fail_in("close")


def window_faults(window: Mapping[tuple[str, ...], Any]) -> str:
    """What is wrong with one window of steps of this environment; empty when it is one piece of one episode.

    Args:
        window: field path -> array ``[length, …]`` of real steps: ``("obs", "fingerprint")``, ``("obs", "step")``,
            ``("obs", "state")``, ``("actions",)``, ``("rewards",)`` and, where there is one, ``("obs", "image")``.
    """
    prints = np.asarray(window["obs", "fingerprint"])
    steps = np.asarray(window["obs", "step"])
    if not (prints == prints[0]).all():
        return f"fingerprints of several episodes: {np.unique(prints).tolist()}"
    if not (np.diff(steps) == 1).all():
        return f"steps are not consecutive: {steps.tolist()}"
    state = np.asarray(window["obs", "state"])
    if not np.array_equal(state, expected_state(prints, steps, state.shape[-1])):
        return "state belongs to other steps"
    actions = np.asarray(window[("actions",)])
    if not np.array_equal(actions, expected_action(prints, steps, actions.shape[-1])):
        return "actions belong to other steps"
    if not np.array_equal(np.asarray(window[("rewards",)]), steps.astype(np.float32)):
        return "rewards belong to other steps"
    if ("obs", "image") in window:
        image = np.asarray(window["obs", "image"]).reshape(len(steps), -1)
        if not (image == expected_image(prints, steps)[:, None]).all():
            return "image belongs to other steps"
    return ""


def register() -> None:
    """Make the environment known to gymnasium; doing it twice is harmless."""
    if COUNTING_ID not in gym.registry:
        gym.register(COUNTING_ID, entry_point="ods_async.testing.counting:CountingEnv")
