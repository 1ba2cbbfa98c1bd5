"""Both copies, the compiled one and numpy's, held against each other and against plans that do not fit."""

import itertools
import shutil
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ods_async.core.copying import COMPILED, SegmentCopier
from ods_async.core.memory import BatchLayout, SegmentLayout
from ods_async.core.requests import Plan
from ods_async.core.schema import ANNOTATIONS, PROVENANCE, RECORDED, EpisodeSchema, FieldSpec
from ods_async.core.window_plan import WindowPlan
from ods_async.errors import ProtocolError

ENV = (
    FieldSpec(("obs", "pose"), "float32", (3,)),
    FieldSpec(("obs", "rgb"), "uint8", (7, 11)),  # more bytes a step than numpy copies window by window
    FieldSpec(("actions",), "float64", (5,)),
    FieldSpec(("obs", "none"), "int32", (0,)),
    FieldSpec(("obs", "token"), "int16", (), pad=-1),
)
SCHEMA = EpisodeSchema(ENV + RECORDED + ANNOTATIONS + PROVENANCE)
ROWS, STEPS = 5, 13
LAYOUT = SegmentLayout.of(SCHEMA, ROWS, STEPS)
BOTH = pytest.mark.parametrize("compiled", [pytest.param(True, id="compiled"), pytest.param(False, id="numpy")])


def a_segment(seed: int = 0) -> bytearray:
    """Random bytes (no NaN is an issue: bytes are compared) and one stamp a row."""
    memory = bytearray(np.random.default_rng(seed).integers(0, 256, LAYOUT.nbytes, np.uint8).tobytes())
    LAYOUT.stamps(memory)[...] = 2 * np.arange(ROWS) + 2
    return memory


def a_plan(windows: WindowPlan) -> Plan:
    return windows.to_message(3, (2 * windows.rows.astype(np.int64) + 2))


def int32(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@st.composite
def chunks(draw: st.DrawFn) -> WindowPlan:
    length = draw(st.integers(1, STEPS))
    pairs = draw(st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(0, STEPS - length)), min_size=1, max_size=9))
    rows, starts = zip(*pairs, strict=True)
    return WindowPlan(int32(*rows), int32(*starts), None, None, length, 0)


@st.composite
def contexts(draw: st.DrawFn) -> WindowPlan:
    """Windows around a "now" inside of a run; history and horizon may reach far out of it."""
    history, horizon = draw(st.integers(1, 2 * STEPS)), draw(st.integers(0, 2 * STEPS))
    found = []
    for _ in range(draw(st.integers(1, 9))):
        first = draw(st.integers(0, STEPS - 1))
        last = draw(st.integers(first + 1, STEPS))
        now = draw(st.integers(first, last - 1))
        found.append((draw(st.integers(0, ROWS - 1)), now - history + 1, first, last))
    rows, starts, firsts, lasts = (int32(*column) for column in zip(*found, strict=True))
    return WindowPlan(rows, starts, firsts, lasts, history + horizon, history)


def copied(copier: SegmentCopier, plan: Plan, batch: BatchLayout) -> tuple[bool, dict[object, bytes]]:
    memory = bytearray(b"\xa5" * batch.nbytes)
    whole = copier.copy(plan, batch, memory)
    return whole, {path: array.tobytes() for path, array in batch.views(memory).items()}


def test_the_compiled_copy_is_there_wherever_there_is_a_compiler() -> None:
    assert COMPILED or shutil.which("cc") is None, "install the package again: pip install -e ."


@given(st.one_of(chunks(), contexts()), st.integers(0, 5))
def test_both_copies_make_the_same_batch_b20_b26(windows: WindowPlan, seed: int) -> None:
    segment = a_segment(seed)
    batch = BatchLayout.of(SCHEMA, len(windows), windows.length, context=windows.history > 0)
    plan = a_plan(windows)
    by_numpy = copied(SegmentCopier(LAYOUT, segment, compiled=False), plan, batch)
    assert by_numpy[0] is True
    assert copied(SegmentCopier(LAYOUT, segment), plan, batch) == by_numpy


@BOTH
@given(windows=chunks(), victim=st.integers(0, ROWS - 1))
def test_a_row_written_meanwhile_is_found(windows: WindowPlan, victim: int, compiled: bool) -> None:
    segment = a_segment()
    LAYOUT.stamps(segment)[victim] += 1
    batch = BatchLayout.of(SCHEMA, len(windows), windows.length, context=False)
    whole, _ = copied(SegmentCopier(LAYOUT, segment, compiled=compiled), a_plan(windows), batch)
    assert whole == (victim not in windows.rows)


