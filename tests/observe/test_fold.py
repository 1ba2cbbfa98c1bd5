"""Events to a snapshot."""

from __future__ import annotations

from typing import Any

from ods_async.core import events as ev
from ods_async.observe.fold import KEPT_FAILURES, KEPT_WORKERS, Snapshot, fold, fold_all
from ods_async.observe.sequence import EventsLost


class Numbering:
    def __init__(self, run_id: int = 7) -> None:
        self.run_id = run_id
        self.next = 0

    def __call__(self, cls: type[ev.Event], **values: Any) -> ev.Event:
        event = cls(sequence=self.next, run_id=self.run_id, monotonic_ns=self.next * 10, **values)
        self.next += 1
        return event


def episode(make: Numbering, cls: type[ev.Event], episode_id: int, slot: int, steps: int = 5) -> ev.Event:
    return make(
        cls,
        episode_id=episode_id,
        generation=1 + episode_id // 4,
        slot=slot,
        valid_runs=((0, steps),),
        anchor_runs=((0, steps),),
        valid_frames=steps,
        eligible_anchors=steps,
    )


def failure(make: Numbering, worker_id: str = "w1", step: int | None = 3) -> ev.Event:
    return make(
        ev.WorkerFailure,
        worker_id=worker_id,
        module="builtins",
        type_name="ValueError",
        message="bad",
        traceback_text="…",
        phase="step",
        step=step,
    )


def test_publications_and_evictions_add_up_in_either_order() -> None:
    make = Numbering()
    snapshot = fold_all([episode(make, ev.EpisodePublished, n, n % 4, 3 + n) for n in range(4)])
    assert snapshot.slots == {0: (0, 1, 3), 1: (1, 1, 4), 2: (2, 1, 5), 3: (3, 1, 6)}
    evict_first = [episode(make, ev.EpisodeEvicted, 0, 0), episode(make, ev.EpisodePublished, 4, 0, 9)]
    publish_first = [episode(make, ev.EpisodePublished, 4, 0, 9), episode(make, ev.EpisodeEvicted, 0, 0)]
    assert fold_all(evict_first, snapshot).slots == fold_all(publish_first, snapshot).slots
    after = fold_all(publish_first, snapshot)
    assert after.slots[0] == (4, 2, 9)
    assert (after.published_episodes, after.evicted_episodes, after.published_steps) == (5, 1, 27)
    assert snapshot.published_episodes == 4


def test_generations_and_states_are_told() -> None:
    make = Numbering()
    snapshot = fold_all(
        [
            make(ev.StateChanged, previous="STARTING", state="READY", reason="filled"),
            make(ev.GenerationRequested, generation=2, reason="manual"),
            make(ev.GenerationCompleted, generation=2, seconds=1.5),
            make(ev.GenerationRequested, generation=3, reason="threshold"),
        ]
    )
    assert (snapshot.state, snapshot.reason) == ("READY", "filled")
    assert (snapshot.requested_generation, snapshot.completed_generation) == (3, 2)
    assert snapshot.last_generation_seconds == 1.5
    assert snapshot.next_sequence == 4


def test_workers_come_stall_return_fail_and_leave() -> None:
    make = Numbering()
    join = make(ev.WorkerJoined, worker_id="w0", host="h", pid=5, environment="e")
    snapshot = fold(Snapshot(), join)
    assert snapshot.living_workers == 1
    snapshot = fold(snapshot, make(ev.WorkerStalled, worker_id="w0", silent_for=2.0))
    assert snapshot.workers["w0"].state == "stalled"
    snapshot = fold(snapshot, make(ev.WorkerReturned, worker_id="w0"))
    assert snapshot.living_workers == 1
    snapshot = fold(snapshot, failure(make, "w0"))
    assert snapshot.workers["w0"].last_failure == "step, step 3: ValueError: bad"
    snapshot = fold(snapshot, make(ev.WorkerExited, worker_id="w0", exit_code=-9))
    assert "signal 9" in snapshot.workers["w0"].last_failure
    assert snapshot.workers["w0"].failures == 2
    snapshot = fold(snapshot, make(ev.WorkerRestarted, worker_id="w0", restarts=1))
    assert snapshot.workers["w0"].restarts == 1
    assert (snapshot.workers["w0"].host, snapshot.workers["w0"].pid) == ("h", 5)
    snapshot = fold(snapshot, make(ev.WorkerExited, worker_id="w0", exit_code=0))
    assert snapshot.workers["w0"].failures == 2
    assert fold(snapshot, make(ev.WorkerLeft, worker_id="w0", reason="done")).workers["w0"].state == "left"


def test_faults_are_counted_and_memory_stays_bounded() -> None:
    make = Numbering()
    snapshot = fold_all(failure(make, f"w{n}") for n in range(50))
    assert len(snapshot.failures) == KEPT_FAILURES
    assert snapshot.failures[-1].startswith("w49: ")
    ticket = {"generation": 1, "rollout": 0, "ticket_id": 3, "reason": "late"}
    snapshot = fold(snapshot, make(ev.TicketReissued, **ticket))
    snapshot = fold(snapshot, make(ev.RolloutRefused, worker_id="w0", ticket_id=3, reason="shape"))
    snapshot = fold(snapshot, make(ev.MessageRejected, socket="router", reason="noise", total=12))
    assert (snapshot.reissued_tickets, snapshot.refused_rollouts, snapshot.malformed_messages) == (1, 1, 12)
    refusal = {"socket": "events", "address": "10.0.0.9", "key": "", "reason": "unlisted", "total": 4}
    assert fold(snapshot, make(ev.ClientRefused, **refusal)).refused_connections == 4


def test_lost_events_are_shown_and_another_run_begins_anew() -> None:
    snapshot = fold(Snapshot(), episode(Numbering(), ev.EpisodePublished, 0, 0))
    snapshot = fold(snapshot, EventsLost(run_id=7, first=1, count=5, reason="missed 5"))
    assert snapshot.lost_events == 5
    snapshot = fold(snapshot, episode(Numbering(8), ev.EpisodePublished, 0, 2))
    assert snapshot.run_id == 8
    assert set(snapshot.slots) == {2}
    assert snapshot.lost_events == 0


def test_workers_that_are_gone_are_forgotten_before_there_are_too_many() -> None:
    make = Numbering()
    coming = (make(ev.WorkerJoined, worker_id=f"w{n}", host="h", pid=n, environment="e") for n in range(KEPT_WORKERS))
    snapshot = fold_all(coming)
    snapshot = fold(snapshot, make(ev.WorkerLeft, worker_id="w5", reason="done"))
    for name in ("new", "newer"):
        snapshot = fold(snapshot, make(ev.WorkerJoined, worker_id=name, host="h", pid=1, environment="e"))
    assert len(snapshot.workers) == KEPT_WORKERS
    assert not {"w5", "w0"} & set(snapshot.workers)
    assert {"w1", "new", "newer"} <= set(snapshot.workers)
