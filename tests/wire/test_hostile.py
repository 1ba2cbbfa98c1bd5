"""Law 6: whatever arrives, decoding returns a valid message or raises ProtocolError, in bounded memory."""

from __future__ import annotations

import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ods_async.core.requests import Connect, Limits, Plan, Plans, Sample, Stats
from ods_async.errors import OdsError, ProtocolError
from ods_async.wire import codec
from ods_async.wire.messages import PROTOCOL, REQUESTS
from tests.wire.strategies import of_class

DECODERS: dict[str, Callable[[bytes], Any]] = {
    "request": codec.decode_request,
    "answer": codec.decode_answer,
    "report": codec.decode_report,
    "ticket": codec.decode_ticket,
    "broadcast": lambda data: codec.decode_broadcast(b"beat", data),
    "error": codec.decode_error,
}
every_decoder = pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS.keys())
SAMPLE = codec.encode_request(5, 1.0, Sample(64, 32))


def request_of(tag: object, body: object, request_id: object = 5, timeout: object = 1.0) -> bytes:
    data: bytes = msgpack.packb([PROTOCOL, request_id, timeout, tag, body])
    return data


def body_of(**changes: object) -> list[object]:
    names = list(Sample.__dataclass_fields__)
    values: list[object] = [64, 32, "episode", 0, 0, [], None, 1, False, [], [], 0]
    for name, value in changes.items():
        values[names.index(name)] = value
    return values


def refused(data: bytes) -> ProtocolError:
    with pytest.raises(ProtocolError) as caught:
        codec.decode_request(data)
    assert caught.value.reason
    assert len(str(caught.value)) < 1000, "messages stay short whatever was sent"
    return caught.value


@every_decoder
def test_random_bytes(decode: Callable[[bytes], Any]) -> None:
    @settings(max_examples=100, deadline=None)
    @given(st.binary(max_size=200) | st.binary(max_size=50).map(lambda tail: bytes([0x93, PROTOCOL]) + tail))
    def check(data: bytes) -> None:
        with pytest.raises(ProtocolError):
            decode(data)

    check()


LEAVES = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary()
TREES = st.recursive(LEAVES, lambda t: st.lists(t, max_size=5) | st.dictionaries(st.text(max_size=3), t, max_size=3))


@given(st.sampled_from(sorted(REQUESTS)), TREES)
@settings(max_examples=200, deadline=None)
def test_any_structure_under_a_valid_tag(tag: str, body: object) -> None:
    try:
        data = request_of(tag, body)
    except UnicodeEncodeError:
        return
    try:
        _, _, request = codec.decode_request(data)
    except ProtocolError:
        return
    assert type(request).__name__ == tag
    assert codec.decode_request(codec.encode_request(5, 1.0, request))[2] == request


def test_every_truncation_is_refused() -> None:
    for end in range(len(SAMPLE)):
        refused(SAMPLE[:end])
    refused(SAMPLE + b"\x00")


@given(of_class(Plans), st.data())
@settings(max_examples=60, deadline=None)
def test_flipped_bytes_give_a_valid_message_or_a_refusal(plans: Plans, data: st.DataObject) -> None:
    frame = bytearray(codec.encode_answer(1, plans))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        _, answer = codec.decode_answer(bytes(frame))
    except ProtocolError:
        return
    assert isinstance(answer, Plans)
    assert all(len(plan.rows) == 4 * plan.batch_size for plan in answer.plans)


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": True},
        {"batch_size": 64.0},
        {"batch_size": "64"},
        {"batch_size": None},
        {"batch_size": 2**63},
        {"batch_size": 2**64 - 1},
        {"length": [32]},
        {"mode": b"episode"},
        {"mode": 1},
        {"frame": 1},
        {"frame": None},
        {"generations": None},
        {"generations": "12"},
        {"generations": b"12"},
        {"generations": {}},
        {"generations": [True]},
        {"generations": [1, 2**63]},
        {"generations": [[1]]},
        {"release": [1.0]},
        {"seed": 1.5},
        {"seed": False},
    ],
    ids=repr,
)
def test_wrong_types_are_refused_naming_the_field(change: dict[str, object]) -> None:
    error = refused(request_of("Sample", body_of(**change)))
    assert f"Sample/{next(iter(change))}" in error.reason
    assert error.request_id == 5