@BOTH
@given(windows=st.one_of(chunks(), contexts()), victims=st.lists(st.integers(0, ROWS - 1), max_size=2))
def test_batches_copied_together_are_each_the_batch_and_each_is_told_whether_it_is_whole_b20_b26(
    windows: WindowPlan, victims: list[int], compiled: bool
) -> None:
    segment, n = a_segment(), len(windows)
    batch = BatchLayout.of(SCHEMA, n, windows.length, context=windows.history > 0)
    rolled = [np.roll(windows.rows, turn).astype(np.int32) for turn in range(3)]
    rolled[1] = np.full(n, 3, np.int32)
    plans = [a_plan(replace(windows, rows=rows)) for rows in rolled]
    LAYOUT.stamps(segment)[victims] += 1
    copier = SegmentCopier(LAYOUT, segment, compiled=compiled)
    memories = [bytearray(b"\xa5" * batch.nbytes) for _ in plans]
    together = copier.copy_each(plans, batch, memories)
    found = [{path: array.tobytes() for path, array in batch.views(memory).items()} for memory in memories]
    assert list(zip(together, found, strict=True)) == [copied(copier, plan, batch) for plan in plans]
    assert together == [not set(victims) & set(rows.tolist()) for rows in rolled]


@BOTH
def test_a_plan_that_does_not_fit_is_refused_among_others_and_by_the_compiled_copy_before_any_is_begun(
    compiled: bool,
) -> None:
    copier = SegmentCopier(LAYOUT, a_segment(), compiled=compiled)
    batch = BatchLayout.of(SCHEMA, 2, 4, context=False)
    memories = [bytearray(b"\xa5" * batch.nbytes) for _ in range(2)]
    outside = replace(CHUNK, rows=int32(0, ROWS).tobytes())
    with pytest.raises(ProtocolError):
        copier.copy_each([CHUNK, outside], batch, memories)
    if compiled:
        assert set(memories[0]) == {0xA5}
    assert set(memories[1]) == {0xA5}
    with pytest.raises(ProtocolError, match="memory for 3 windows"):
        copier.copy_each([CHUNK], BatchLayout.of(SCHEMA, 3, 4, context=False), memories[:1])


@BOTH
@given(windows=st.one_of(chunks(), contexts()), cuts=st.lists(st.integers(0, 9), max_size=3))
def test_a_batch_copied_in_parts_is_the_batch_b20_b26(windows: WindowPlan, cuts: list[int], compiled: bool) -> None:
    copier, n = SegmentCopier(LAYOUT, a_segment(), compiled=compiled), len(windows)
    batch = BatchLayout.of(SCHEMA, n, windows.length, context=windows.history > 0)
    plan = a_plan(windows)
    whole, expected = copied(copier, plan, batch)
    assert whole
    memory = bytearray(b"\xa5" * batch.nbytes)
    ends = sorted({0, n, *(min(cut, n) for cut in cuts)})
    for part in reversed(list(itertools.pairwise(ends))):
        assert copier.copy(plan, batch, memory, part)
    assert {path: array.tobytes() for path, array in batch.views(memory).items()} == expected


@BOTH
def test_a_part_writes_nothing_beside_its_windows_and_sees_only_its_own_rows(compiled: bool) -> None:
    segment = a_segment()
    windows = WindowPlan(int32(0, 4, 2), int32(2, 9, 1), int32(0, 8, 0), int32(5, 13, 9), 4, 2)
    batch = BatchLayout.of(SCHEMA, 3, 4, context=True)
    plan = a_plan(windows)
    LAYOUT.stamps(segment)[4] += 1
    copier, memory = SegmentCopier(LAYOUT, segment, compiled=compiled), bytearray(b"\xa5" * batch.nbytes)
    assert copier.copy(plan, batch, memory, (2, 3))
    for array in batch.views(memory).values():
        assert array[:2].tobytes() == b"\xa5" * array[:2].nbytes
    assert not copier.copy(plan, batch, memory, (1, 3))
    assert copier.copy(plan, batch, memory, (0, 1))


CHUNK = a_plan(WindowPlan(int32(0, 4), int32(2, 9), None, None, 4, 0))
CONTEXT = a_plan(WindowPlan(int32(0, 4), int32(-1, 9), int32(0, 8), int32(5, 13), 7, 3))


