from __future__ import annotations

import math
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ods_async.core.events import EpisodePublished, GenerationCompleted, to_record
from ods_async.core.reports import Heartbeat, RevokeTickets, ServiceBeat, ShutDown, Ticket, Verdict
from ods_async.core.requests import (
    Batch,
    Connect,
    Describe,
    Done,
    LanguageEntries,
    Limits,
    Plan,
    Plans,
    Records,
    Release,
    Sample,
    Stats,
    Stop,
)
from ods_async.errors import ArgumentError, DataUnavailableError, LimitExceededError, ProtocolError
from ods_async.wire import codec, messages
from tests.wire.strategies import of_class, same

QUICK = settings(max_examples=15, deadline=None)


@pytest.mark.parametrize("cls", messages.REQUESTS.values(), ids=lambda cls: cls.__name__)
def test_every_request_comes_back_equal(cls: type[Any]) -> None:
    @QUICK
    @given(st.integers(0, 2**63 - 1), st.floats(0, 1e9), of_class(cls))
    def check(request_id: int, timeout: float, request: Any) -> None:
        data = codec.encode_request(request_id, timeout, request)
        assert same(codec.decode_request(memoryview(data)), (request_id, timeout, request))

    check()


@pytest.mark.parametrize(
    "cls", [cls for cls in messages.ANSWERS.values() if cls is not messages.ErrorReport], ids=lambda cls: cls.__name__
)
def test_every_answer_comes_back_equal(cls: type[Any]) -> None:
    @QUICK
    @given(st.integers(0, 2**63 - 1), of_class(cls))
    def check(request_id: int, answer: Any) -> None:
        assert same(codec.decode_answer(codec.encode_answer(request_id, answer)), (request_id, answer))

    check()


@pytest.mark.parametrize("cls", messages.REPORTS.values(), ids=lambda cls: cls.__name__)
def test_every_report_comes_back_equal(cls: type[Any]) -> None:
    @QUICK
    @given(of_class(cls))
    def check(report: Any) -> None:
        assert same(codec.decode_report(codec.encode_report(report)), report)

    check()


@pytest.mark.parametrize("cls", messages.BROADCASTS.values(), ids=lambda cls: cls.__name__)
def test_every_broadcast_comes_back_equal_under_its_topic(cls: type[Any]) -> None:
    @QUICK
    @given(of_class(cls))
    def check(what: Any) -> None:
        topic, data = codec.encode_broadcast(what)
        assert same(codec.decode_broadcast(topic, data), what)

    check()


@pytest.mark.parametrize("cls", messages.EVENTS.values(), ids=lambda cls: cls.__name__)
def test_every_event_comes_back_out_of_a_replay_with_its_types(cls: type[Any]) -> None:
    """B41: what is replayed equals what was broadcast."""

    @QUICK
    @given(of_class(cls))
    def check(event: Any) -> None:
        _, answer = codec.decode_answer(codec.encode_answer(3, Records((to_record(event),), 1, 2)))
        assert isinstance(answer, Records)
        assert same(codec.event_from_record(answer.events[0]), event)

    check()


@pytest.mark.parametrize(
    ("runs", "steps"), [(((0, 4),), 5), (((3, 1),), -2), (((0, 3), (2, 4)), 5), (((-1, 2),), 3), (((0, 2**40),), 2**40)]
)
def test_b39_an_event_whose_runs_are_none_is_refused_before_anyone_writes_them_out(runs: Any, steps: int) -> None:
    event = EpisodePublished(
        sequence=1,
        run_id=2,
        monotonic_ns=3,
        episode_id=4,
        generation=5,
        slot=6,
        valid_runs=((0, 9),),
        anchor_runs=runs,
        valid_frames=9,
        eligible_anchors=steps,
    )
    with pytest.raises(ProtocolError, match="anchor_runs"):
        codec.decode_broadcast(*codec.encode_broadcast(event))


def test_a_ticket_comes_back_equal() -> None:
    ticket = Ticket(2**63 - 1, 1, 2, 3)
    assert codec.decode_ticket(codec.encode_ticket(ticket)) == ticket