@pytest.mark.parametrize("count", [0, 1, 11, 13, 500])
def test_missing_and_surplus_fields_are_refused(count: int) -> None:
    assert "12 fields" in refused(request_of("Sample", (body_of() * 60)[:count])).reason


@pytest.mark.parametrize(
    "tag",
    ["", "Nothing", "Welcome", "Ticket", "ErrorReport", "__class__", "object", 1, None, b"Sample", ["Sample"], {}],
)
def test_unknown_and_misplaced_tags_are_refused(tag: object) -> None:
    refused(request_of(tag, body_of()))


@pytest.mark.parametrize("request_id", [-1, 2**63, True, 1.0, "1", None, [1]])
def test_bad_request_ids_are_refused(request_id: object) -> None:
    assert refused(request_of("Describe", [], request_id=request_id)).request_id is None


@pytest.mark.parametrize("timeout", [-1.0, float("nan"), float("inf"), 1, True, None, "1"])
def test_bad_time_outs_are_refused_and_can_be_answered(timeout: object) -> None:
    assert refused(request_of("Describe", [], timeout=timeout)).request_id == 5


@pytest.mark.parametrize(
    "parts", [[], [PROTOCOL], [PROTOCOL, 5, 1.0, "Describe"], [PROTOCOL, 5, 1.0, "Describe", [], 1]]
)
def test_a_wrong_number_of_parts_is_refused(parts: list[object]) -> None:
    refused(msgpack.packb(parts))


@pytest.mark.parametrize("version", [0, -1, 2**64 - 1, True, 1.0, None, "1"])
def test_a_wrong_version_is_refused(version: object) -> None:
    refused(msgpack.packb([version, 5, 1.0, "Describe", []]))


def test_no_maps_exist_on_this_wire() -> None:
    refused(request_of("Sample", body_of(mode={"a": 1})))
    refused(msgpack.packb({"a": 1}))
    refused(msgpack.packb({}))
    refused(b"\xdf\xff\xff\xff\xff" + bytes(100))
    refused(msgpack.packb([PROTOCOL, {str(i): i for i in range(10_000)}]))


def _extensions() -> list[bytes]:
    found = [b"\xd6\xff" + bytes(4), b"\xd7\xff" + bytes(8), b"\xc7\x0c\xff" + bytes(12)]  # timestamps
    for code in (0, 1, 42, 127, 255):
        found += [b"\xc7\x00" + bytes([code]), b"\xd4" + bytes([code, 0]), b"\xd8" + bytes([code]) + bytes(16)]
        found += [b"\xc8\x01\x00" + bytes([code]) + bytes(256), b"\xc9\x00\x01\x00\x00" + bytes([code]) + bytes(65_536)]
    return found


@every_decoder
def test_no_extension_types_exist_on_this_wire(decode: Callable[[bytes], Any]) -> None:
    """C45: neither timestamps nor others, of any size, are looked into, wherever they stand."""
    stats = msgpack.packb([PROTOCOL, 1, "Stats", [1, 2, 3, 4, 5, 6, 7.0, 8, 9, [2, "a", 0]]])[:-1]
    for extension in _extensions():
        for data in (extension, b"\x93" + bytes([PROTOCOL]) + extension + b"\x01", stats + extension):
            with pytest.raises(ProtocolError):
                decode(data)


