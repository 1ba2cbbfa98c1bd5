"""The workers as the broker knows them: who is ready, who is busy, who has gone silent."""

from __future__ import annotations

from dataclasses import dataclass

from ods_async.core.reports import Hello
from ods_async.core.requests import WorkerStatus

__all__ = ["Roster", "WorkerRecord"]

REMEMBERED_GONE = 256
GONE_AFTER_TIMEOUTS = 6


@dataclass(slots=True)
class WorkerRecord:
    """One worker. ``state``: starting, ready, stalled, gone."""

    worker_id: str
    state: str
    last_heard: float
    host: str = ""
    pid: int = 0
    environment: str = ""
    ticket_id: int | None = None
    rollouts: int = 0
    failures: int = 0
    restarts: int = 0
    told_ready: bool = False
    failed: bool = False
    said_goodbye: bool = False
    ended: bool = False  # its process is gone or has said so; a mere silence can end
    exited_pid: int = 0  # of the last process whose end was reported

    def is_process(self, host: str, pid: int) -> bool:
        """Whether the record is that process's, and not its predecessor's of the same name."""
        return (self.host, self.pid) == (host, pid)

    def status(self, now: float) -> WorkerStatus:
        """What a consumer is told."""
        state = self.state
        if state == "ready":
            state = "idle" if self.ticket_id is None else "busy"
        return WorkerStatus(
            self.worker_id, state, self.rollouts, self.failures, self.restarts, round(now - self.last_heard, 3)
        )


class Roster:
    """All workers that ever spoke in this run (the long gone ones are forgotten after a while).

    Args:
        timeout: seconds of silence after which a worker is *stalled*; after six times that it is *gone*.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._workers: dict[str, WorkerRecord] = {}

    def __len__(self) -> int:
        return len(self._workers)

    def get(self, worker_id: str) -> WorkerRecord | None:
        """The worker, if it is known."""
        return self._workers.get(worker_id)

    def hello(self, hello: Hello, now: float) -> WorkerRecord:
        """A worker introduces itself (again): a fresh record that keeps the old one's counts."""
        old = self._workers.pop(hello.worker_id, None)
        same_process = old is not None and old.is_process(hello.host, hello.pid) and old.state != "gone"
        record = WorkerRecord(
            hello.worker_id,
            "ready" if hello.fields else "starting",
            now,
            hello.host,
            hello.pid,
            hello.environment,
            rollouts=old.rollouts if old else 0,
            failures=old.failures if old else 0,
            restarts=max(hello.restarts, old.restarts if old else 0),
            told_ready=old.told_ready if old is not None and same_process else False,
            ticket_id=old.ticket_id if old is not None and same_process else None,
            exited_pid=old.exited_pid if old else 0,
        )
        self._workers[hello.worker_id] = record
        self._forget_long_gone()
        return record

    def never_heard(self, worker_id: str, now: float) -> WorkerRecord:
        """A record of a worker that is gone before it said a word."""
        record = self._workers[worker_id] = WorkerRecord(worker_id, "gone", now, ended=True)
        self._forget_long_gone()
        return record

    def heard(self, worker_id: str, now: float) -> tuple[WorkerRecord | None, bool]:
        """Note a sign of life. Returns the record and whether the worker was thought to be stalled or gone."""
        record = self._workers.get(worker_id)
        if record is None:
            return None, False
        back = record.state == "stalled" or (record.state == "gone" and not record.ended)
        record.last_heard = now
        if back:
            record.state = "ready" if record.told_ready else "starting"
        return record, back

    def excuse(self, seconds: float) -> None:
        """Nobody could be heard for so long, through no fault of the workers."""
        for record in self._workers.values():
            record.last_heard += seconds

    def newly_silent(self, now: float) -> list[WorkerRecord]:
        """Workers that have just been silent for too long; they are *stalled* from now on."""
        silent = [
            record
            for record in self._workers.values()
            if record.state in ("starting", "ready") and now - record.last_heard > self._timeout
        ]
        for record in silent:
            record.state = "stalled"
        return silent

    def long_silent(self, now: float) -> list[WorkerRecord]:
        """Stalled workers that are given up; they are *gone* from now on."""
        given_up = [
            record
            for record in self._workers.values()
            if record.state == "stalled" and now - record.last_heard > GONE_AFTER_TIMEOUTS * self._timeout
        ]
        for record in given_up:
            record.state = "gone"
        return given_up

    def leave(self, worker_id: str) -> None:
        """The worker will not be heard again (unless it says hello)."""
        record = self._workers.get(worker_id)
        if record is not None:
            record.state = "gone"
            record.ended = True
            record.ticket_id = None

    @property
    def ready(self) -> int:
        """Workers that can take a ticket."""
        return sum(record.state == "ready" for record in self._workers.values())

    @property
    def dealt(self) -> int:
        """Workers among whom tickets are dealt out: the stalled ones get their share as long as they are connected."""
        return sum(record.state in ("ready", "stalled") for record in self._workers.values())

    @property
    def idle(self) -> int:
        """Ready workers without a ticket."""
        return sum(record.state == "ready" and record.ticket_id is None for record in self._workers.values())

    @property
    def present(self) -> int:
        """Workers that are not gone."""
        return sum(record.state != "gone" for record in self._workers.values())

    def statuses(self, now: float) -> tuple[WorkerStatus, ...]:
        """All workers, by name."""
        return tuple(self._workers[key].status(now) for key in sorted(self._workers))

    def in_words(self) -> str:
        """For messages: ``2 workers ready, 1 starting``."""
        counts: dict[str, int] = {}
        for record in self._workers.values():
            counts[record.state] = counts.get(record.state, 0) + 1
        if not counts:
            return "no worker has connected"
        return "workers: " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))

    def _forget_long_gone(self) -> None:
        gone = [key for key, record in self._workers.items() if record.state == "gone"]
        for key in gone[: max(0, len(gone) - REMEMBERED_GONE)]:
            del self._workers[key]
