"""Layouts: every byte has one owner, and a described layout is believed only after it was checked."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ods_async.core.memory import (
    ALIGNMENT,
    HEADER_BYTES,
    BatchLayout,
    SegmentHeader,
    SegmentLayout,
    field_of,
)
from ods_async.core.requests import FieldDescription
from ods_async.core.schema import ANNOTATIONS, PROVENANCE, RECORDED, EpisodeSchema, FieldSpec
from ods_async.errors import ProtocolError, SchemaMismatchError

ENV = (
    FieldSpec(("obs", "pose"), "float32", (7,)),
    FieldSpec(("obs", "camera", "rgb"), "uint8", (5, 3, 2)),
    FieldSpec(("obs", "nothing"), "float64", (0, 4)),
    FieldSpec(("actions",), "float16", (3,)),
)
SCHEMA = EpisodeSchema(ENV + RECORDED + ANNOTATIONS + PROVENANCE)
TOKEN = bytes(range(32))


def described(**changes):
    return dataclasses.replace(SegmentLayout.of(SCHEMA, 11, 13).describe("/dev/shm/x", TOKEN), **changes)


def with_field(number, **changes):
    fields = list(described().fields)
    fields[number] = dataclasses.replace(fields[number], **changes)
    return described(fields=tuple(fields))


@given(st.integers(1, 20), st.integers(1, 20))
def test_fields_and_stamps_share_no_byte_and_are_aligned(rows, steps):
    layout = SegmentLayout.of(SCHEMA, rows, steps)
    buffer = np.zeros(layout.nbytes, np.uint8)
    owners = np.zeros(layout.nbytes, np.uint8)
    owners[:HEADER_BYTES] += 1
    arrays = layout.arrays(buffer)
    assert list(arrays) == [field.path for field in SCHEMA]
    stamps = layout.stamps(buffer)
    assert stamps.dtype == np.int64
    assert stamps.shape == (rows,)
    for array in [stamps, *arrays.values()]:
        offset = array.__array_interface__["data"][0] - buffer.__array_interface__["data"][0]
        if array.nbytes:
            assert offset % ALIGNMENT == 0
            owners[offset : offset + array.nbytes] += 1
    assert owners.max() == 1
    for field in SCHEMA:
        assert arrays[field.path].shape == (rows, steps, *field.shape)
        assert arrays[field.path].dtype == np.dtype(field.dtype)


def test_arrays_are_views_and_as_writable_as_their_buffer():
    layout = SegmentLayout.of(SCHEMA, 3, 5)
    buffer = bytearray(layout.nbytes)
    layout.arrays(buffer)["actions",][2, 4] = 9
    layout.stamps(buffer)[1] = 44
    frozen = memoryview(buffer).toreadonly()
    seen = layout.arrays(frozen)["actions",]
    assert seen[2, 4].tolist() == [9, 9, 9]
    assert not seen.flags.writeable
    assert layout.stamps(frozen).tolist() == [0, 44, 0]
    with pytest.raises(ValueError, match="needs"):
        layout.arrays(frozen[:-1])
    with pytest.raises(ValueError, match="at least one row"):
        SegmentLayout.of(SCHEMA, 0, 5)


def test_a_header_is_read_back_and_a_foreign_one_is_not():
    buffer = bytearray(HEADER_BYTES)
    assert SegmentHeader.read(buffer) is None
    assert SegmentLayout.token(buffer) == b""
    header = SegmentHeader(TOKEN, owner_pid=4711, owner_start=2**60, run_id=-1, nbytes=HEADER_BYTES)
    header.write(buffer)
    assert SegmentHeader.read(buffer) == header
    assert SegmentLayout.token(buffer) == TOKEN == bytes(buffer[16:48])
    assert SegmentHeader.read(buffer[:-1]) is None
    buffer[8] += 1
    assert SegmentHeader.read(buffer) is None
    with pytest.raises(ValueError, match="32 bytes"):
        SegmentHeader(b"short", 1, 1, 1, 1).write(buffer)


def test_a_described_layout_is_the_same_layout():
    layout = SegmentLayout.of(SCHEMA, 11, 13)
    assert SegmentLayout.from_description(layout.describe(None, TOKEN)) == layout
    assert layout.describe("/dev/shm/x", TOKEN).segment == "/dev/shm/x"


LAST = len(SCHEMA) - 1


@pytest.mark.parametrize(
    "description",
    [
        described(rows=0),
        described(rows=-11),
        described(rows=12),
        described(steps=2**40),
        described(steps=14),
        described(segment_bytes=described().segment_bytes - 64),
        described(segment_bytes=2**80),
        described(token=b""),
        described(stamps_offset=0),
        described(stamps_offset=HEADER_BYTES + 4),
        described(stamps_offset=HEADER_BYTES - 8),
        described(stamps_offset=-8),
        described(stamps_offset=described().segment_bytes),
        with_field(1, offset=described().fields[0].offset),
        with_field(1, offset=described().fields[1].offset + 1),
        with_field(1, offset=HEADER_BYTES),
        with_field(LAST, offset=-64),
        with_field(LAST, offset=described().segment_bytes),
        with_field(0, shape=(8, 99)),
        with_field(0, shape=(-7,)),
        with_field(0, shape=(2**40, 2**40)),
        with_field(0, dtype="object"),
        with_field(0, dtype="float64"),
        with_field(0, dtype="V1000"),
        with_field(0, path=("actions",)),
        with_field(0, path=("actions", "deep")),
        with_field(0, path=()),
    ],
)
def test_c38_a_description_that_cannot_be_is_refused_before_anything_is_mapped(description):
    with pytest.raises(ProtocolError, match="makes no sense"):
        SegmentLayout.from_description(description)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "datetime64[ns]"},
        {"dtype": ">f4"},
        {"dtype": "str"},
        {"shape": (1,) * 31},
        {"shape": (0, 2**62, 2**62)},
        {"pad": 3},
        {"pad": -1, "dtype": "bool"},
        {"pad": -1, "dtype": "uint8"},
    ],
)
def test_a_field_that_no_batch_could_hold_is_refused(change):
    with pytest.raises(ProtocolError):
        field_of(dataclasses.replace(FieldDescription(("obs", "x"), "float32", (2,), 0, 0), **change))


@pytest.mark.parametrize("context", [False, True])
def test_a_batch_packs_every_field_aligned_and_apart(context):
    layout = BatchLayout.of(SCHEMA, 3, 5, context=context)
    buffer = np.zeros(layout.nbytes, np.uint8)
    views = layout.views(buffer)
    assert list(views) == [field.path for field in SCHEMA] + [("loss_mask",)] * context
    for number, view in enumerate(views.values()):
        assert view.shape[:2] == (3, 5)
        view.view(np.uint8)[...] = number + 1
    for number, view in enumerate(views.values()):
        assert (view.view(np.uint8) == number + 1).all()
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    assert (buffer != 0).sum() == sum(view.nbytes for view in views.values())
    with pytest.raises(ValueError, match="needs"):
        layout.views(buffer[:-1])


def test_a_context_of_a_schema_with_its_own_loss_mask_is_refused():
    schema = EpisodeSchema((FieldSpec(("loss_mask",), "float32"),))
    BatchLayout.of(schema, 1, 1, context=False)
    with pytest.raises(SchemaMismatchError, match="loss_mask"):
        BatchLayout.of(schema, 1, 1, context=True)
