"""Episodes in their rows (B14, B16, B34, B42)."""

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ods_async.core.episode import Episode, Rollout, Segment
from ods_async.core.memory import SegmentLayout
from ods_async.core.schema import ANNOTATIONS, PROVENANCE, RECORDED, EpisodeSchema, FieldSpec
from ods_async.core.stimuli import WriteRollout
from ods_async.core.windows import runs_of
from ods_async.core.write import annotations_of, runs_of_episode, write_episode, write_rollout
from ods_async.testing.strategies import episodes

ENV = (FieldSpec(("obs", "pose"), "float32", (3,)), FieldSpec(("actions",), "float32", (2,)))
SCHEMA = EpisodeSchema(ENV + RECORDED + ANNOTATIONS + PROVENANCE)
CAPACITY = 15
ORIGIN = (91, 12, 4, 10**18, 10**12)


def dirty_buffer(rows=3):
    layout = SegmentLayout.of(SCHEMA, rows, CAPACITY)
    buffer = np.full(layout.nbytes, 0x5B, np.uint8)
    return layout.arrays(buffer), layout.stamps(buffer)


def subtasks_of(episode):
    return tuple(range(40, 40 + len(episode.segments) + 1))


def expected_step(episode, step):
    """What a valid step must hold, looked up the obvious way."""
    values = {path: array[step] for path, array in episode.arrays.items()}
    holder = [n for n, part in enumerate(episode.segments) if part.start <= step < part.end]
    inside = bool(holder)
    part = episode.segments[holder[0]] if inside else None
    values["valid",] = True
    values["episode_step",] = values["ods_frame_index",] = step
    values["segment_id",] = holder[0] if inside else -1
    values["segment_step",] = step - part.start if inside else -1
    values["segment_start",] = inside and step == part.start
    values["segment_end",] = inside and step == part.end - 1
    values["segment_accepted",] = inside and part.accepted
    values["task_index",] = 8
    values["subtask_index",] = subtasks_of(episode)[holder[0] if inside else len(episode.segments)]
    names = ("ods_run_id", "ods_episode_id", "ods_generation", "ods_accepted_at_ns", "ods_published_at_monotonic_ns")
    return values | {(name,): value for name, value in zip(names, ORIGIN, strict=True)}


@given(episodes(), st.integers(0, 2))
def test_b14_b16_b34_b42_a_row_holds_the_episode_its_annotations_and_clean_padding(episode, row):
    arrays, _ = dirty_buffer()
    untouched = {path: array.copy() for path, array in arrays.items()}
    write_episode(arrays, row, episode, 8, subtasks_of(episode), ORIGIN)
    for step in range(CAPACITY):
        expected = expected_step(episode, step) if step < episode.length else {}
        for field in SCHEMA:
            wanted = np.broadcast_to(expected.get(field.path, field.pad), field.shape).astype(field.dtype)
            assert arrays[field.path][row, step].tobytes() == wanted.tobytes()
    others = [other for other in range(3) if other != row]
    for path, array in arrays.items():
        assert array[others].tobytes() == untouched[path][others].tobytes()


@given(episodes(), episodes())
def test_b16_nothing_of_the_previous_occupant_is_left(before, after):
    reused, _ = dirty_buffer(1)
    write_episode(reused, 0, before, 1, subtasks_of(before), ORIGIN)
    write_episode(reused, 0, after, 8, subtasks_of(after), ORIGIN)
    fresh, _ = dirty_buffer(1)
    write_episode(fresh, 0, after, 8, subtasks_of(after), ORIGIN)
    for path, array in reused.items():
        assert array.tobytes() == fresh[path].tobytes()


@given(episodes())
def test_runs_of_an_episode_are_those_of_the_row_it_is_written_into(episode):
    arrays, _ = dirty_buffer(1)
    write_episode(arrays, 0, episode, 0, subtasks_of(episode), ORIGIN)
    names = ("valid", "continuity_id", "segment_id", "segment_accepted")
    written = runs_of(*(arrays[name,][0] for name in names))
    planned = runs_of_episode(episode)
    assert planned.longest == written.longest
    for mode in ("episode", "segment", "boundary"):
        assert planned.of(mode).tolist() == written.of(mode).tolist()


