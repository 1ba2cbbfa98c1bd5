"""Listens to everything a broker announces, and keeps the books: what was accepted must have been published."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from ods_async.core.events import EpisodePublished, Event
from ods_async.core.reports import ServiceBeat, Verdict
from ods_async.errors import ProtocolError
from ods_async.transport.sockets import ChannelOptions, Hub, open_channel
from ods_async.wire.codec import decode_broadcast

__all__ = ["RunBook", "Witness"]


@dataclass(slots=True)
class RunBook:
    """What was heard of one run. ``highest`` is the highest episode id; they count from 0 without a gap."""

    run_id: int
    highest: int = -1
    published: int = 0
    twice: list[int] = field(default_factory=list)
    accepted: set[int] = field(default_factory=set)
    duplicates: int = 0
    refused: int = 0
    last_sequence: int = -1
    backwards: int = 0


class Witness:
    """A subscriber to events, verdicts and beats, in a thread, over one socket: so the order is the broker's.

    Args:
        events: the address of the broker's events, the same for every run (ipc).
        num_envs: episodes of a rollout.

    Attributes:
        runs: a book for every run heard of, by its number, in order.
        faults: what cannot be.
    """

    def __init__(self, events: str, num_envs: int = 1) -> None:
        self.runs: dict[int, RunBook] = {}
        self.faults: list[str] = []
        self._num_envs = num_envs
        self._hub = Hub()
        options = ChannelOptions(high_water_mark=100_000, topics=(b"event.", b"verdict.", b"beat"))
        self._channel = open_channel(self._hub, "sub", connect=[events], options=options)
        self._ended = threading.Event()
        self._book: RunBook | None = None
        self._thread = threading.Thread(target=self._listen, name="witness", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def accepted(self) -> int:
        """Rollouts accepted, over all runs."""
        return sum(len(book.accepted) for book in list(self.runs.values()))

    @property
    def published(self) -> int:
        """Episodes published, over all runs."""
        return sum(book.highest + 1 for book in list(self.runs.values()))

    def close(self) -> None:
        """Listen no more."""
        self._ended.set()
        self._thread.join()
        self._hub.close()

    def settle(self, seconds: float = 1.0) -> None:
        """Wait until nothing new was published or accepted for a while."""
        before, since = (-1, -1), time.monotonic()
        while time.monotonic() - since < seconds:
            now = (self.published, self.accepted)
            if now != before:
                before, since = now, time.monotonic()
            self._ended.wait(0.05)

    def _listen(self) -> None:
        while not self._ended.is_set():
            if not self._channel.wait(0.1):
                continue
            while (frames := self._channel.receive()) is not None:
                try:
                    self._note(decode_broadcast(bytes(frames[0]), frames[1]))
                except (ProtocolError, IndexError) as error:
                    self.faults.append(f"the broker announced what cannot be read: {error}")

    def _note(self, what: object) -> None:
        if isinstance(what, ServiceBeat):
            self._book = self.runs.setdefault(what.run_id, RunBook(what.run_id))
        elif isinstance(what, Event):
            self._book = book = self.runs.setdefault(what.run_id, RunBook(what.run_id))
            book.backwards += what.sequence <= book.last_sequence
            book.last_sequence = max(book.last_sequence, what.sequence)
            if isinstance(what, EpisodePublished):
                if what.episode_id <= book.highest:
                    book.twice.append(what.episode_id)
                book.published += 1
                book.highest = max(book.highest, what.episode_id)
        elif isinstance(what, Verdict) and what.ticket_id >= 0 and self._book is not None:
            book = self._book
            if what.outcome == "accepted":
                book.accepted.add(what.ticket_id)  # told again to a worker that sent again
                if len(book.accepted) * self._num_envs > book.highest + 1:
                    self.faults.append(
                        f"run {book.run_id}: {len(book.accepted)} rollouts accepted, {book.highest + 1} published"
                    )
            elif what.outcome == "duplicate":
                book.duplicates += 1
            else:
                book.refused += 1