class _Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@every_decoder
@pytest.mark.parametrize("protocol", range(6))
def test_pickles_are_never_loaded(decode: Callable[[bytes], Any], protocol: int, tmp_path: Path) -> None:
    """C45"""
    marker = tmp_path / "marker"
    bomb = pickle.dumps(_Bomb(marker), protocol)
    for data in (
        bomb,
        msgpack.packb(bomb),
        msgpack.packb([PROTOCOL, bomb, bomb, bomb]),
        bytes([0x91, PROTOCOL]) + bomb,
    ):
        with pytest.raises(ProtocolError):
            decode(data)
    fields: Any = {"pickle": bomb, "code": "__import__('os').mkdir('x')"}
    for module in ("os", "posix", "builtins", "ods_async.errors"):
        report = [module, "mkdir", str(marker), [2, "arguments", [1, str(marker)]], []]
        error = codec.decode_error(msgpack.packb([PROTOCOL, "ErrorReport", report]))
        assert isinstance(error, OdsError)
    _, stats = codec.decode_answer(codec.encode_answer(1, Stats(1, 2, 3, 4, 5, 6, 7.0, 8, 9, fields)))
    assert isinstance(stats, Stats)
    assert stats.extra == fields
    assert not marker.exists()


@pytest.mark.parametrize("depth", [17, 100, 500, 1_000, 5_000, 100_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x92\x00", b"\x93\x02\xa1a"])
def test_deep_nesting_is_refused(depth: int, opening: bytes) -> None:
    head = bytes([0x95, PROTOCOL]) + b"\x05\xcb" + struct.pack(">d", 1.0)
    refused(head + b"\xa6Sample" + opening * depth + b"\x90")
    stats = bytes([0x94, PROTOCOL]) + b"\x05\xa5Stats" + b"\x9a" + bytes(6) + b"\xcb" + bytes(8) + bytes(2)
    with pytest.raises(ProtocolError):
        codec.decode_answer(stats + opening * depth + b"\xc0")


LIARS = {
    "array of 4 G": b"\xdd\xff\xff\xff\xff",
    "array of 64 K": b"\xdc\xff\xff",
    "text of 4 G": b"\xdb\xff\xff\xff\xff",
    "bytes of 4 G": b"\xc6\xff\xff\xff\xff",
    "map of 4 G": b"\xdf\xff\xff\xff\xff",
    "extension of 4 G": b"\xc9\xff\xff\xff\xff\x01",
}


@pytest.mark.parametrize("lie", LIARS.values(), ids=LIARS.keys())
@pytest.mark.parametrize("filler", [0, 100, 1_000, 200_000])
def test_lying_sizes_are_refused_before_anything_is_reserved(lie: bytes, filler: int) -> None:
    tracemalloc.start()
    try:
        refused(lie + bytes(filler))
        refused(b"\x91" + lie + bytes(filler))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000 + 4 * filler


@pytest.mark.parametrize("levels", [100, 400, 2_000])
def test_sizes_that_lie_on_every_level_do_not_multiply(levels: int) -> None:
    """Each level announces as many elements as the frame has bytes; believed, this is levels * frame * 8 bytes."""
    size = 1_000_000
    data = (b"\xdd" + struct.pack(">I", size // 2)) * levels
    data += bytes(size - len(data))
    tracemalloc.start()
    try:
        refused(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000


def test_many_small_things_stay_in_bounded_memory() -> None:
    limits = Limits(header_bytes=100_000)
    for item in (b"\x90", b"\x80", b"\xc0", b"\x91\x00", b"\xa2ab", b"\xcd\x10\x00"):
        count = 90_000 // len(item)
        data = b"\xdd" + struct.pack(">I", count) + item * count
        tracemalloc.start()
        try:
            with pytest.raises(ProtocolError):
                codec.decode_report(data, limits)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 80 * limits.header_bytes


def test_texts_over_the_limit_are_refused() -> None:
    """C43"""
    limits = Limits(text_bytes=10)
    codec.decode_request(codec.encode_request(1, 1.0, Connect("0123456789", "x", "y", 1)), limits)
    with pytest.raises(ProtocolError):
        codec.decode_request(codec.encode_request(1, 1.0, Connect("0123456789a", "x", "y", 1)), limits)


@pytest.mark.parametrize("text", [b"\xa2\xc3\x28", b"\xa3\xed\xa0\x80", b"\xa1\xff"])
def test_texts_that_are_not_utf8_are_refused(text: bytes) -> None:
    data = SAMPLE.replace(b"\xa7episode", text)
    assert data != SAMPLE
    refused(data)


@pytest.mark.parametrize(
    "wrong", [None, 1, b"", "x", [], [1, 2], [2, "a"], [2, 1, 1], [2, "a", 1, "a", 2], [9], [True, "a", 1]]
)
def test_free_form_fields_must_be_dicts_that_say_so(wrong: object) -> None:
    body = [1, 2, 3, 4, 5, 6, 7.0, 8, 9, wrong]
    with pytest.raises(ProtocolError, match="Stats/extra"):
        codec.decode_answer(msgpack.packb([PROTOCOL, 1, "Stats", body]))


@pytest.mark.parametrize(
    "item",
    [
        *([], [5, 1], [None], ["x"], [[0]], [2**63], 2**63),
        *([3], [3, b""], [3, b"\x01"], [3, bytes(9)], [3, bytes(8)], [3, b"\x01" * 129], [3, "x"], [3, 5]),
        *(
            [4],
            [4, "float32"],
            [4, "float32", b"123"],
            [4, "object", bytes(8)],
            [4, "O", bytes(8)],
            [4, "V4", bytes(4)],
        ),
        *(
            [4, "bool", b"\x02"],
            [4, "datetime64[s]", bytes(8)],
            [4, "<f4", bytes(4)],
            [4, "f4,f4", bytes(8)],
            [4, 4, b""],
        ),
        [4, "float32", bytes(4), 1],
    ],
    ids=repr,
)
def test_malformed_free_form_values_are_refused(item: object) -> None:
    body = [1, 2, 3, 4, 5, 6, 7.0, 8, 9, [2, "a", item]]
    with pytest.raises(ProtocolError, match="Stats/extra"):
        codec.decode_answer(msgpack.packb([PROTOCOL, 1, "Stats", body]))


@pytest.mark.parametrize(
    "dtype", ["object", "O", "V8", "S4", "U1", "M8[s]", ">f4", "f4,f4", "bfloat16", "float128", "x" * 60_000]
)
def test_fields_of_foreign_dtypes_are_refused(dtype: str) -> None:
    """C27: only dtypes that everyone has, by their exact name."""
    body = ["w", 1, "h", 1, [[["obs"], dtype, [3], 0, 0]], "env", 0]
    with pytest.raises(ProtocolError, match="Hello/fields/0/dtype") as caught:
        codec.decode_report(msgpack.packb([PROTOCOL, "Hello", body]))
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("shape", [[-1], [3, -2], [1] * 33, [2**62, 2], [2**31] * 3, [2**40, 2**40, 2**40]])
def test_fields_of_impossible_shapes_are_refused(shape: list[int]) -> None:
    body = ["w", 1, "h", 1, [[["obs"], "float32", shape, 0, 0]], "env", 0]
    with pytest.raises(ProtocolError, match="Hello/fields/0/shape"):
        codec.decode_report(msgpack.packb([PROTOCOL, "Hello", body]))


def test_a_valid_plan_among_the_hostile_ones() -> None:
    plans = Plans((Plan(1, 2, 3, 0, bytes(8), bytes(8), b"", b"", bytes(16)),), (0, 0))
    assert codec.decode_answer(codec.encode_answer(1, plans)) == (1, plans)


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x00", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, bytes(2_000), b"\xc1" * 2_000]
)
@every_decoder
def test_noise(decode: Callable[[bytes], Any], data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)
