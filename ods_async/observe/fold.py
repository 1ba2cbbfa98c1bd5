"""Events to a snapshot of the run: what a dashboard shows. Pure: the same events give the same snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from ods_async.core import events as ev
from ods_async.core.events import Event
from ods_async.observe.sequence import EventsLost

__all__ = ["Snapshot", "WorkerView", "fold", "fold_all"]

KEPT_FAILURES: Final = 20
KEPT_WORKERS: Final = 1024
_GONE: Final = ("left", "exited", "failed")


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker. ``state``: ready, stalled, failed, exited, restarting, left."""

    worker_id: str
    state: str
    host: str = ""
    pid: int = 0
    restarts: int = 0
    failures: int = 0
    last_failure: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What the events so far add up to.

    ``slots`` maps a slot to the (episode id, generation, valid steps) in it; ``failures`` holds the last few, newest
    last; of workers those that are gone are forgotten, the oldest first, when there are too many;
    ``lost_events`` counts those that could not be had, so that figures may be too low by as much.
    """

    run_id: int | None = None
    state: str = ""
    reason: str = ""
    next_sequence: int = 0
    requested_generation: int = 0
    completed_generation: int = 0
    last_generation_seconds: float | None = None
    published_episodes: int = 0
    evicted_episodes: int = 0
    published_steps: int = 0
    slots: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)
    workers: Mapping[str, WorkerView] = field(default_factory=dict)
    failures: tuple[str, ...] = ()
    reissued_tickets: int = 0
    refused_rollouts: int = 0
    malformed_messages: int = 0
    refused_connections: int = 0
    lost_events: int = 0

    @property
    def living_workers(self) -> int:
        """Workers that are ready."""
        return sum(worker.state == "ready" for worker in self.workers.values())


def fold_all(items: Iterable[Event | EventsLost], start: Snapshot | None = None) -> Snapshot:
    """The snapshot after all ``items``."""
    snapshot = Snapshot() if start is None else start
    for item in items:
        snapshot = fold(snapshot, item)
    return snapshot


def fold(snapshot: Snapshot, item: Event | EventsLost) -> Snapshot:
    """The snapshot after one more event. Another run's event begins a new snapshot."""
    if isinstance(item, EventsLost):
        return replace(snapshot, lost_events=snapshot.lost_events + (item.count or 0))
    if snapshot.run_id is not None and snapshot.run_id != item.run_id:
        snapshot = Snapshot()
    snapshot = replace(snapshot, run_id=item.run_id, next_sequence=item.sequence + 1)
    return _fold_worker(_fold_run(snapshot, item), item)


def _fold_run(now: Snapshot, event: Event) -> Snapshot:
    if isinstance(event, ev.EpisodePublished):
        occupant = (event.episode_id, event.generation, event.valid_frames)
        return replace(
            now,
            published_episodes=now.published_episodes + 1,
            published_steps=now.published_steps + event.valid_frames,
            slots={**now.slots, event.slot: occupant},
        )
    if isinstance(event, ev.EpisodeEvicted):
        occupied = now.slots.get(event.slot, (-1, 0, 0))
        # Eviction and publication of a slot are told in either order: only its own occupant leaves it.
        slots = now.slots
        if occupied[0] == event.episode_id:
            slots = {slot: who for slot, who in now.slots.items() if slot != event.slot}
        return replace(now, evicted_episodes=now.evicted_episodes + 1, slots=slots)
    if isinstance(event, ev.GenerationRequested):
        return replace(now, requested_generation=max(now.requested_generation, event.generation))
    if isinstance(event, ev.GenerationCompleted):
        completed = max(now.completed_generation, event.generation)
        return replace(now, completed_generation=completed, last_generation_seconds=event.seconds)
    if isinstance(event, ev.StateChanged):
        return replace(now, state=event.state, reason=event.reason)
    if isinstance(event, ev.TicketReissued):
        return replace(now, reissued_tickets=now.reissued_tickets + 1)
    if isinstance(event, ev.RolloutRefused):
        return replace(now, refused_rollouts=now.refused_rollouts + 1)
    if isinstance(event, ev.MessageRejected):
        return replace(now, malformed_messages=max(now.malformed_messages, event.total))
    if isinstance(event, ev.ClientRefused):
        return replace(now, refused_connections=max(now.refused_connections, event.total))
    return now


def _fold_worker(now: Snapshot, event: Event) -> Snapshot:
    if isinstance(event, ev.WorkerJoined):
        return _worker(now, event.worker_id, state="ready", host=event.host, pid=event.pid)
    if isinstance(event, ev.WorkerLeft):
        return _worker(now, event.worker_id, state="left")
    if isinstance(event, ev.WorkerStalled):
        return _worker(now, event.worker_id, state="stalled")
    if isinstance(event, ev.WorkerReturned):
        return _worker(now, event.worker_id, state="ready")
    if isinstance(event, ev.WorkerRestarted):
        return _worker(now, event.worker_id, state="restarting", restarts=event.restarts)
    if isinstance(event, ev.WorkerExited):
        how = f"signal {-event.exit_code}" if event.exit_code < 0 else f"exit code {event.exit_code}"
        return (
            _failed(now, event.worker_id, "exited", how)
            if event.exit_code
            else _worker(now, event.worker_id, state="exited")
        )
    if isinstance(event, ev.WorkerFailure):
        step = "" if event.step is None else f", step {event.step}"
        return _failed(now, event.worker_id, "failed", f"{event.phase}{step}: {event.type_name}: {event.message}")
    return now


def _failed(now: Snapshot, worker_id: str, state: str, text: str) -> Snapshot:
    failures = now.workers[worker_id].failures if worker_id in now.workers else 0
    now = _worker(now, worker_id, state=state, failures=failures + 1, last_failure=text)
    return replace(now, failures=(*now.failures, f"{worker_id}: {text}")[-KEPT_FAILURES:])


def _worker(now: Snapshot, worker_id: str, **changes: object) -> Snapshot:
    worker = now.workers.get(worker_id) or WorkerView(worker_id, "ready")
    workers = {**now.workers, worker_id: replace(worker, **changes)}  # type: ignore[arg-type]
    if len(workers) > KEPT_WORKERS:
        others = [name for name in workers if name != worker_id]
        del workers[next((name for name in others if workers[name].state in _GONE), others[0])]
    return replace(now, workers=workers)
