"""Writing a finished episode into its row, with everything that is derived from it.

A row is always written whole: behind the episode's length every field gets its padding, so nothing of the previous
occupant is left.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ods_async.core.episode import Episode
from ods_async.core.schema import ANNOTATIONS, PROVENANCE, RECORDED, Path, path_text
from ods_async.core.stimuli import WriteRollout
from ods_async.core.windows import RowRuns, runs_of

__all__ = ["annotations_of", "runs_of_episode", "write_episode", "write_rollout"]

STANDARD_PADS: Final[Mapping[Path, int]] = {
    field.path: field.pad for field in RECORDED + ANNOTATIONS + PROVENANCE if field.pad
}
"""What lies behind an episode's end where that is not zero (B16)."""


def annotations_of(episode: Episode) -> dict[Path, NDArray[Any]]:
    """What follows from the length and the segments, each ``[length]``.

    ``segment_id`` is the segment's place in ``episode.segments``, ``segment_step`` counts inside it, ``segment_start``
    and ``segment_end`` mark its first and last step. Outside segments the ids are -1 and the flags False. A segment
    without steps marks nothing.
    """
    length = episode.length
    steps = np.arange(length, dtype=np.int64)
    segment_id = np.full(length, -1, np.int64)
    segment_step = np.full(length, -1, np.int64)
    first, last, accepted = (np.zeros(length, np.bool_) for _ in range(3))
    for number, segment in enumerate(episode.segments):
        start, end = segment.start, segment.end
        if start == end:
            continue
        segment_id[start:end] = number
        segment_step[start:end] = steps[: end - start]
        first[start] = True
        last[end - 1] = True
        accepted[start:end] = segment.accepted
    return {
        ("valid",): np.ones(length, np.bool_),
        ("episode_step",): steps,
        ("segment_id",): segment_id,
        ("segment_step",): segment_step,
        ("segment_start",): first,
        ("segment_end",): last,
        ("segment_accepted",): accepted,
    }


def runs_of_episode(episode: Episode) -> RowRuns:
    """The runs of the row that will hold this episode."""
    return _runs_of(episode, annotations_of(episode))


def _runs_of(episode: Episode, notes: Mapping[Path, NDArray[Any]]) -> RowRuns:
    continuity: NDArray[Any] = episode.arrays["continuity_id",]
    return runs_of(notes["valid",], continuity, notes["segment_id",], notes["segment_accepted",])


def write_episode(
    arrays: Mapping[Path, NDArray[Any]],
    row: int,
    episode: Episode,
    task_index: int,
    subtask_indices: Sequence[int],
    provenance: tuple[int, int, int, int, int] | None,
    pads: Mapping[Path, int] = STANDARD_PADS,
) -> RowRuns:
    """Write a checked episode into its row; the runs that windows of this row may lie in.

    Args:
        arrays: path -> ``[rows, steps, *shape]``, writable: every field of the buffer.
        row: where to.
        episode: what, already held against the schema with :meth:`Episode.check`.
        task_index: the episode's entry in the dictionary of tasks.
        subtask_indices: entries in the dictionary of subtasks, one per segment of the episode (those without steps
            too), and last the one for steps outside segments.
        provenance: ``(run_id, episode_id, generation, accepted_at_ns, published_monotonic_ns)``, or None.
        pads: path -> what goes behind the episode's end; zero where a path is missing.

    Raises:
        ValueError: a field of the buffer for which the episode holds nothing, or a wrong number of subtasks.
    """
    length = episode.length
    if len(subtask_indices) != len(episode.segments) + 1:
        raise ValueError(f"{len(subtask_indices)} subtasks for {len(episode.segments)} segments and the steps outside")
    notes = annotations_of(episode)
    derived: dict[Path, NDArray[Any] | int] = dict(notes)
    derived["task_index",] = task_index
    # -1 outside segments picks the last entry, the one for these steps
    derived["subtask_index",] = np.asarray(subtask_indices, np.int64)[notes["segment_id",]]
    if provenance is not None:
        run_id, episode_id, generation, accepted_at, published_at = provenance
        stamped = (run_id, episode_id, generation, notes["episode_step",], accepted_at, published_at)
        derived.update(zip((field.path for field in PROVENANCE), stamped, strict=True))
    for path, array in arrays.items():
        value = derived.get(path)
        if value is None:
            value = episode.arrays.get(path)
        if value is None:
            raise ValueError(f"nothing to write into {path_text(path)}")
        array[row, :length] = value
        array[row, length:] = pads.get(path, 0)
    return _runs_of(episode, notes)


def write_rollout(
    arrays: Mapping[Path, NDArray[Any]],
    stamps: NDArray[np.int64],
    effect: WriteRollout,
    pads: Mapping[Path, int] = STANDARD_PADS,
) -> tuple[RowRuns, ...]:
    """Carry out the whole effect: dirty stamps, data, clean stamps, in this order. The runs of each row, for
    ``RolloutWritten``: finding them takes as long as the rest of a publication, and this runs in a thread.

    ``arrays`` and ``stamps`` (int64 ``[rows]``) lie over the buffer. When it raises, the rows stay marked as dirty.
    """
    rows = list(effect.rows)
    stamps[rows] = effect.dirty_stamps
    runs = []
    for number, (row, episode) in enumerate(zip(rows, effect.rollout.episodes, strict=True)):
        provenance = None if effect.provenance is None else effect.provenance[number]
        subtasks = effect.subtask_indices[number]
        task = effect.task_indices[number]
        runs.append(write_episode(arrays, row, episode, task, subtasks, provenance, pads))
    stamps[rows] = effect.stamps
    return tuple(runs)
