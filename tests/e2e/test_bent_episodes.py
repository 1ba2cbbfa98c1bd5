"""Episodes that do not fit, pushed to a running broker beside a worker whose episodes do (C11, C25)."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ods_async.client.sync import Client
from ods_async.config import OnlineDataEngineCfg
from ods_async.core.episode import Episode, Rollout, recorded_schema
from ods_async.core.events import RolloutRefused
from ods_async.core.reports import Verdict
from ods_async.core.schema import EpisodeSchema, FieldSpec, Path
from ods_async.errors import DataUnavailableError
from ods_async.observe.subscriber import EventSubscriber
from ods_async.testing.broker import RunningBroker, run_broker
from ods_async.testing.peers import SMALL_FIELDS, RawWorker, marked_episode
from ods_async.wire.codec import encode_report
from ods_async.wire.rollout import pack_rollout, plan_rollout
from tests.e2e.programs import until

STEPS = 10


def config(**changes: Any) -> OnlineDataEngineCfg:
    settings: dict[str, Any] = {"buffer_size": 4, "max_episode_steps": STEPS, "refill_policy": "continuous"}
    return OnlineDataEngineCfg(**(settings | {"max_generation_attempts": 99} | changes))


@pytest.fixture
def broker() -> Iterator[RunningBroker]:
    """With an honest worker that goes on all the time."""
    with run_broker(config()) as running, RawWorker(running.endpoint, "honest") as honest:
        honest.work_in_background(length=5)
        with Client(running.endpoint) as client:
            client.wait_ready()
        yield running
        assert running.counts.get("faults", 0) == 0


def push(worker: RawWorker, episode: Episode, fields: Any = None, length: int | None = None) -> Verdict:
    """Hand an episode in for the next ticket under a header that describes it, and read the verdict."""
    ticket = worker.next_ticket(30.0)
    assert ticket is not None
    rollout = Rollout(ticket.ticket_id, worker.worker_id, (episode,))
    report, nbytes = plan_rollout(rollout, worker.schema if fields is None else fields)
    payload = bytearray(nbytes)
    pack_rollout(rollout, report, memoryview(payload))
    if length is not None:
        first = dataclasses.replace(report.episodes[0], length=length)
        report = dataclasses.replace(report, episodes=(first,))
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        worker.send([encode_report(report), bytes(payload)])
        try:
            while (verdict := worker.verdict(1.0)).ticket_id != ticket.ticket_id:
                pass
        except TimeoutError:
            continue  # it was said before this socket was heard: the broker says it again
        return verdict
    raise AssertionError("no verdict")


def bent(path: Path, spec: FieldSpec | None, values: Any) -> tuple[Episode, EpisodeSchema]:
    """An episode of 7 steps in which one field is another (None: is not there), and the fields it then has."""
    episode = marked_episode(1, 7)
    arrays = {key: value for key, value in episode.arrays.items() if key != path}
    fields = [field for field in recorded_schema(SMALL_FIELDS) if field.path != path]
    if spec is not None:
        fields.insert(0, spec)
        arrays[path] = np.broadcast_to(np.asarray(values, spec.dtype), (7, *spec.shape))
    return dataclasses.replace(episode, arrays=arrays), EpisodeSchema(tuple(fields))


STATE, REWARDS = ("obs", "state"), ("rewards",)
F32 = "expected float32"
BENT: dict[str, tuple[Path, FieldSpec | None, Any, str]] = {
    "float64": (STATE, FieldSpec(STATE, "float64", (3,)), 1 / 3, f"obs/state: {F32} [3] per step, found float64 [3]"),
    "int64": (REWARDS, FieldSpec(REWARDS, "int64"), 2**24 + 1, f"rewards: {F32} [] per step, found int64 []"),
    "narrow": (STATE, FieldSpec(STATE, "float32", (1,)), 1, f"obs/state: {F32} [3] per step, found float32 [1]"),
    "wide": (STATE, FieldSpec(STATE, "float32", (4,)), 1, f"obs/state: {F32} [3] per step, found float32 [4]"),
    "one axis more": (
        REWARDS,
        FieldSpec(REWARDS, "float32", (1,)),
        1,
        f"rewards: {F32} [] per step, found float32 [1]",
    ),
    "one field more": (
        ("obs", "new"),
        FieldSpec(("obs", "new"), "float32", (2,)),
        1,
        "obs/new: expected no such field",
    ),
    "one field less": (STATE, None, 0, "obs/state: expected obs/state float32 [3], found nothing"),
}


def test_c11_what_does_not_fit_the_schema_is_refused_by_name_counted_and_told_and_others_notice_nothing(
    broker: RunningBroker,
) -> None:
    """C11: dtype, width, axes, one field more or less, each with what was expected and what was found."""
    with Client(broker.endpoint) as client, RawWorker(broker.endpoint, "hostile") as hostile:
        before = client.get_stats()
        for name, (path, spec, values, words) in BENT.items():
            verdict = push(hostile, *bent(path, spec, values))
            assert (verdict.outcome, words in verdict.reason) == ("refused", True), f"{name}: {verdict.reason}"
            batch = client.sample_batch(8, 3)
            assert set(batch["obs"].keys()) == {"state", "mark"}
            assert batch["obs", "state"].shape == (8, 3, 3)
            assert (batch["rewards"] == batch["obs", "state"][..., 0]).all()
        assert push(hostile, marked_episode(1, 7)).outcome == "accepted"
        hostile.tickets.close()  # what lies there goes to the honest one
        after = client.get_stats()
        refused = after["extra"]["refused_rollouts"] - before["extra"]["refused_rollouts"]
        assert refused == after["failed_episodes"] - before["failed_episodes"] == len(BENT)
        until(lambda: client.get_stats()["successful_episodes"] > after["successful_episodes"])
        workers = {worker["worker_id"]: worker for worker in client.get_status()["workers"]}
        assert (workers["honest"]["failures"], workers["hostile"]["failures"]) == (0, 0)
        with EventSubscriber(broker.endpoint, 0, follow=False) as events:
            told = [event for event in events if isinstance(event, RolloutRefused)]
        assert {event.worker_id for event in told} == {"hostile"}
        for *_, words in BENT.values():
            assert sum(words in event.reason for event in told) == 1


def test_c11_a_worker_that_announces_other_fields_is_turned_away_and_the_others_work_on(broker: RunningBroker) -> None:
    """C11: already at its hello, with the field, what was expected and what was found."""
    fields = (FieldSpec(STATE, "float64", (3,)), *SMALL_FIELDS[1:])
    with RawWorker(broker.endpoint, "other", fields=fields) as other, Client(broker.endpoint) as client:
        other.tickets.close()
        until(lambda: other.hello() or other.news.wait(0.2))
        verdict = other.verdict()
        assert verdict.outcome == "refused"
        assert "expected obs/state float32 [3], found obs/state float64 [3]" in verdict.reason
        made = client.get_stats()["successful_episodes"]
        until(lambda: client.get_stats()["successful_episodes"] > made)
        assert "float64" in client.get_status()["last_failure"]


def test_c25_lengths_that_fit_no_row_are_refused_with_both_numbers_and_all_others_are_stored_whole() -> None:
    """C25: pushed by a worker that does not keep the rule itself: 0 and 11 and 1000 steps never become an episode."""
    with run_broker(config(buffer_size=3, refill_policy="manual")) as broker, RawWorker(broker.endpoint) as worker:
        for length in (11, 1000):
            verdict = push(worker, marked_episode(1, length))
            assert (verdict.outcome, f"{length} steps does not fit rows of 1 to 10" in verdict.reason) == (
                "refused",
                True,
            )
        verdict = push(worker, marked_episode(1, 1), length=0)
        assert (verdict.outcome, "has 0 steps; the shortest has 1" in verdict.reason) == ("refused", True)
        for mark, length in enumerate((1, 9, 10), 2):
            assert push(worker, marked_episode(mark, length)).outcome == "accepted"
        with Client(broker.endpoint) as client:
            client.wait_ready()
            stats = client.get_stats()
            assert (stats["successful_episodes"], stats["generated_frames"]) == (3, 20)
            assert (stats["failed_episodes"], stats["extra"]["refused_rollouts"]) == (3, 3)
            assert (stats["extra"]["shortest_episode_steps"], stats["extra"]["longest_episode_steps"]) == (1, 10)
            whole = client.sample_batch(5, 10)
            assert (whole["obs", "mark"] == 4000 + np.arange(10)).all()
            assert (client.sample_batch(200, 1)["obs", "mark"] // 1000).unique().tolist() == [2, 3, 4]


def test_c25_windows_longer_than_every_episode_are_refused_with_both_lengths_until_one_comes() -> None:
    """C25: lengths 1 to 3 and windows of 5; short episodes that nobody ever drew are seen in the stats."""
    with run_broker(config(buffer_size=3, refill_policy="continuous")) as broker, RawWorker(broker.endpoint) as worker:
        for mark, length in enumerate((1, 2, 3), 1):
            assert push(worker, marked_episode(mark, length)).outcome == "accepted"
        with Client(broker.endpoint) as client:
            client.wait_ready()
            began = time.monotonic()
            with pytest.raises(DataUnavailableError, match=r"5 steps.*longest continuous run: 3 steps") as caught:
                client.sample_batch(4, 5, timeout=30.0)
            assert time.monotonic() - began < 15.0  # at once, not at the time-out
            assert (caught.value.mode, caught.value.length) == ("episode", 5)
            assert client.get_stats()["extra"]["undrawn_episodes"] == 3
            assert push(worker, marked_episode(4, 6)).outcome == "accepted"
            batch = client.sample_batch(4, 5)
            assert (batch["obs", "mark"] // 1000 == 4).all()
            extra = client.get_stats()["extra"]
            assert (extra["undrawn_episodes"], extra["evicted_undrawn_episodes"]) == (2, 1)
            assert (extra["shortest_episode_steps"], extra["longest_episode_steps"]) == (2, 6)


def test_c25_a_request_that_waits_for_the_first_episodes_is_told_the_same_when_they_are_all_too_short() -> None:
    """C25: no hang: the answer comes with the episodes, long before the time-out."""
    with (
        run_broker(config(buffer_size=1)) as broker,
        RawWorker(broker.endpoint) as worker,
        Client(broker.endpoint) as client,
        Client(broker.endpoint) as other,
        ThreadPoolExecutor(1) as thread,
    ):
        asked = thread.submit(client.sample_batch, 4, 5, timeout=300.0)
        until(lambda: other.get_stats()["extra"]["parked_requests"] > 0)
        assert push(worker, marked_episode(1, 3)).outcome == "accepted"
        with pytest.raises(DataUnavailableError, match="longest continuous run: 3 steps"):
            asked.result(60.0)
