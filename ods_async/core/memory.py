"""Where every byte lies: of the buffer's segment, and of one batch.

A segment is a header of 4096 bytes, one int64 stamp per row, then each field as ``[rows, steps, *shape]``. A batch is
each field as ``[batch, length, *shape]``, packed in one payload. Every block starts at a multiple of 64 bytes. Nothing
here owns memory: a layout turns a buffer somebody else made (shared, pooled, received) into arrays, without a copy.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from ods_async.core.requests import BufferDescription, FieldDescription
from ods_async.core.schema import EpisodeSchema, FieldSpec, Path, path_text
from ods_async.errors import ProtocolError, SchemaMismatchError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "ALIGNMENT",
    "HEADER_BYTES",
    "LOSS_MASK",
    "NARROW_BYTES",
    "TOKEN_BYTES",
    "BatchLayout",
    "SegmentHeader",
    "SegmentLayout",
    "field_of",
    "is_narrow",
]

ALIGNMENT: Final = 64
HEADER_BYTES: Final = 4096
TOKEN_BYTES: Final = 32
LOSS_MASK: Final = FieldSpec(("loss_mask",), "bool")
NARROW_BYTES: Final = 64  # of a step; fields up to this are copied a window at a time, see ``core.gather``

_MAGIC: Final = b"odsbuf\x00\x01"
_VERSION: Final = 2
# magic, version, spare, token (at 16), owner's pid, owner's start time, run id, bytes of the whole segment
_HEADER: Final = struct.Struct("<8sII32sQQqQ")
_EDITION_OFFSET: Final = 128
_DTYPES: Final = frozenset(np.dtype(code).name for code in "?bhilqBHILQefdFD")
_MOST_DIMENSIONS: Final = 30  # numpy takes 64 in version 2 and 32 before; rows and steps come on top
_MOST_BYTES: Final = 2**62
_MOST_ELEMENT_BYTES: Final = 2**31  # of one element of a numpy array


def is_narrow(step_nbytes: int, length: int) -> bool:
    """Whether windows of ``length`` steps of a field of that many bytes a step are copied whole."""
    return 0 < step_nbytes <= NARROW_BYTES and 0 < length * step_nbytes < _MOST_ELEMENT_BYTES


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """Who made a segment. ``owner_start`` is when process ``owner_pid`` started, in the unit its maker uses."""

    token: bytes
    owner_pid: int
    owner_start: int
    run_id: int
    nbytes: int

    def write(self, buffer: Buffer) -> None:
        """Write the header to the start of ``buffer`` (writable, at least 4096 bytes)."""
        if len(self.token) != TOKEN_BYTES:
            raise ValueError(f"a token has {TOKEN_BYTES} bytes, not {len(self.token)}")
        view = memoryview(buffer).cast("B")
        packed = (self.token, self.owner_pid, self.owner_start, self.run_id, self.nbytes)
        view[: _HEADER.size] = _HEADER.pack(_MAGIC, _VERSION, 0, *packed)

    @classmethod
    def read(cls, buffer: Buffer) -> Self | None:
        """The header at the start of ``buffer``, or None when this is no segment of this version."""
        view = memoryview(buffer).cast("B")
        if view.nbytes < HEADER_BYTES:
            return None
        magic, version, _, token, pid, start, run_id, nbytes = _HEADER.unpack_from(view)
        if magic != _MAGIC or version != _VERSION:
            return None
        return cls(token, pid, start, run_id, nbytes)


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Where the stamps and each field lie in a segment of ``rows`` rows of ``steps`` steps; ``nbytes`` is its size."""

    schema: EpisodeSchema
    rows: int
    steps: int
    offsets: tuple[int, ...]
    stamps_offset: int
    nbytes: int

    @classmethod
    def of(cls, schema: EpisodeSchema, rows: int, steps: int) -> Self:
        """The layout for these fields and sizes; the same input gives the same layout on every machine."""
        if rows < 1 or steps < 1:
            raise ValueError(f"a buffer has at least one row of one step, not {rows} rows of {steps}")
        offset = HEADER_BYTES + 8 * rows
        offsets = []
        for field in schema:
            offset = _aligned(offset)
            offsets.append(offset)
            offset += rows * steps * field.step_nbytes
        return cls(schema, rows, steps, tuple(offsets), HEADER_BYTES, _aligned(offset))

    def arrays(self, buffer: Buffer) -> dict[Path, NDArray[Any]]:
        """Each field as ``[rows, steps, *shape]`` over ``buffer``; writable where the buffer is."""
        shape, whole = (self.rows, self.steps), self._checked(buffer)
        return {
            field.path: np.ndarray(shape + field.shape, field.dtype, whole, offset)
            for field, offset in zip(self.schema, self.offsets, strict=True)
        }

    def stamps(self, buffer: Buffer) -> NDArray[np.int64]:
        """One stamp per row, int64 ``[rows]``, over ``buffer``."""
        return np.ndarray((self.rows,), np.int64, self._checked(buffer), self.stamps_offset)

    def edition(self, buffer: Buffer) -> NDArray[np.int64]:
        """The number of the buffer's edition, int64 ``[1]``, over ``buffer``; see :class:`Plans`."""
        return np.ndarray((1,), np.int64, self._checked(buffer), _EDITION_OFFSET)

    @staticmethod
    def token(buffer: Buffer) -> bytes:
        """The token in the segment's header; empty when ``buffer`` does not begin with a header."""
        header = SegmentHeader.read(buffer)
        return b"" if header is None else header.token

    def describe(self, segment_path: str | None, token: bytes) -> BufferDescription:
        """What a consumer is told; ``segment_path`` is None when there is no file to map."""
        fields = tuple(
            FieldDescription(field.path, field.dtype, field.shape, field.pad, offset)
            for field, offset in zip(self.schema, self.offsets, strict=True)
        )
        return BufferDescription(fields, self.rows, self.steps, segment_path, self.nbytes, token, self.stamps_offset)

    @classmethod
    def from_description(cls, description: BufferDescription) -> Self:
        """The layout a peer described. Sizes, dtypes, alignment and overlaps are checked, and nothing is allocated.

        Raises:
            ProtocolError: the description is not one of a segment; ``reason`` says where.
        """
        rows, steps, nbytes = description.rows, description.steps, description.segment_bytes
        if not (1 <= rows < 2**31 and 1 <= steps < 2**31 and HEADER_BYTES <= nbytes <= _MOST_BYTES):
            raise _bad(f"{rows} rows of {steps} steps in {nbytes} bytes")
        if len(description.token) != TOKEN_BYTES:
            raise _bad(f"the token has {len(description.token)} bytes instead of {TOKEN_BYTES}")
        if not description.fields:
            raise _bad("no fields at all")
        if description.stamps_offset % 8:
            raise _bad(f"the stamps begin at byte {description.stamps_offset}, which is no multiple of 8")
        specs = tuple(field_of(field) for field in description.fields)
        blocks = [(0, HEADER_BYTES, "the header"), (description.stamps_offset, 8 * rows, "the stamps")]
        for spec, field in zip(specs, description.fields, strict=True):
            if field.offset % ALIGNMENT:
                raise _bad(f"{path_text(spec.path)} begins at byte {field.offset}, no multiple of {ALIGNMENT}")
            blocks.append((field.offset, rows * steps * spec.step_nbytes, path_text(spec.path)))
        _check_blocks(blocks, nbytes)
        try:
            schema = EpisodeSchema(specs)
        except SchemaMismatchError as error:
            raise _bad(error.message) from error
        offsets = tuple(field.offset for field in description.fields)
        return cls(schema, rows, steps, offsets, description.stamps_offset, nbytes)

    def _checked(self, buffer: Buffer) -> NDArray[np.uint8]:
        view = memoryview(buffer)
        if view.nbytes < self.nbytes:
            raise ValueError(f"the segment needs {self.nbytes} bytes and the buffer has {view.nbytes}")
        return _held(view)


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where each field of one batch lies in its payload; ``nbytes`` is the payload's size.

    The same for memory a consumer gathers into and for the payload frame the broker sends. Contexts have one field
    more than the schema, last: ``loss_mask`` (bool).
    """

    fields: tuple[FieldSpec, ...]
    batch_size: int
    length: int
    offsets: tuple[int, ...]
    nbytes: int
    _arrays: tuple[tuple[Path, tuple[int, ...], np.dtype[Any], int], ...] = dataclass_field(
        init=False, repr=False, compare=False
    )
    _narrow: tuple[tuple[Path, np.dtype[Any], int], ...] = dataclass_field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        windows = (self.batch_size, self.length)
        arrays = tuple(
            (field.path, windows + field.shape, np.dtype(field.dtype), offset)
            for field, offset in zip(self.fields, self.offsets, strict=True)
        )
        narrow = tuple(
            (field.path, np.dtype((np.void, self.length * field.step_nbytes)), offset)
            for field, offset in zip(self.fields, self.offsets, strict=True)
            if is_narrow(field.step_nbytes, self.length) and field != LOSS_MASK
        )
        object.__setattr__(self, "_arrays", arrays)
        object.__setattr__(self, "_narrow", narrow)

    @classmethod
    def of(cls, schema: EpisodeSchema, batch_size: int, length: int, *, context: bool) -> Self:
        """The layout for ``batch_size`` windows of ``length`` steps of every field of ``schema``.

        Raises:
            SchemaMismatchError: a context of a schema that has a field named ``loss_mask`` itself.
        """
        fields = EpisodeSchema((*schema.fields, LOSS_MASK)).fields if context else schema.fields
        offset = 0
        offsets = []
        for field in fields:
            offset = _aligned(offset)
            offsets.append(offset)
            offset += batch_size * length * field.step_nbytes
        return cls(fields, batch_size, length, tuple(offsets), _aligned(offset))

    def views(self, buffer: Buffer) -> dict[Path, NDArray[Any]]:
        """Each field as ``[batch_size, length, *shape]`` over ``buffer``; writable where the buffer is."""
        whole = self._checked(buffer)
        return {path: np.ndarray(shape, dtype, whole, offset) for path, shape, dtype, offset in self._arrays}

    def arrays(self, memory: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """As :meth:`views`, in the order of ``fields``, over an array of ``nbytes`` bytes."""
        return [np.ndarray(shape, dtype, memory, offset) for _, shape, dtype, offset in self._arrays]

    def windows(self, buffer: Buffer) -> dict[Path, NDArray[np.void]]:
        """Each narrow field as ``[batch_size]`` whole windows over ``buffer``: the same memory as :meth:`views`."""
        whole, shape = self._checked(buffer), (self.batch_size,)
        return {path: np.ndarray(shape, dtype, whole, offset) for path, dtype, offset in self._narrow}

    def _checked(self, buffer: Buffer) -> NDArray[np.uint8]:
        view = memoryview(buffer)
        if view.nbytes < self.nbytes:
            raise ValueError(f"the batch needs {self.nbytes} bytes and the buffer has {view.nbytes}")
        return _held(view)


def _held(view: memoryview) -> NDArray[np.uint8]:
    # numpy.ndarray over a buffer keeps a reference to its owner but no hold on it: a mapping could be closed under the
    # array, and the next read would end the process. numpy.frombuffer keeps the hold, and so does what is made from it.
    return np.frombuffer(view, np.uint8) if view.nbytes else np.zeros(0, np.uint8)


def field_of(description: FieldDescription) -> FieldSpec:
    """The field a peer described, checked: a plain dtype of fixed size, a possible shape, a padding of 0 or -1.

    Raises:
        ProtocolError: naming the field and what is wrong with it.
    """
    path, dtype, shape, pad = description.path, description.dtype, description.shape, description.pad
    if not path or not all(isinstance(key, str) for key in path):
        raise _bad(f"{path!r} is no path of a field")
    name = path_text(path)
    if dtype not in _DTYPES:
        raise _bad(f"{name} has the dtype {dtype!r}; known are {', '.join(sorted(_DTYPES))}")
    if len(shape) > _MOST_DIMENSIONS or any(size < 0 for size in shape):
        raise _bad(f"{name} has the shape {list(shape)[:_MOST_DIMENSIONS]}")
    if np.dtype(dtype).itemsize * math.prod(size for size in shape if size) > _MOST_BYTES:
        raise _bad(f"{name} has {list(shape)} elements of {dtype} per step, more than any memory holds")
    if pad not in ((0,) if dtype == "bool" or dtype.startswith("uint") else (0, -1)):
        raise _bad(f"{name} is padded with {pad!r}, which {dtype} does not allow")
    return FieldSpec(path, dtype, shape, pad)


def _check_blocks(blocks: list[tuple[int, int, str]], nbytes: int) -> None:
    end_before, name_before = 0, ""
    for start, size, name in sorted(blocks):
        if start < 0 or start + size > nbytes:
            raise _bad(f"{name} lies at bytes {start} to {start + size} of a segment of {nbytes}")
        if size and start < end_before:
            raise _bad(f"{name} begins at byte {start}, inside {name_before}, which ends at {end_before}")
        if start + size > end_before:
            end_before, name_before = start + size, name


def _bad(reason: str) -> ProtocolError:
    return ProtocolError(f"the description of the buffer makes no sense: {reason}", reason=reason)
