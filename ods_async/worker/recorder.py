"""Keeps what happens in every row, step by step, in memory that is reused from one episode to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ods_async.core.episode import Array, recorded_schema
from ods_async.core.schema import Path, path_text
from ods_async.errors import SchemaMismatchError
from ods_async.worker.spaces import SpaceCodec

__all__ = ["Moment", "Recorder", "check_reward"]

_REWARDS, _TERMINATED, _TRUNCATED, _CONTINUITY = ("rewards",), ("terminated",), ("truncated",), ("continuity_id",)


@dataclass(frozen=True, slots=True)
class Moment:
    """What a row's environment said last. ``observation`` is the environment's own object: read it before it steps."""

    observation: Any
    info: Mapping[str, Any]
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False


class Recorder:
    """Arrays ``[capacity, *shape]`` for every field of every row.

    A step holds what was seen *before* the action, the action as the environment was told it, and what followed: reward
    (float32), flags, and the next observation where that is recorded. Everything is copied when it is seen: an
    environment may hand out one array again and again.
    """

    def __init__(
        self,
        observations: SpaceCodec,
        actions: SpaceCodec,
        following: SpaceCodec | None,
        num_envs: int,
        capacity: int,
    ) -> None:
        self._observations = observations
        self._actions = actions
        self._next = following
        fields = observations.fields + (following.fields if following else ()) + actions.fields
        self.schema = recorded_schema(fields)
        self._rows: list[dict[Path, Array]] = [
            {spec.path: np.empty((capacity, *spec.shape), spec.dtype) for spec in self.schema} for _ in range(num_envs)
        ]

    def before(self, row: int, step: int, observation: Any, action: Any, info: Mapping[str, Any]) -> None:
        """Record what was seen and what was told.

        ``info["continuity_id"]``, where the environment gives one, names the stretch of uninterrupted time that the
        observation belongs to (negative: none); it is 0 otherwise.

        Raises:
            SchemaMismatchError: something does not fit its space.
        """
        arrays = self._rows[row]
        self._observations.write(observation, arrays, step)
        self._actions.write(action, arrays, step)
        arrays[_CONTINUITY][step] = int(info.get("continuity_id", 0))

    def after(self, row: int, step: int, moment: Moment, truncated: bool) -> None:
        """Record what followed.

        Raises:
            SchemaMismatchError: the next observation does not fit its space.
        """
        arrays = self._rows[row]
        with np.errstate(over="ignore"):  # beyond float32 it becomes infinite, which is looked for at the end
            arrays[_REWARDS][step] = moment.reward
        arrays[_TERMINATED][step] = moment.terminated
        arrays[_TRUNCATED][step] = truncated
        if self._next is not None:
            self._next.write(moment.observation, arrays, step)

    def nonfinite(self, row: int, length: int) -> str:
        """The first field with NaN or infinity and the step where it is, in words; empty when all is finite."""
        for path, array in self._rows[row].items():
            if array.dtype.kind != "f":
                continue
            fine = np.isfinite(array[:length]).reshape(length, -1).all(axis=1)
            if not fine.all():
                return f"{path_text(path)} at step {int(np.argmin(fine))}"
        return ""

    def taken(self, row: int, length: int) -> dict[Path, Array]:
        """Copies of the first ``length`` steps."""
        return {path: array[:length].copy() for path, array in self._rows[row].items()}


def check_reward(reward: Any) -> float:
    """A reward as one number that float32 can hold: floats are rounded to it, whole numbers must be held exactly.

    Raises:
        SchemaMismatchError: it is none.
    """
    try:
        array = np.asarray(reward)
    except Exception as error:  # a tensor that numpy cannot read: everyone has errors of their own
        raise _bad_reward(f"a {type(reward).__name__}, which is no number: {error}") from error
    if array.shape != () or array.dtype.kind not in "biuf":
        raise _bad_reward(f"{array.dtype} {list(array.shape)}")
    if array.dtype.kind in "iu" and int(np.float32(array)) != int(array):
        raise _bad_reward(f"{array.dtype} {array}, which float32 cannot hold exactly")
    return float(array)


def _bad_reward(found: str) -> SchemaMismatchError:
    return SchemaMismatchError(
        f"rewards: expected one number a step, as float32, found {found}; let the environment return a scalar",
        field="rewards",
        expected="one number, as float32",
        found=found,
    )
