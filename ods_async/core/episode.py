"""An episode and its segments, and the rollout that hands several episodes in together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ods_async.core.schema import RECORDED, EpisodeSchema, FieldSpec, Path, path_text
from ods_async.errors import SchemaMismatchError

__all__ = ["Array", "Episode", "Rollout", "Segment", "recorded_schema"]

Array = NDArray[np.generic]


@dataclass(frozen=True, slots=True)
class Segment:
    """A named part of one episode: steps ``start <= t < end``.

    ``accepted`` says that its validator was content. ``target`` is free text for people (which object, which goal).
    """

    name: str
    start: int
    end: int
    instruction: str | None = None
    accepted: bool = True
    target: str | None = None


@dataclass(frozen=True, slots=True)
class Episode:
    """One finished demonstration.

    Attributes:
        length: number of steps, at least 1.
        arrays: field path -> array ``[length, *field.shape]`` for every recorded field (the schema's fields without
            the broker's annotations).
        segments: in order of time, half-open, not overlapping, inside ``0 … length``.
        instruction: what the episode does as a whole, or None.
        metadata: small facts for people; plain values only.
    """

    length: int
    arrays: Mapping[Path, Array]
    segments: tuple[Segment, ...] = ()
    instruction: str | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)

    def check(self, schema: EpisodeSchema, capacity: int) -> None:
        """Refuse anything that does not fit ``schema`` and rows of ``capacity`` steps; nothing is cast or clipped.

        Raises:
            SchemaMismatchError: naming the field, what was expected and what was found.
        """
        if not 1 <= self.length <= capacity:
            raise SchemaMismatchError(
                f"an episode of {self.length} steps does not fit rows of 1 to {capacity} steps; let the environment "
                f"truncate at {capacity}, or raise max_episode_steps",
                field="length",
                expected=f"1 to {capacity}",
                found=str(self.length),
            )
        known = {spec.path for spec in schema}
        for path in self.arrays:
            if path not in known:
                raise _mismatch(path, "no such field", "a field that the schema does not have")
        for spec in schema:
            array = self.arrays.get(spec.path)
            if array is None:
                raise _mismatch(spec.path, spec.text, "nothing")
            if array.dtype != np.dtype(spec.dtype) or array.shape[1:] != spec.shape:
                found = f"{array.dtype} {list(array.shape[1:])}"
                raise _mismatch(spec.path, f"{spec.dtype} {list(spec.shape)} per step", found)
            if array.shape[0] != self.length:
                raise _mismatch(spec.path, f"{self.length} steps", f"{array.shape[0]} steps")
        self._check_segments()

    def _check_segments(self) -> None:
        free_from = 0
        for segment in self.segments:
            if not 0 <= segment.start <= segment.end <= self.length:
                raise SchemaMismatchError(
                    f"segment {segment.name!r} spans [{segment.start}, {segment.end}), outside an episode of "
                    f"{self.length} steps",
                    field="segments",
                    expected=f"0 <= start <= end <= {self.length}",
                    found=f"[{segment.start}, {segment.end})",
                )
            if segment.start == segment.end:
                continue
            if segment.start < free_from:
                raise SchemaMismatchError(
                    f"segment {segment.name!r} begins at step {segment.start}, inside the one before it, which ends "
                    f"at {free_from}; segments follow each other in time",
                    field="segments",
                    expected=f"start >= {free_from}",
                    found=str(segment.start),
                )
            free_from = segment.end


@dataclass(frozen=True, slots=True)
class Rollout:
    """Episodes made together by one worker for one ticket; published together or not at all."""

    ticket_id: int
    worker_id: str
    episodes: tuple[Episode, ...]
    attempts: int = 1
    production_seconds: float = 0.0

    @property
    def steps(self) -> int:
        """Steps of all episodes together."""
        return sum(episode.length for episode in self.episodes)


def _mismatch(path: Path, expected: str, found: str) -> SchemaMismatchError:
    name = path_text(path)
    return SchemaMismatchError(
        f"field {name}: expected {expected}, found {found}; nothing is cast or broadcast, so the environment must "
        "return the same fields, dtypes and shapes in every episode",
        field=name,
        expected=expected,
        found=found,
    )


def recorded_schema(env_fields: tuple[FieldSpec, ...]) -> EpisodeSchema:
    """The schema of what a worker hands in: the environment's own fields and the recorded ones."""
    return EpisodeSchema(env_fields + RECORDED)
