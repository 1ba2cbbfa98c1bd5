from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ods_async.core.episode import Episode, Rollout, Segment, recorded_schema
from ods_async.core.reports import RolloutReport
from ods_async.core.requests import FieldDescription, Limits
from ods_async.core.schema import FieldSpec
from ods_async.errors import LimitExceededError, ProtocolError, SchemaMismatchError
from ods_async.wire import codec
from ods_async.wire.plain import SCALARS
from ods_async.wire.rollout import pack_rollout, plan_rollout, unpack_rollout
from tests.wire.strategies import same

SCHEMA = recorded_schema(
    (
        FieldSpec(("obs", "image"), "uint8", (5, 7, 3)),
        FieldSpec(("obs", "qpos"), "float64", (9,)),
        FieldSpec(("obs", "nothing"), "float32", (0, 4)),
        FieldSpec(("actions",), "float32", (4,)),
    )
)


def random_array(spec: FieldSpec, length: int, rng: np.random.Generator) -> Any:
    shape = (length, *spec.shape)
    data = rng.integers(0, 256, int(np.prod(shape)) * spec.itemsize, dtype=np.uint8)
    if spec.dtype == "bool":
        data &= 1
    return data.view(spec.dtype).reshape(shape)


def make_rollout(lengths: tuple[int, ...] = (6, 11), fields: Any = SCHEMA) -> Rollout:
    rng = np.random.default_rng(sum(lengths))
    return Rollout(
        ticket_id=17,
        worker_id="w7",
        episodes=tuple(
            Episode(
                length=length,
                arrays={spec.path: random_array(spec, length, rng) for spec in fields},
                segments=(
                    Segment("reach", 0, length // 2, "reach it", True, None),
                    Segment("hold", length // 2, length),
                ),
                instruction="pick ☕",
                metadata={"seed": 2**70, "pair": (1, 2.5), "f": np.float32(3)},
            )
            for length in lengths
        ),
        attempts=2,
        production_seconds=1.5,
    )


def with_array(rollout: Rollout, path: tuple[str, ...], array: Any) -> Rollout:
    first, *rest = rollout.episodes
    changed = dataclasses.replace(first, arrays={**first.arrays, path: array})
    return dataclasses.replace(rollout, episodes=(changed, *rest))


def send(rollout: Rollout, fields: Any = SCHEMA) -> tuple[RolloutReport, bytearray]:
    report, size = plan_rollout(rollout, fields)
    payload = bytearray(b"\xaa" * size)
    pack_rollout(rollout, report, memoryview(payload))
    received = codec.decode_report(codec.encode_report(report))
    assert isinstance(received, RolloutReport)
    return received, payload


def refused(report: RolloutReport, payload: bytes | bytearray, limits: Limits | None = None) -> str:
    with pytest.raises(ProtocolError) as caught:
        unpack_rollout(report, memoryview(payload), limits or Limits())
    assert (caught.value.ticket_id, caught.value.worker_id) == (report.ticket_id, report.worker_id)
    return str(caught.value.reason)


def equal(a: Rollout, b: Rollout) -> bool:
    bare = [
        dataclasses.replace(r, episodes=tuple(dataclasses.replace(e, arrays={}) for e in r.episodes)) for r in (a, b)
    ]
    arrays = [[(p, x.dtype, x.shape, x.tobytes()) for e in r.episodes for p, x in e.arrays.items()] for r in (a, b)]
    return same(*bare) and arrays[0] == arrays[1]


def test_a_rollout_comes_back_equal_as_read_only_views_of_the_payload() -> None:
    rollout = make_rollout()
    report, payload = send(rollout)
    back = unpack_rollout(report, memoryview(payload))
    assert equal(back, rollout)
    whole = np.frombuffer(payload, np.uint8)
    for episode in back.episodes:
        for array in episode.arrays.values():
            assert not array.flags.writeable
            assert array.size == 0 or np.shares_memory(array, whole)
        episode.check(SCHEMA, 11)


def test_the_payload_is_deterministic_aligned_and_leaks_nothing() -> None:
    rollout = make_rollout()
    report, payload = send(rollout)
    assert all(offset % 64 == 0 for episode in report.episodes for offset in episode.offsets)
    used = np.zeros(len(payload), bool)
    for episode in report.episodes:
        for field, offset in zip(report.fields, episode.offsets, strict=True):
            used[offset : offset + episode.length * SCALARS[field.dtype].itemsize * int(np.prod(field.shape))] = True
    assert not np.frombuffer(payload, np.uint8)[~used].any(), "gaps are zeroed"


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    st.lists(
        st.tuples(st.sampled_from(sorted(SCALARS)), st.lists(st.integers(0, 4), max_size=3)), min_size=1, max_size=4
    ),
)
@settings(max_examples=60, deadline=None)
def test_any_fields_and_lengths_come_back_equal(lengths: tuple[int, ...], kinds: list[tuple[str, list[int]]]) -> None:
    """C27: identical dtype, shape and bytes for every dtype there is, special values included."""
    fields = tuple(FieldSpec((f"f{i}",), dtype, tuple(shape)) for i, (dtype, shape) in enumerate(kinds))
    rollout = make_rollout(lengths, fields)
    report, payload = send(rollout, fields)
    assert equal(unpack_rollout(report, memoryview(bytes(payload))), rollout)


@pytest.mark.parametrize(
    "view",
    [
        np.ascontiguousarray,
        np.asfortranarray,
        lambda a: a[::-1][::-1],
        lambda a: np.ascontiguousarray(a[:, ::-1])[:, ::-1],
        lambda a: np.repeat(a, 2, axis=0)[::2],
        lambda a: np.ascontiguousarray(a.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1),
    ],
)
def test_arrays_of_any_strides_are_sent_as_they_look(view: Any) -> None:
    """C27"""
    rollout = make_rollout()
    image = rollout.episodes[0].arrays["obs", "image"]
    report, payload = send(with_array(rollout, ("obs", "image"), view(image)))
    assert equal(unpack_rollout(report, memoryview(payload)), rollout)


def test_a_broadcast_array_is_sent_as_it_looks() -> None:
    """C27"""
    array = np.broadcast_to(np.arange(9.0), (6, 9))
    report, payload = send(with_array(make_rollout(), ("obs", "qpos"), array))
    back = unpack_rollout(report, memoryview(payload)).episodes[0].arrays["obs", "qpos"]
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    ("array", "found"),
    [
        (np.zeros((6, 9), np.float32), "float32 [6, 9]"),
        (np.zeros((6, 9), ">f8"), "float64 in foreign byte order"),
        (np.zeros((6, 9), np.int64), "int64 [6, 9]"),
        (np.zeros((6, 9), object), "object"),
        (np.zeros((5, 9)), "[5, 9]"),
        (np.zeros((7, 9)), "[7, 9]"),
        (np.zeros((1, 9)), "[1, 9]"),
        (np.zeros((6, 1)), "[6, 1]"),
        (np.zeros((6, 9, 1)), "[6, 9, 1]"),
        ([[0.0] * 9] * 6, "a list"),
        (None, "nothing"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_worker_refuses_to_send_what_does_not_fit(array: Any, found: str) -> None:
    """C27, C38: naming the field, the expected and the found."""
    with pytest.raises(SchemaMismatchError) as caught:
        plan_rollout(with_array(make_rollout(), ("obs", "qpos"), array), SCHEMA)
    assert caught.value.field == "obs/qpos"
    assert caught.value.expected == "float64 [6, 9]"
    assert found in caught.value.found


def test_a_worker_refuses_surplus_and_missing_fields() -> None:
    rollout = make_rollout()
    with pytest.raises(SchemaMismatchError, match="field more"):
        plan_rollout(with_array(rollout, ("more",), np.zeros(6)), SCHEMA)
    with pytest.raises(SchemaMismatchError, match="field more"):
        plan_rollout(rollout, (*SCHEMA, FieldSpec(("more",), "float32")))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "object", "float128", ">f4"])
def test_a_worker_refuses_dtypes_that_cannot_travel(dtype: str) -> None:
    """C27"""
    with pytest.raises(SchemaMismatchError, match="field obs") as caught:
        plan_rollout(make_rollout(), [FieldDescription(("obs",), dtype, (), 0, 0)])
    assert caught.value.found == dtype


def test_a_worker_refuses_an_empty_episode() -> None:
    """C25, C38"""
    with pytest.raises(SchemaMismatchError, match="0 steps"):
        plan_rollout(make_rollout((0,)), SCHEMA)


@pytest.mark.parametrize(
    "limits", [Limits(rollout_bytes=1000), Limits(episodes_per_rollout=1), Limits(schema_fields=3)], ids=repr
)
def test_a_worker_refuses_to_send_more_than_the_broker_takes(limits: Limits) -> None:
    """C43: with both sizes; and the broker refuses the same."""
    with pytest.raises(LimitExceededError) as caught:
        plan_rollout(make_rollout(), SCHEMA, limits)
    assert caught.value.size > caught.value.limit
    assert str(caught.value.limit) in str(caught.value)
    report, payload = send(make_rollout())
    assert f"at most {caught.value.limit} are taken" in refused(report, payload, limits)


def test_packing_needs_exactly_the_room() -> None:
    rollout = make_rollout()
    report, size = plan_rollout(rollout, SCHEMA)
    for wrong in (size - 1, size + 1, 0):
        with pytest.raises(ValueError, match=str(size)):
            pack_rollout(rollout, report, memoryview(bytearray(wrong)))


def test_an_array_that_changed_after_planning_is_not_broadcast() -> None:
    rollout = make_rollout()
    report, size = plan_rollout(rollout, SCHEMA)
    changed = with_array(rollout, ("obs", "qpos"), np.zeros((1, 9)))
    with pytest.raises(SchemaMismatchError, match="obs/qpos"):
        pack_rollout(changed, report, memoryview(bytearray(size)))


# --- what a receiver refuses ----------------------------------------------------------------------------------------


def altered(report: RolloutReport, episode: int = 0, **changes: Any) -> RolloutReport:
    episodes = list(report.episodes)
    episodes[episode] = dataclasses.replace(episodes[episode], **changes)
    return dataclasses.replace(report, episodes=tuple(episodes))


@pytest.mark.parametrize("delta", [-64, -1, 1, 64])
def test_a_payload_of_another_size_is_refused_with_both_numbers(delta: int) -> None:
    """C38"""
    report, payload = send(make_rollout())
    changed = bytes(payload) + bytes(delta) if delta > 0 else bytes(payload)[:delta]
    reason = refused(report, changed)
    assert str(len(payload)) in reason
    assert str(len(changed)) in reason
    lying = dataclasses.replace(report, payload_bytes=len(changed))
    reason = refused(lying, changed)
    assert str(len(payload)) in reason
    assert str(len(changed)) in reason


@pytest.mark.parametrize("length", [-(2**63), -1, 0, 5, 7, 12, 2**31, 2**62, 2**63 - 1])
def test_a_length_that_disagrees_with_the_data_is_refused(length: int) -> None:
    """C38"""
    report, payload = send(make_rollout())
    assert str(length) in refused(altered(report, length=length), payload) or length > 0


def test_lengths_that_are_swapped_are_refused() -> None:
    """C38: even though they sum up."""
    report, payload = send(make_rollout((6, 11)))
    swapped = altered(altered(report, 0, length=11), 1, length=6)
    refused(swapped, payload)


def test_offsets_are_compared_with_the_layout() -> None:
    """C38: out of bounds, overlapping, unaligned, negative, shuffled, too few, too many."""
    report, payload = send(make_rollout())
    good = list(report.episodes[0].offsets)
    for index in range(len(good)):
        for offset in (-64, 2**62, good[index] + 64, good[index] + 1, good[index] - 1, len(payload)):
            bad = (*good[:index], offset, *good[index + 1 :])
            assert str(offset) in refused(altered(report, offsets=bad), payload)
    refused(altered(report, offsets=tuple(reversed(good))), payload)
    assert "7 offsets for 8 fields" in refused(altered(report, offsets=tuple(good[:-1])), payload)
    assert "9 offsets for 8 fields" in refused(altered(report, offsets=(*good, 0)), payload)


@pytest.mark.parametrize(
    "field",
    [
        FieldDescription(("x",), "float32", (2**40,), 0, 0),
        FieldDescription(("x",), "float32", (-5,), 0, 0),
        FieldDescription(("x",), "float32", (0, 2**40, 2**40), 0, 0),
        FieldDescription(("x",), "object", (), 0, 0),
        FieldDescription(("actions",), "float32", (4,), 0, 0),
        FieldDescription(("obs",), "float32", (4,), 0, 0),
        FieldDescription(("obs", "qpos", "x"), "float32", (4,), 0, 0),
        FieldDescription(("a",) * 17, "float32", (4,), 0, 0),
    ],
    ids=repr,
)
def test_hostile_fields_are_refused(field: FieldDescription) -> None:
    report, payload = send(make_rollout())
    refused(dataclasses.replace(report, fields=(field, *report.fields[1:])), payload)
    refused(dataclasses.replace(report, fields=(*report.fields, field)), payload)


def test_a_rollout_of_nothing_is_refused() -> None:
    """C38"""
    report, _ = send(make_rollout())
    refused(dataclasses.replace(report, episodes=(), payload_bytes=0), b"")
    refused(dataclasses.replace(report, fields=(), payload_bytes=0), b"")
    refused(dataclasses.replace(report, episodes=report.episodes[:1]), b"")


def test_zero_size_fields_cannot_announce_impossible_lengths() -> None:
    fields = (FieldSpec(("x",), "float32", (0, 4)),)
    report, payload = send(make_rollout((3,), fields), fields)
    assert payload == b""
    refused(altered(report, length=2**62), payload)


@pytest.mark.parametrize(
    "changes", [{"attempts": 0}, {"production_seconds": -1.0}, {"production_seconds": float("nan")}], ids=repr
)
def test_impossible_figures_are_refused(changes: dict[str, Any]) -> None:
    report, payload = send(make_rollout())
    refused(dataclasses.replace(report, **changes), payload)


def test_bools_are_zero_or_one() -> None:
    report, payload = send(make_rollout())
    index = next(i for i, field in enumerate(report.fields) if field.path == ("terminated",))
    payload[report.episodes[0].offsets[index]] = 2
    assert "terminated" in refused(report, payload)


def test_four_gigabytes_by_header_only_are_refused() -> None:
    """C43"""
    report, payload = send(make_rollout())
    assert str(2**33) in refused(dataclasses.replace(report, payload_bytes=2**33), payload)