def tampered(plan: Plan, name: str, place: int, value: int) -> Plan:
    numbers = np.frombuffer(getattr(plan, name), "<i8" if name == "stamps" else "<i4").copy()
    numbers[place] = value
    return replace(plan, **{name: numbers.tobytes()})


@BOTH
@pytest.mark.parametrize(
    "plan",
    [
        *(tampered(CHUNK, "rows", 1, row) for row in (-1, ROWS, 2**31 - 1, -(2**31))),
        *(tampered(CHUNK, "starts", 0, start) for start in (-1, STEPS - 3, 2**31 - 1, -(2**31))),
        *(tampered(CONTEXT, "first", 1, first) for first in (-1, 13, -(2**31))),
        *(tampered(CONTEXT, "last", 0, last) for last in (STEPS + 1, 2**31 - 1, -1)),
        *(tampered(CONTEXT, "rows", 0, row) for row in (-1, ROWS)),
        replace(CHUNK, rows=CHUNK.rows[:4]),
        replace(CHUNK, starts=CHUNK.starts + b"\0\0\0\0"),
        replace(CHUNK, stamps=CHUNK.stamps[:-1]),
        replace(CHUNK, stamps=b""),
        replace(CHUNK, rows=CHUNK.rows[:4], starts=CHUNK.starts[:4], stamps=CHUNK.stamps[:8]),
        replace(CHUNK, first=CHUNK.rows, last=CHUNK.rows),
        replace(CONTEXT, first=b"", last=b""),
        replace(CONTEXT, last=CONTEXT.last[:-4]),
        replace(CONTEXT, history=8),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_a_byte_is_written(plan: Plan, compiled: bool) -> None:
    copier = SegmentCopier(LAYOUT, a_segment(), compiled=compiled)
    batch = BatchLayout.of(SCHEMA, 2, plan.length, context=plan.history > 0)
    memory = bytearray(b"\xa5" * batch.nbytes)
    with pytest.raises(ProtocolError):
        copier.copy(plan, batch, memory)
    assert memory == b"\xa5" * batch.nbytes
    good = CONTEXT if plan.history else CHUNK
    assert copier.copy(good, batch, memory)


@BOTH
def test_memory_of_another_size_is_refused(compiled: bool) -> None:
    copier = SegmentCopier(LAYOUT, a_segment(), compiled=compiled)
    batch = BatchLayout.of(SCHEMA, 2, 4, context=False)
    with pytest.raises((ValueError, ProtocolError)):
        copier.copy(CHUNK, batch, bytearray(batch.nbytes - 64))
    with pytest.raises(ProtocolError, match="memory for 3 windows of 4 steps"):
        copier.copy(CHUNK, BatchLayout.of(SCHEMA, 3, 4, context=False), bytearray(10 * batch.nbytes))
    with pytest.raises((BufferError, TypeError, ValueError, ProtocolError)):
        copier.copy(CHUNK, batch, bytes(batch.nbytes))


def test_a_batch_of_other_fields_than_the_segments_is_copied_by_numpy_or_refused() -> None:
    other = EpisodeSchema((*ENV[:2], *RECORDED, *ANNOTATIONS))
    fewer = BatchLayout.of(other, 2, 4, context=False)
    whole, found = copied(SegmentCopier(LAYOUT, a_segment()), CHUNK, fewer)
    everything = copied(SegmentCopier(LAYOUT, a_segment()), CHUNK, BatchLayout.of(SCHEMA, 2, 4, context=False))[1]
    assert whole
    assert found == {path: everything[path] for path in found}
    wider = EpisodeSchema((FieldSpec(("obs", "pose"), "float64", (3,)), *ENV[1:2], *RECORDED, *ANNOTATIONS))
    with pytest.raises(TypeError, match="pose"):
        copied(SegmentCopier(LAYOUT, a_segment()), CHUNK, BatchLayout.of(wider, 2, 4, context=False))


@BOTH
def test_a_segment_closed_by_another_thread_takes_nothing_from_a_copy_under_way(compiled: bool) -> None:
    segment = a_segment()
    theirs = memoryview(segment)
    copier = SegmentCopier(LAYOUT, theirs, compiled=compiled)
    batch = BatchLayout.of(SCHEMA, 2, 4, context=False)
    theirs.release()
    assert copied(copier, CHUNK, batch) == copied(SegmentCopier(LAYOUT, segment), CHUNK, batch)
