"""The one copy, held against copying step by step."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ods_async.core.gather import GatherProgram, gather_into
from ods_async.core.memory import BatchLayout, SegmentLayout
from ods_async.core.schema import ANNOTATIONS, PROVENANCE, RECORDED, EpisodeSchema, FieldSpec
from ods_async.core.windows import RunIndex, WindowPlan, plan_contexts, plan_windows, runs_of
from ods_async.testing.strategies import Annotations, annotated_buffers

ENV = (
    FieldSpec(("obs", "pose"), "float32", (3,)),
    FieldSpec(("obs", "rgb"), "uint8", (2, 4)),
    FieldSpec(("actions",), "float64", (5,)),
    FieldSpec(("obs", "none"), "int32", (0,)),
    FieldSpec(("obs", "token"), "int16", (), pad=-1),
)
SCHEMA = EpisodeSchema(ENV + RECORDED + ANNOTATIONS + PROVENANCE)


def filled_buffer(notes: Annotations):
    """A buffer whose every element tells row, step and place, with the annotations the windows are planned by."""
    rows, steps = notes.valid.shape
    layout = SegmentLayout.of(SCHEMA, rows, steps)
    arrays = layout.arrays(bytearray(layout.nbytes))
    for number, array in enumerate(arrays.values()):
        array[...] = (np.arange(array.size) * 7 + number).reshape(array.shape)
    for name in ("valid", "continuity_id", "segment_id", "segment_accepted"):
        arrays[name,][...] = getattr(notes, name)
    return arrays


def index_of(notes: Annotations) -> RunIndex:
    index = RunIndex(*notes.valid.shape)
    for row in range(index.rows):
        parts = (notes.valid, notes.continuity_id, notes.segment_id, notes.segment_accepted)
        index.publish(row, runs_of(*(part[row] for part in parts)), int(notes.generation[row]))
    return index


def room_for(plan):
    return room_and_windows_for(plan)[0]


def room_and_windows_for(plan):
    layout = BatchLayout.of(SCHEMA, len(plan), plan.length, context=plan.first is not None)
    buffer = np.full(layout.nbytes, 0xA5, np.uint8)
    return layout.views(buffer), layout.windows(buffer)


def equal(one, other):
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


@given(annotated_buffers(), st.integers(1, 6), st.integers(0, 99))
def test_b20_chunks_hold_exactly_the_planned_steps_and_belong_to_the_caller(notes, length, seed):
    index = index_of(notes)
    if not index.rows_with("episode", length):
        return
    source = filled_buffer(notes)
    plan = plan_windows(index, 9, length, "episode", np.random.default_rng(seed))
    out = room_for(plan)
    gather_into(source, plan, out)
    before = {path: array.copy() for path, array in source.items()}
    for field in SCHEMA:
        windows = zip(plan.rows.tolist(), plan.starts.tolist(), strict=True)
        expected = np.stack([source[field.path][row, start : start + length] for row, start in windows])
        assert equal(out[field.path], expected)
        out[field.path].fill(0)
        assert equal(source[field.path], before[field.path])


@given(annotated_buffers(), st.integers(0, 4), st.integers(1, 6), st.integers(0, 99))
def test_whole_windows_prepared_or_not_are_the_same_bytes_as_step_by_step(notes, history, length, seed):
    index, rng = index_of(notes), np.random.default_rng(seed)
    if not index.rows_with("episode", length if not history else 1):
        return
    source = filled_buffer(notes)
    plan = (
        plan_contexts(index, 9, history, length, "episode", rng)
        if history
        else plan_windows(index, 9, length, "episode", rng)
    )
    program = GatherProgram(source)
    plain, (prepared, windows) = room_for(plan), room_and_windows_for(plan)
    assert ("actions",) in windows
    assert ("obs", "none") not in windows
    program.run(plan, plain)
    program.run(plan, prepared, windows)
    stepwise = GatherProgram(source)
    stepwise._windows[plan.length] = {}
    again = room_for(plan)
    stepwise.run(plan, again)
    for path, array in again.items():
        assert equal(plain[path], array)
        assert equal(prepared[path], array)


@given(
    annotated_buffers(),
    st.integers(1, 8),
    st.integers(1, 8),
    st.sampled_from(("episode", "segment")),
    st.integers(0, 99),
)
def test_b26_b27_c36_contexts_hold_the_steps_the_oracle_names_and_padding_elsewhere(
    notes, history, horizon, mode, seed
):
    index = index_of(notes)
    if not index.rows_with(mode, 1):
        return
    source = filled_buffer(notes)
    plan = plan_contexts(index, 7, history, horizon, mode, np.random.default_rng(seed))
    out = room_for(plan)
    GatherProgram(source).run(plan, out)
    oracle = notes.oracle()
    for number, (row, start) in enumerate(zip(plan.rows.tolist(), plan.starts.tolist(), strict=True)):
        now = start + history - 1
        for place, step in enumerate(oracle.context(row, now, history, horizon, mode)):
            for field in SCHEMA:
                found = out[field.path][number, place]
                says_whose = field in PROVENANCE or field.path in {("task_index",), ("subtask_index",)}
                pad = np.full(field.shape, -1 if says_whose else 0, field.dtype)
                assert equal(found, pad if step is None else source[field.path][row, step])
            assert out["valid",][number, place] == (step is not None)
            assert out["loss_mask",][number, place] == (step is not None and step >= now)


@pytest.mark.parametrize("horizon", [5, 121])
@pytest.mark.parametrize(("row", "anchor"), [(0, 0), (0, 2), (0, 4), (1, 0), (1, 150), (1, 299)])
def test_c36_padding_around_the_first_a_middle_and_the_last_step(row, anchor, horizon):
    """Episodes of 5 and 300 steps side by side: offsets from -2 on, and nothing of a neighbour."""
    lengths = [5, 300]
    stored = np.arange(2 * 300).reshape(2, 300)
    plan = WindowPlan(
        *(np.array([value], np.int32) for value in (row, anchor - 2, 0, lengths[row])), length=horizon + 2, history=3
    )
    source = {("step",): stored, ("valid",): np.arange(300) < np.array(lengths)[:, None]}
    out = {path: np.zeros((1, plan.length), array.dtype) for path, array in source.items()}
    out["loss_mask",] = np.zeros((1, plan.length), bool)
    gather_into(source, plan, out)
    wanted = range(anchor - 2, anchor + horizon)
    real = [0 <= step < lengths[row] for step in wanted]
    assert out["valid",][0].tolist() == real
    assert out["loss_mask",][0].tolist() == [
        inside and step >= anchor for inside, step in zip(real, wanted, strict=True)
    ]
    expected = [row * 300 + step if inside else 0 for inside, step in zip(real, wanted, strict=True)]
    assert out["step",][0].tolist() == expected


def test_only_the_fields_that_are_wanted_are_copied_and_memory_need_not_be_packed():
    source = {("a",): np.arange(60).reshape(3, 20), ("b", "c"): np.arange(120.0).reshape(3, 20, 2)}
    plan = WindowPlan(np.array([2, 1], np.int32), np.array([4, 0], np.int32), None, None, 3, 0)
    wide = np.zeros((2, 3, 5))
    gather_into(source, plan, {("b", "c"): wide[:, :, 1:3]})
    assert wide[:, :, 1:3].tolist() == [source["b", "c"][2, 4:7].tolist(), source["b", "c"][1, 0:3].tolist()]
    assert not wide[:, :, 3:].any()
    with pytest.raises(KeyError, match="b/x"):
        gather_into(source, plan, {("b", "x"): wide})
    with pytest.raises(KeyError, match="loss_mask"):
        gather_into(source, plan, {("loss_mask",): np.zeros((2, 3), bool)})


def test_a_buffer_that_is_none_is_refused():
    with pytest.raises(ValueError, match="share rows and steps"):
        GatherProgram({("a",): np.zeros((2, 3)), ("b",): np.zeros((3, 2))})
    with pytest.raises(ValueError, match="b is not contiguous"):
        GatherProgram({("a",): np.zeros((2, 3)), ("b",): np.zeros((3, 2)).T})


def test_b17_memory_of_another_dtype_or_size_is_refused_and_nothing_is_cast():
    source = {("a",): np.arange(6, dtype=np.int64).reshape(2, 3)}
    plan = WindowPlan(np.array([1], np.int32), np.array([0], np.int32), None, None, 2, 0)
    for room in (np.zeros((1, 2), np.int32), np.zeros((1, 3), np.int64)):
        with pytest.raises((TypeError, ValueError)):
            gather_into(source, plan, {("a",): room})
