"""Announcements go out in order, a little at a time, and all of them before the end."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from ods_async.broker import broadcasts
from ods_async.broker.broadcasts import Broadcasts
from ods_async.core.reports import ServiceBeat
from ods_async.core.requests import Limits
from ods_async.wire.codec import decode_broadcast


class Socket:
    """Keeps what is sent; refuses while it is full."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.full = False

    def send(self, frames: list[Any]) -> bool:
        if not self.full:
            beat = decode_broadcast(*frames)
            assert isinstance(beat, ServiceBeat)
            self.sent.append(beat.next_sequence)
        return not self.full


def beat(number: int) -> ServiceBeat:
    return ServiceBeat(7, number, "READY")


def made() -> tuple[Socket, Broadcasts, Counter[str], list[str]]:
    socket, counts, faults = Socket(), Counter[str](), list[str]()
    saying = Broadcasts(lambda: socket, Limits(), counts, lambda doing, _: faults.append(doing))  # type: ignore[arg-type,return-value]
    return socket, saying, counts, faults


async def test_many_announcements_leave_turns_to_others_and_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcasts, "TURN_SECONDS", 0.0)
    socket, saying, _, _ = made()
    for number in range(50):
        saying.say(beat(number))
    assert socket.sent == []
    seen = []
    while len(socket.sent) < 50:
        await asyncio.sleep(0)
        seen.append(len(socket.sent))
    assert len(set(seen)) > 25, "others had their turns in between"
    assert socket.sent == list(range(50))


async def test_what_waits_is_bounded_and_the_end_sends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcasts, "MOST_WAITING", 10)
    socket, saying, _, _ = made()
    for number in range(25):
        saying.say(beat(number))
    assert socket.sent == list(range(20))
    saying.flush()
    assert socket.sent == list(range(25))
    await asyncio.sleep(0)
    assert socket.sent == list(range(25))


async def test_what_cannot_be_sent_is_counted_and_the_next_one_is_sent() -> None:
    socket, saying, counts, faults = made()
    socket.full = True
    saying.say(beat(1))
    saying.say(object())
    saying.flush()
    socket.full = False
    saying.say(beat(2))
    saying.flush()
    assert (counts["announcements_dropped"], len(faults), socket.sent) == (1, 1, [2])
