"""Numbers, deadlines, and which bytes are the answer: without a socket or a clock."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from ods_async.core.requests import Batch, Cancel, Done, GetStats, Limits, Release, Sample, WaitReady, Welcome
from ods_async.errors import (
    ArgumentError,
    DataUnavailableError,
    OdsError,
    OnlineDataWorkerError,
    ProtocolError,
    RequestTimeoutError,
)
from ods_async.wire.asking import Asker, checked_timeout
from ods_async.wire.codec import decode_request, encode_answer
from ods_async.wire.messages import PROTOCOL

WELCOME = Welcome(7, PROTOCOL, "1", "READY", "", "", "", 0.5, 5.0, 5.0, Limits(), {})


def asked(asker: Asker, request: Any, timeout: float = 3.0) -> int:
    request_id, wire_timeout, seen = decode_request(asker.ask(request, now=100.0, deadline=100.0 + timeout))
    assert seen == request
    assert wire_timeout == pytest.approx(timeout)
    return request_id


def test_an_answer_is_taken_by_its_number_once() -> None:
    asker = Asker()
    number = asked(asker, WaitReady())
    answered = asker.receive([encode_answer(number, Done())])
    assert answered is not None
    assert answered.answer == Done()
    assert not asker.waiting
    assert asker.receive([encode_answer(number, Done())]) is None


def test_the_answer_to_an_older_question_is_dropped() -> None:
    asker = Asker()
    old = asked(asker, WaitReady())
    assert asker.give_up() is not None
    new = asked(asker, WaitReady())
    assert new != old
    assert asker.receive([encode_answer(old, Done())]) is None
    assert asker.waiting
    assert asker.receive([encode_answer(new, Done())]) is not None


def test_giving_up_tells_the_broker_and_only_when_something_is_waited_for() -> None:
    asker = Asker()
    assert asker.give_up() is None
    number = asked(asker, WaitReady())
    notice = asker.give_up()
    assert notice is not None
    assert decode_request(notice)[2] == Cancel(number)
    assert asker.give_up() is None


def test_a_notice_has_a_number_of_its_own() -> None:
    asker = Asker()
    number = asked(asker, WaitReady())
    told, _, notice = decode_request(asker.tell(Release((4,), (5,))))
    assert told != number
    assert notice == Release((4,), (5,))


def test_an_error_is_raised_with_class_text_and_fields() -> None:
    asker = Asker()
    number = asked(asker, Sample(3, 4))
    sent = DataUnavailableError("nothing here", mode="episode", length=4, holds="nothing")
    with pytest.raises(DataUnavailableError, match="nothing here") as caught:
        asker.receive([encode_answer(number, sent)])
    assert caught.value.length == 4
    assert not asker.waiting


def test_a_workers_builtin_error_is_raised_as_its_own_type_b11() -> None:
    asker = Asker()
    number = asked(asker, Sample(3, 4))
    sent = OnlineDataWorkerError(
        "ZeroDivisionError: by zero",
        module="builtins",
        type_name="ZeroDivisionError",
        detail="by zero",
        traceback_text="line 3",
        worker_id="w0",
        phase="step",
        step=7,
    )
    with pytest.raises(ZeroDivisionError, match="by zero") as caught:
        asker.receive([encode_answer(number, sent)])
    assert isinstance(caught.value.__cause__, OnlineDataWorkerError)


@pytest.mark.parametrize("frames", [[], [b"x", b"y", b"z"], [b"\x93\x00"], [b""]])
def test_what_is_no_answer_is_a_protocol_error_c45(frames: list[bytes]) -> None:
    asker = Asker()
    asked(asker, WaitReady())
    with pytest.raises(ProtocolError):
        asker.receive(frames)
    asked(asker, WaitReady())


@pytest.mark.parametrize("payload", [None, b"", b"12345678"])
def test_a_payload_of_another_size_than_announced_is_refused_c38(payload: bytes | None) -> None:
    asker = Asker()
    number = asked(asker, Sample(3, 4, frame=True))
    header = encode_answer(number, Batch(3, 4, 0, 9, (0, 0)))
    with pytest.raises(ProtocolError, match="9 bytes"):
        asker.receive([header] if payload is None else [header, payload])


def test_a_payload_that_was_not_announced_is_refused() -> None:
    asker = Asker()
    number = asked(asker, GetStats())
    with pytest.raises(ProtocolError, match="none"):
        asker.receive([encode_answer(number, Done()), b"extra"])


def test_the_brokers_limits_hold_once_it_has_told_them_c43() -> None:
    asker = Asker()
    number = asked(asker, WaitReady())
    asker.receive([encode_answer(number, replace(WELCOME, limits=replace(Limits(), header_bytes=60)))])
    with pytest.raises(OdsError, match="60 bytes"):
        asker.ask(Sample(3, 4, release=tuple(range(100))), now=0.0, deadline=1.0)
    assert not asker.waiting


def test_patience_is_a_little_longer_than_the_deadline_and_endless_while_idle() -> None:
    asker = Asker()
    assert asker.patience == math.inf
    asked(asker, WaitReady(), timeout=2.0)
    assert 102.0 < asker.patience < 102.5
    asked(asker, WaitReady(), timeout=1000.0)
    assert asker.patience == pytest.approx(1101.0)


def test_nothing_is_asked_after_the_deadline() -> None:
    asker = Asker()
    with pytest.raises(RequestTimeoutError, match="WaitReady"):
        asker.ask(WaitReady(), now=5.0, deadline=5.0)
    assert not asker.waiting
    asked(asker, Sample(3, 4), timeout=2.5)
    assert "Sample" in str(asker.overdue())
    assert "2.5 s" in str(asker.overdue())


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, "5", [1]])
def test_a_bad_timeout_is_refused(value: Any) -> None:
    with pytest.raises(ArgumentError, match="timeout"):
        checked_timeout(value, 3.0)


def test_no_timeout_is_the_default() -> None:
    assert checked_timeout(None, 3.0) == 3.0
    assert checked_timeout(2, 3.0) == 2.0