def test_topics_are_the_documented_ones() -> None:
    event = GenerationCompleted(sequence=1, run_id=2, monotonic_ns=3, generation=4, seconds=0.5)
    for what, topic in (
        (event, b"event.generation_completed"),
        (Verdict(1, "w7", "accepted"), b"verdict.w7"),
        (RevokeTickets((1,)), b"tickets"),
        (ShutDown("done", 1.0), b"stop"),
        (ServiceBeat(1, 2, "READY"), b"beat"),
    ):
        assert codec.encode_broadcast(what)[0] == topic


def test_a_broadcast_under_a_foreign_topic_is_refused() -> None:
    _, data = codec.encode_broadcast(Verdict(1, "w7", "accepted"))
    with pytest.raises(ProtocolError, match=r"verdict\.w70"):
        codec.decode_broadcast(b"verdict.w70", data)


def test_the_sender_is_helped_where_nothing_is_lost() -> None:
    data = codec.encode_request(1, 5, Sample(np.int32(3), 4, generations=[1, np.int64(2)]))  # type: ignore[arg-type]
    assert same(codec.decode_request(data), (1, 5.0, Sample(3, 4, generations=(1, 2))))
    data = codec.encode_request(1, 5, Stop(grace=2))
    assert same(codec.decode_request(data)[2], Stop(grace=2.0))


@pytest.mark.parametrize(
    ("request_", "where"),
    [
        (Sample(True, 4), "Sample/batch_size"),
        (Sample(3, 4.0), "Sample/length"),  # type: ignore[arg-type]
        (Sample(3, 2**63), "Sample/length"),
        (Sample(3, 4, seed=2**64), "Sample/seed"),
        (Sample(3, 4, generations=(1, 2**64)), "Sample/generations/1"),
        (Sample(3, 4, generations=(1, None)), "Sample/generations/1"),  # type: ignore[arg-type]
        (Sample("3", 4), "Sample/batch_size"),  # type: ignore[arg-type]
        (Connect("ipc://x", "owner", "a\ud800", 1), "Connect/name"),
        (Connect("ipc://x", "owner", None, 1), "Connect/name"),  # type: ignore[arg-type]
        (Stop(grace=True), "Stop/grace"),
        (Stop(grace=10**400), "Stop/grace"),
        (Stop(owner="x"), "Stop/owner"),  # type: ignore[arg-type]
    ],
)
def test_the_sender_refuses_a_wrong_value_and_names_the_field(request_: Any, where: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        codec.encode_request(1, 1.0, request_)
    assert caught.value.argument == where


def test_only_messages_can_be_sent() -> None:
    with pytest.raises(TypeError, match="Limits is no message"):
        codec.encode_request(1, 1.0, Limits())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_id", "timeout"), [(-1, 1.0), (2**63, 1.0), (True, 1.0), (1, -1.0), (1, math.inf), (1, math.nan)]
)
def test_ids_and_time_outs_are_in_range(request_id: int, timeout: float) -> None:
    with pytest.raises(ValueError, match="out of range"):
        codec.encode_request(request_id, timeout, Describe())


# --- sizes ----------------------------------------------------------------------------------------------------------


def test_a_request_over_the_limit_is_refused_at_the_sender_with_both_sizes() -> None:
    """C43"""
    limits = Limits(header_bytes=100)
    request = Release(leases=tuple(range(1000, 1100)))
    with pytest.raises(LimitExceededError) as caught:
        codec.encode_request(1, 1.0, request, limits)
    size = len(codec.encode_request(1, 1.0, request))
    assert (caught.value.size, caught.value.limit) == (size, 100)
    assert str(size) in str(caught.value)
    assert "100" in str(caught.value)


def test_a_text_over_the_limit_is_refused_at_the_sender_with_both_sizes() -> None:
    """C43: sizes are bytes of UTF-8, so that the receiver agrees."""
    limits = Limits(text_bytes=10)
    codec.encode_request(1, 1.0, Connect("ééééé", "x", "y", 1), limits)
    with pytest.raises(LimitExceededError) as caught:
        codec.encode_request(1, 1.0, Connect("éééééx", "x", "y", 1), limits)
    assert (caught.value.what, caught.value.size, caught.value.limit) == ("Connect/via", 11, 10)


