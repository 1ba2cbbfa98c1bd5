"""A rollout as one header and one payload frame, and back without a copy.

The payload holds every field of every episode, one after the other in the order of episodes and fields, each beginning
at a multiple of 64 bytes. So its layout follows from the fields and the lengths alone, and the receiver compares the
announced one with the one it works out: nothing can overlap, stick out, or shift data into another episode.

Data is little-endian and of the dtypes numpy shares with everyone (``wire.plain.SCALARS``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from ods_async.core.episode import Array, Episode, Rollout, Segment
from ods_async.core.reports import EpisodeReport, RolloutReport, SegmentReport
from ods_async.core.requests import FieldDescription, Limits
from ods_async.core.schema import EpisodeSchema, FieldSpec, Path, path_text
from ods_async.errors import LimitExceededError, ProtocolError, SchemaMismatchError
from ods_async.wire.messages import LIMITS
from ods_async.wire.plain import SCALARS

__all__ = ["pack_rollout", "plan_rollout", "unpack_rollout"]

ALIGNMENT: Final = 64
_MAX_VIEWS: Final = 2**20
_BOOL: Final = np.dtype("bool")


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _layout(step_sizes: Sequence[int], lengths: Iterable[int]) -> tuple[list[tuple[int, ...]], int]:
    """Offsets per episode and field, and the size of it all, for fields of so many bytes a step."""
    offsets, end = [], 0
    for length in lengths:
        row = []
        for size in step_sizes:
            row.append(end)
            end += _aligned(length * size)
        offsets.append(tuple(row))
    return offsets, end


# --- sending --------------------------------------------------------------------------------------------------------


def plan_rollout(
    rollout: Rollout, fields: Iterable[FieldSpec | FieldDescription], limits: Limits = LIMITS
) -> tuple[RolloutReport, int]:
    """The header of ``rollout``, and how many bytes its payload needs.

    Args:
        rollout: whole episodes; their arrays may have any strides.
        fields: what the worker records, in the order it told in its ``Hello``.
        limits: the broker's.

    Raises:
        SchemaMismatchError: an array that is missing, unknown, or has another dtype, shape or length; nothing is cast.
        LimitExceededError: more than the broker takes; it names both sizes.
    """
    described = tuple(FieldDescription(f.path, f.dtype, f.shape, f.pad, 0) for f in fields)
    _check_limit("fields of a rollout", len(described), limits.schema_fields, "schema_fields")
    _check_limit("episodes of a rollout", len(rollout.episodes), limits.episodes_per_rollout, "episodes_per_rollout")
    for field in described:
        if field.dtype not in SCALARS:
            raise _mismatch(field.path, f"one of {', '.join(SCALARS)}", field.dtype)
    for episode in rollout.episodes:
        _check_arrays(episode, described)
    sizes = [SCALARS[f.dtype].itemsize * math.prod(f.shape) for f in described]
    offsets, payload_bytes = _layout(sizes, [episode.length for episode in rollout.episodes])
    _check_limit("bytes of a rollout", payload_bytes, limits.rollout_bytes, "rollout_bytes")
    report = RolloutReport(
        worker_id=rollout.worker_id,
        ticket_id=rollout.ticket_id,
        attempts=rollout.attempts,
        production_seconds=rollout.production_seconds,
        payload_bytes=payload_bytes,
        fields=described,
        episodes=tuple(
            EpisodeReport(
                length=episode.length,
                offsets=row,
                segments=tuple(
                    SegmentReport(s.name, s.start, s.end, s.instruction, s.accepted, s.target) for s in episode.segments
                ),
                instruction=episode.instruction,
                metadata=dict(episode.metadata),
            )
            for episode, row in zip(rollout.episodes, offsets, strict=True)
        ),
    )
    return report, payload_bytes


def _check_limit(what: str, size: int, limit: int, setting: str) -> None:
    if size > limit:
        raise LimitExceededError(
            f"{size} {what}, the broker takes at most {limit}; send less at a time, or raise {setting} at the broker",
            what=what,
            size=size,
            limit=limit,
        )


def _mismatch(path: Path, expected: str, found: str) -> SchemaMismatchError:
    name = path_text(path)
    return SchemaMismatchError(
        f"field {name}: expected {expected}, found {found}; nothing is cast on the way, so record what the schema says",
        field=name,
        expected=expected,
        found=found,
    )


def _check_arrays(episode: Episode, fields: tuple[FieldDescription, ...]) -> None:
    if episode.length < 1:
        raise SchemaMismatchError(
            f"an episode of {episode.length} steps; the shortest has 1",
            field="length",
            expected="at least 1",
            found=str(episode.length),
        )
    for field in fields:
        array = episode.arrays.get(field.path)
        expected = f"{field.dtype} {[episode.length, *field.shape]}"
        if not isinstance(array, np.ndarray):
            raise _mismatch(field.path, expected, "nothing" if array is None else f"a {type(array).__name__}")
        if array.dtype != SCALARS[field.dtype] or array.shape != (episode.length, *field.shape):
            raise _mismatch(field.path, expected, f"{_dtype_text(array)} {list(array.shape)}")
    if len(episode.arrays) != len(fields):
        known = {field.path for field in fields}
        raise _mismatch(next(p for p in episode.arrays if p not in known), "no such field", "a field nobody announced")


def _dtype_text(array: Array) -> str:
    return array.dtype.name if array.dtype.isnative else f"{array.dtype.name} in foreign byte order"


def pack_rollout(rollout: Rollout, report: RolloutReport, out: memoryview) -> None:
    """Write the payload that ``report`` (of :func:`plan_rollout`) describes: the one copy on the worker's side.

    Args:
        rollout: the rollout that was planned.
        report: its header.
        out: writable memory of exactly ``report.payload_bytes`` bytes; gaps are zeroed.
    """
    target = np.frombuffer(out, np.uint8)
    if target.nbytes != report.payload_bytes:
        raise ValueError(f"the payload needs {report.payload_bytes} bytes, found room for {target.nbytes}")
    for episode, header in zip(rollout.episodes, report.episodes, strict=True):
        for field, offset in zip(report.fields, header.offsets, strict=True):
            shape, dtype = (header.length, *field.shape), SCALARS[field.dtype]
            array = episode.arrays[field.path]
            if array.shape != shape:
                raise _mismatch(field.path, str(list(shape)), str(list(array.shape)))
            end = offset + math.prod(shape) * dtype.itemsize
            np.copyto(target[offset:end].view(dtype).reshape(shape), array, casting="no")
            target[end : _aligned(end)] = 0


# --- receiving ------------------------------------------------------------------------------------------------------


def unpack_rollout(report: RolloutReport, payload: memoryview, limits: Limits = LIMITS) -> Rollout:
    """The rollout whose header is ``report``; its arrays are read-only views of ``payload``, which they keep alive.

    Sizes are checked against ``limits``, against the header and against each other before any view is made. Whether the
    fields are the buffer's, and the segments in order, is for ``Episode.check`` to say.

    Raises:
        ProtocolError: header and payload disagree; ``reason`` has both numbers, ``ticket_id`` and ``worker_id`` whose
            rollout it is.
    """
    try:
        return _unpack(report, payload, limits)
    except _BadRolloutError as bad:
        raise ProtocolError(
            f"malformed rollout of ticket {report.ticket_id} from worker {report.worker_id[:80]!r}: {bad}",
            reason=str(bad),
            ticket_id=report.ticket_id,
            worker_id=report.worker_id,
        ) from None


class _BadRolloutError(Exception):
    """What is wrong, in words."""


def _at_most(what: str, size: int, limit: int) -> None:
    if size > limit:
        raise _BadRolloutError(f"{size} {what}, at most {limit} are taken")


def _unpack(report: RolloutReport, payload: memoryview, limits: Limits) -> Rollout:
    fields, episodes = report.fields, report.episodes
    _at_most("bytes", report.payload_bytes, limits.rollout_bytes)
    if payload.nbytes != report.payload_bytes:
        raise _BadRolloutError(f"{report.payload_bytes} bytes announced, {payload.nbytes} bytes received")
    _at_most("fields", len(fields), limits.schema_fields)
    _at_most("episodes", len(episodes), limits.episodes_per_rollout)
    _at_most("arrays", len(fields) * len(episodes), _MAX_VIEWS)
    if not episodes or not fields:
        raise _BadRolloutError(f"{len(episodes)} episodes of {len(fields)} fields; at least one of each is expected")
    if report.attempts < 1 or not 0 <= report.production_seconds < math.inf:
        raise _BadRolloutError(f"{report.attempts} attempts in {report.production_seconds} seconds")
    sizes = [_step_nbytes(field, limits) for field in fields]
    try:
        EpisodeSchema(tuple(FieldSpec(f.path, f.dtype, f.shape, f.pad) for f in fields))
    except SchemaMismatchError as error:
        raise _BadRolloutError(error.message) from None
    for index, episode in enumerate(episodes):
        if episode.length < 1:
            raise _BadRolloutError(f"episode {index} has {episode.length} steps; the shortest has 1")
        if len(episode.offsets) != len(fields):
            raise _BadRolloutError(f"episode {index} has {len(episode.offsets)} offsets for {len(fields)} fields")
    layout, needed = _layout(sizes, [episode.length for episode in episodes])
    if needed != report.payload_bytes:
        raise _BadRolloutError(
            f"{sum(e.length for e in episodes)} steps in {len(episodes)} episodes need {needed} bytes, "
            f"{report.payload_bytes} bytes came"
        )
    for index, (episode, expected) in enumerate(zip(episodes, layout, strict=True)):
        if episode.offsets != expected:
            at = next(i for i, pair in enumerate(zip(episode.offsets, expected, strict=True)) if pair[0] != pair[1])
            raise _BadRolloutError(
                f"field {path_text(fields[at].path)} of episode {index} is said to lie at byte {episode.offsets[at]}; "
                f"by the lengths it lies at byte {expected[at]}"
            )
    return Rollout(
        ticket_id=report.ticket_id,
        worker_id=report.worker_id,
        episodes=tuple(_episode(episode, fields, payload) for episode in episodes),
        attempts=report.attempts,
        production_seconds=report.production_seconds,
    )


def _step_nbytes(field: FieldDescription, limits: Limits) -> int:
    if len(field.path) > limits.nesting:
        raise _BadRolloutError(f"a field {len(field.path)} levels deep, at most {limits.nesting} are taken")
    dtype = SCALARS.get(field.dtype)
    if dtype is None or min(field.shape, default=0) < 0:
        raise _BadRolloutError(f"field {path_text(field.path)} of {field.dtype[:40]} {list(field.shape)[:40]}")
    return dtype.itemsize * math.prod(field.shape)


def _episode(report: EpisodeReport, fields: tuple[FieldDescription, ...], payload: memoryview) -> Episode:
    arrays: dict[Path, Array] = {}
    for field, offset in zip(fields, report.offsets, strict=True):
        dtype = SCALARS[field.dtype]
        try:
            array = np.ndarray((report.length, *field.shape), dtype, payload, offset)
        except ValueError as error:  # zero-size, with other sizes beyond what numpy can count
            raise _BadRolloutError(f"field {path_text(field.path)}: {error}") from None
        array.flags.writeable = False
        if dtype == _BOOL and array.size and int(array.view(np.uint8).max()) > 1:
            raise _BadRolloutError(f"field {path_text(field.path)} is bool and holds bytes that are neither 0 nor 1")
        arrays[field.path] = array
    return Episode(
        length=report.length,
        arrays=arrays,
        segments=tuple(Segment(s.name, s.start, s.end, s.instruction, s.accepted, s.target) for s in report.segments),
        instruction=report.instruction,
        metadata=report.metadata,
    )
