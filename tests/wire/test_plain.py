from __future__ import annotations

import datetime
import enum
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from ods_async.core.reports import EpisodeReport, RolloutReport
from ods_async.core.requests import Limits
from ods_async.errors import ArgumentError, LimitExceededError
from ods_async.wire import codec
from ods_async.wire.plain import check_plain
from tests.wire.strategies import PLAIN_DICTS, same


def through_the_wire(metadata: dict[str, object]) -> object:
    report = RolloutReport("w", 1, 1, 0.5, 0, (), (EpisodeReport(3, (), (), None, metadata),))
    back = codec.decode_report(codec.encode_report(report))
    assert isinstance(back, RolloutReport)
    return back.episodes[0].metadata


@given(PLAIN_DICTS)
@settings(max_examples=200, deadline=None)
def test_plain_values_come_back_equal_and_of_the_same_type(metadata: dict[str, object]) -> None:
    """C26"""
    check_plain(metadata, "metadata")
    assert same(through_the_wire(metadata), metadata)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**63),
        2**63 - 1,
        2**63,
        2**64,
        -(2**63) - 1,
        2**1022,
        -(2**1000),
        np.random.SeedSequence(7).entropy,
        np.random.SeedSequence().entropy,
        -0.0,
        float("nan"),
        float("-inf"),
        "",
        "place the cup ☕",
        b"\x80\x04.",
        (),
        [],
        {},
        (1, 2),
        [1, (2, [3, ()])],
        (True, 1, 1.0),
        [True, False],
        {"": {"a/b": ("x",)}},
        np.float32(0.1),
        np.float64(0.1),
        np.float16("nan"),
        np.int64(-5),
        np.int8(-128),
        np.uint64(2**64 - 1),
        np.bool_(True),
        np.complex64(1 + 2j),
    ],
    ids=repr,
)
def test_everyday_values_come_back_equal_and_of_the_same_type(value: object) -> None:
    """C26"""
    assert same(through_the_wire({"key": value, "list": [value]}), {"key": value, "list": [value]})


class _Colour(enum.IntEnum):
    RED = 1


_CYCLE: list[object] = []
_CYCLE.append(_CYCLE)


def _nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        np.zeros(()),
        np.zeros(3),
        np.longdouble(1),
        np.longlong(1),
        np.str_("x"),
        np.datetime64("2020-01-01"),
        {1: "a"},
        {("a",): 1},
        {None: 1},
        {np.str_("a"): 1},
        {1, 2},
        frozenset(),
        datetime.datetime(2020, 1, 1),
        Path("x"),
        2**1023,
        -(2**5000),
        "a\ud800",
        {"a\ud800": 1},
        _nested(40),
        _CYCLE,
        object(),
        bytearray(b"x"),
        memoryview(b"x"),
        OrderedDict(a=1),
        _Colour.RED,
        range(3),
        Limits(),
        len,
        ...,
    ],
    ids=lambda value: type(value).__name__,
)
def test_everything_else_is_refused_at_the_sender_with_the_key_path(value: object) -> None:
    """C26"""
    with pytest.raises(ArgumentError) as caught:
        check_plain({"fine": 1, "outer": {"inner": [0, value]}}, "metadata")
    assert caught.value.argument.startswith("metadata/outer/inner/1")
    assert caught.value.argument in str(caught.value)
    assert len(str(caught.value)) < 500
    str(caught.value).encode()
    with pytest.raises(ArgumentError) as caught:
        through_the_wire({"outer": value})
    assert caught.value.argument.startswith("RolloutReport/episodes/0/metadata/outer")


def test_a_key_of_the_wrong_type_is_named() -> None:
    """C26"""
    with pytest.raises(ArgumentError, match=r"metadata/a/1: a key of type int cannot be sent; use text"):
        check_plain({"a": {1: "x"}}, "metadata")


def test_nesting_is_allowed_up_to_the_limit() -> None:
    limits = Limits(nesting=5)
    check_plain({"a": _nested(4)}, "metadata", limits)
    with pytest.raises(ArgumentError, match="nested too deeply"):
        check_plain({"a": _nested(5)}, "metadata", limits)


def test_long_texts_are_refused_with_both_sizes() -> None:
    """C43"""
    check_plain({"a": "é" * 5}, "metadata", Limits(text_bytes=10))
    with pytest.raises(LimitExceededError) as caught:
        check_plain({"a": ["é" * 6]}, "metadata", Limits(text_bytes=10))
    fields: Any = caught.value
    assert (fields.what, fields.size, fields.limit) == ("metadata/a/0", 12, 10)


@pytest.mark.parametrize("value", [None, 1, "x", [("a", 1)], {1, 2}])
def test_the_whole_must_be_a_mapping(value: Any) -> None:
    with pytest.raises(ArgumentError, match="metadata: expected a dict"):
        check_plain(value, "metadata")