def plain_episode(length, segments=()):
    arrays = {field.path: np.ones((length, *field.shape), field.dtype) for field in ENV + RECORDED}
    return Episode(length, arrays, segments)


def test_b42_a_segment_without_steps_marks_nothing_and_keeps_its_number():
    parts = (Segment("a", 0, 2), Segment("empty", 2, 2), Segment("b", 2, 5, accepted=False))
    notes = annotations_of(plain_episode(6, parts))
    assert notes["segment_id",].tolist() == [0, 0, 2, 2, 2, -1]
    assert notes["segment_step",].tolist() == [0, 1, 0, 1, 2, -1]
    assert notes["segment_start",].tolist() == [True, False, True, False, False, False]
    assert notes["segment_end",].tolist() == [False, True, False, False, True, False]
    assert notes["segment_accepted",].tolist() == [True, True, False, False, False, False]
    assert {array.dtype.name for array in notes.values()} == {"bool", "int64"}


def test_a_field_nobody_recorded_and_a_wrong_number_of_subtasks_are_refused():
    arrays, _ = dirty_buffer(1)
    with pytest.raises(ValueError, match="ods_run_id"):
        write_episode(arrays, 0, plain_episode(2), 0, (0,), None)
    with pytest.raises(ValueError, match="1 subtasks for 1 segments"):
        write_episode(arrays, 0, plain_episode(2, (Segment("a", 0, 1),)), 0, (0,), ORIGIN)


def test_without_provenance_the_buffer_needs_none():
    schema = EpisodeSchema(ENV + RECORDED + ANNOTATIONS)
    layout = SegmentLayout.of(schema, 1, 5)
    arrays = layout.arrays(bytearray(layout.nbytes))
    write_episode(arrays, 0, plain_episode(3), 0, (2,), None)
    assert arrays["subtask_index",][0].tolist() == [2, 2, 2, -1, -1]


class Watched(Mapping):
    """Arrays that note the stamps at every look, as a reader on another processor might."""

    def __init__(self, arrays, stamps):
        self.arrays, self.stamps, self.seen = arrays, stamps, []

    def __getitem__(self, path):
        return self.arrays[path]

    def __iter__(self):
        for path in self.arrays:
            self.seen.append(self.stamps.tolist())
            yield path

    def __len__(self):
        return len(self.arrays)


def effect_of(*chosen, rows):
    return WriteRollout(
        job_id=1,
        rollout=Rollout(5, "w", chosen),
        rows=rows,
        dirty_stamps=(7, 9),
        stamps=(8, 10),
        task_indices=(3, 4),
        subtask_indices=((30,), (40,)),
        provenance=(ORIGIN, (91, 13, 4, 5, 6)),
    )


def test_stamps_are_dirty_before_the_first_byte_and_clean_after_the_last():
    arrays, stamps = dirty_buffer()
    stamps[:] = (2, 4, 6)
    watched = Watched(arrays, stamps)
    write_rollout(watched, stamps, effect_of(plain_episode(4), plain_episode(7), rows=(2, 0)))
    assert watched.seen
    assert all(seen == [9, 4, 7] for seen in watched.seen)
    assert stamps.tolist() == [10, 4, 8]
    assert arrays["ods_episode_id",][[2, 0], 0].tolist() == [12, 13]
    assert arrays["task_index",][[2, 0], 0].tolist() == [3, 4]
    assert arrays["valid",].sum(axis=1)[[2, 0]].tolist() == [4, 7]


def test_a_write_that_fails_leaves_its_rows_marked_as_dirty():
    arrays, stamps = dirty_buffer()
    stamps[:] = (2, 4, 6)
    broken = Episode(3, {})
    with pytest.raises(ValueError, match="nothing to write"):
        write_rollout(arrays, stamps, effect_of(plain_episode(4), broken, rows=(0, 1)))
    assert stamps.tolist() == [7, 9, 6]