def test_an_answer_over_the_limit_raises_the_error_to_answer_with() -> None:
    """C43: the asker hears of it, and the broker can take back what the answer said."""
    limits = Limits(header_bytes=1000)
    answer = LanguageEntries("task", 0, tuple(f"pick up cube {i:08}" for i in range(100)))
    with pytest.raises(LimitExceededError) as caught:
        codec.encode_answer(7, answer, limits)
    request_id, error = codec.decode_answer(codec.encode_answer(7, caught.value, limits))
    assert request_id == 7
    assert isinstance(error, LimitExceededError)
    assert error.limit == 1000
    assert error.size > 2000


def test_the_receiver_refuses_by_size_before_it_looks_inside() -> None:
    """C43"""
    with pytest.raises(ProtocolError, match=r"101 bytes, at most 100"):
        codec.decode_request(b"\xff" * 101, Limits(header_bytes=100))


def test_an_error_answer_keeps_class_text_fields_and_notes() -> None:
    error = DataUnavailableError("0 of 1 windows", mode="episode", length=32, holds="nothing yet")
    error.add_note("workers are starting")
    request_id, back = codec.decode_answer(codec.encode_answer(9, error))
    assert request_id == 9
    assert type(back) is DataUnavailableError
    assert (back.message, back.fields) == (error.message, error.fields)
    assert back.__notes__ == ["workers are starting"]


# --- versions -------------------------------------------------------------------------------------------------------


def test_a_foreign_version_is_told_apart_from_noise_and_can_be_answered() -> None:
    data = msgpack.packb([messages.PROTOCOL + 1, 77, 1.0, "Connect", ["a", "b", "c", "d", "e"], "more"])
    with pytest.raises(ProtocolError, match="speaks version 2 of the protocol, this is version 1") as caught:
        codec.decode_request(data)
    assert caught.value.request_id == 77


def test_a_malformed_request_with_a_readable_id_can_be_answered() -> None:
    """Law 4: every request gets an answer, where one is possible."""
    data = msgpack.packb([messages.PROTOCOL, 42, 1.0, "Sample", [1, 2]])
    with pytest.raises(ProtocolError, match="Sample as an array of 12 fields") as caught:
        codec.decode_request(data)
    assert caught.value.request_id == 42


# --- what a received message must also hold -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan",
    [
        Plan(1, 2, 3, 0, bytes(8), bytes(8), b"", b"", bytes(15)),
        Plan(1, 2, 3, 0, bytes(4), bytes(8), b"", b"", bytes(16)),
        Plan(1, 2, 3, 0, bytes(8), bytes(8), bytes(8), bytes(8), bytes(16)),
        Plan(1, 2, 3, 1, bytes(8), bytes(8), b"", b"", bytes(16)),
        Plan(1, 0, 3, 0, b"", b"", b"", b"", b""),
        Plan(1, -1, 3, 0, b"", b"", b"", b"", b""),
        Plan(1, 2**62, 3, 0, bytes(8), bytes(8), b"", b"", bytes(16)),
    ],
)
def test_a_plan_whose_sizes_disagree_is_refused(plan: Plan) -> None:
    """C38"""
    with pytest.raises(ProtocolError, match="Plans/plans/0"):
        codec.decode_answer(codec.encode_answer(1, Plans((plan,), (0, 0))))


def test_a_batch_of_less_than_nothing_is_refused() -> None:
    with pytest.raises(ProtocolError):
        codec.decode_answer(codec.encode_answer(1, Batch(1, 1, 0, -5, (0, 0))))


def test_done_and_other_empty_messages_are_tiny() -> None:
    assert len(codec.encode_answer(1, Done())) < 16
    assert len(codec.encode_report(Heartbeat("w", "step", None, 7))) < 32


def test_free_form_fields_keep_their_types() -> None:
    """C26"""
    stats = Stats(1, 2, 3, 4, 5, 6, 7.0, 8, 9, {"by": ("a", [1, (2,)]), "n": np.float32(0.1), "big": 2**100})
    assert same(codec.decode_answer(codec.encode_answer(1, stats))[1], stats)
