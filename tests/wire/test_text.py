from __future__ import annotations

import msgpack
import pytest

from ods_async.core.events import WorkerFailure
from ods_async.core.reports import AttemptFailed, Heartbeat, ShutDown, WorkerFailed
from ods_async.core.requests import LanguageEntries, Limits
from ods_async.errors import LimitExceededError, ProtocolError
from ods_async.wire import codec
from ods_async.wire.messages import PROTOCOL
from ods_async.wire.text import NAME_BYTES, NAME_FIELDS, WORDS_BYTES, WORDS_FIELDS


def test_names_are_short_at_both_ends() -> None:
    """A worker's id goes into many sentences; a huge one must not make them unsendable."""
    codec.encode_report(Heartbeat("é" * (NAME_BYTES // 2), "step", None, 1))
    with pytest.raises(LimitExceededError) as caught:
        codec.encode_report(Heartbeat("é" * (NAME_BYTES // 2) + "x", "step", None, 1))
    assert (caught.value.what, caught.value.size, caught.value.limit) == ("Heartbeat/worker_id", 1025, 1024)
    with pytest.raises(ProtocolError, match="Heartbeat/worker_id: expected at most 1024 bytes of text, found 1025"):
        codec.decode_report(msgpack.packb([PROTOCOL, "Heartbeat", ["x" * 1025, "step", None, 1]]))


def test_words_are_cut_at_both_ends_and_never_refused() -> None:
    """C34: the news of a failure is never lost because it is long."""
    long = AttemptFailed("w", 1, 2, 3, "because " + "x" * 10**6 + "\ud800")
    back = codec.decode_report(codec.encode_report(long))
    assert isinstance(back, AttemptFailed)
    assert back.reason.startswith("because xxx")
    assert "bytes" in back.reason[-60:]
    assert len(back.reason.encode()) <= WORDS_BYTES
    back = codec.decode_report(msgpack.packb([PROTOCOL, "AttemptFailed", ["w", 1, 2, 3, "y" * 60_000]]))
    assert isinstance(back, AttemptFailed)
    assert len(back.reason) <= WORDS_BYTES
    shut = codec.decode_broadcast(*codec.encode_broadcast(ShutDown("z" * 10**6, 1.0)))
    assert isinstance(shut, ShutDown)
    assert len(shut.reason) <= WORDS_BYTES


def test_of_a_traceback_the_end_is_kept() -> None:
    """C34"""
    told = WorkerFailed("w", None, "builtins", "ValueError", "bad", "frame\n" * 10**5 + "ValueError: bad", "step", 3)
    back = codec.decode_report(codec.encode_report(told))
    assert isinstance(back, WorkerFailed)
    assert back.traceback_text.endswith("ValueError: bad")
    event = WorkerFailure(
        sequence=1,
        run_id=2,
        monotonic_ns=3,
        worker_id="w",
        module="builtins",
        type_name="ValueError",
        message="bad " * 10**5,
        traceback_text=told.traceback_text,
        phase="step",
        step=3,
    )
    seen = codec.decode_broadcast(*codec.encode_broadcast(event))
    assert isinstance(seen, WorkerFailure)
    assert seen.traceback_text.endswith("ValueError: bad")


def test_cut_words_fit_the_receivers_limit() -> None:
    limits = Limits(text_bytes=1000)
    data = codec.encode_report(AttemptFailed("w", 1, 2, 3, "x" * 5000), limits)
    back = codec.decode_report(data, limits)
    assert isinstance(back, AttemptFailed)
    assert len(back.reason) <= 250


def test_other_text_is_kept_exactly_or_refused() -> None:
    """C28, B44"""
    entries = LanguageEntries("task", 0, ("x" * 65_536, "place the cup ☕", ""))
    assert codec.decode_answer(codec.encode_answer(1, entries))[1] == entries
    with pytest.raises(LimitExceededError, match="LanguageEntries/entries/0"):
        codec.encode_answer(1, LanguageEntries("task", 0, ("x" * 65_537,)))


def test_names_and_words_do_not_overlap() -> None:
    assert not NAME_FIELDS & WORDS_FIELDS
