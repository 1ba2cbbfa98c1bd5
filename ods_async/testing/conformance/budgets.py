"""Budgets that stay exact, whoever draws, gives up or dies (B34 to B38)."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections import Counter
from typing import Any

import pytest

import ods_async as ods
from ods_async.testing.conformance.checks import PROVENANCE, fields_of, until
from ods_async.testing.conformance.consumer import start_consumer
from ods_async.testing.conformance.ways import LoopThread, Service, Way

BUDGET = 7


def _closes(snapshot: dict[str, Any], budget: int = BUDGET) -> None:
    """The snapshot's arithmetic."""
    rows = snapshot["rows"]
    for row in rows:
        assert (row["assigned"], row["delivered"] + row["remaining"]) == (budget, budget), row
        assert row["remaining"] >= 0
    assert snapshot["unlocked_remaining_chunks"] == sum(row["remaining"] for row in rows if not row["locked"])


def test_b34_provenance_is_on_every_step(plain: Way) -> None:
    """B34: run, episode, generation, frame, and both times, which are about now."""
    fields = fields_of(plain.sample_batch(64, 3))
    names = [path[0] for path in fields if path[0].startswith("ods_")]
    assert sorted(names) == sorted(PROVENANCE)
    assert (fields["ods_run_id",] == plain.run_id).all()
    assert (fields["ods_frame_index",] == fields["obs", "step"]).all()
    assert (fields["ods_generation",] == plain.get_stats()["completed_generation"]).all()
    episodes: dict[int, int] = {}
    for episode, fingerprint in zip(
        fields["ods_episode_id",].reshape(-1).tolist(), fields["obs", "fingerprint"].reshape(-1).tolist(), strict=True
    ):
        assert episodes.setdefault(episode, fingerprint) == fingerprint
    assert min(episodes) >= 0
    assert len(set(episodes.values())) == len(episodes)
    age = time.time_ns() - fields["ods_accepted_at_ns",]
    assert (age >= 0).all()
    assert (age < 600e9).all()
    age = time.monotonic_ns() - fields["ods_published_at_monotonic_ns",]
    assert (age >= 0).all()
    assert (age < 600e9).all()


def test_b35_each_batch_row_costs_one_duplicates_included(budgeted: Way) -> None:
    """B35, B38: and the snapshot closes after every step."""
    before = budgeted.get_sampling_budget_snapshot()
    _closes(before)
    assert (before["enabled"], before["episode_sample_budget"], before["episode_sample_hard_limit"]) == (True, 7, 9)
    assert {row["run_id"] for row in before["rows"]} == {budgeted.run_id}
    assert [row["slot"] for row in before["rows"]] == list(range(5))
    assert before["clock_origin_monotonic_ns"] < time.monotonic_ns()
    spent = Counter[int]()
    for size in (1, 4, 9, 2):
        batch = budgeted.sample_batch(size, 2)
        spent.update(fields_of(batch)["ods_episode_id",][:, 0].tolist())
        snapshot = budgeted.get_sampling_budget_snapshot()
        _closes(snapshot)
        assert {row["episode_id"]: row["delivered"] for row in snapshot["rows"] if row["delivered"]} == dict(spent)
        assert snapshot["total_delivered_chunks"] - before["total_delivered_chunks"] == sum(spent.values())


def test_b36_a_batch_the_quotas_cannot_fill_costs_nothing(budgeted: Way) -> None:
    """B36: with what was asked for and what is left; exhaustion requests no refill."""
    generation = budgeted.get_stats()["requested_generation"]
    budgeted.sample_batch(30, 1)
    with pytest.raises(ods.OnlineDataBudgetExhaustedError) as caught:
        budgeted.sample_batch(6, 1)
    assert (caught.value.requested, caught.value.remaining) == (6, 5)
    batch = budgeted.sample_batch(5, 1)  # exactly what is left, whichever rows have it
    assert len(batch) == 5
    with pytest.raises(ods.OnlineDataBudgetExhaustedError):
        budgeted.sample_batch(1, 1)
    _closes(budgeted.get_sampling_budget_snapshot())
    assert budgeted.get_flow_status()["unlocked_remaining_chunks"] == 0
    assert budgeted.get_stats()["requested_generation"] == generation


def test_b35_a_new_episode_has_its_own_quota_and_b38_the_old_ones_count_on(
    budgeted: Way, budgeted_service: Service, way_in: str
) -> None:
    """B35, B38: lifetime totals hold what retired episodes delivered."""
    before = budgeted.get_sampling_budget_snapshot()["total_delivered_chunks"]
    budgeted.sample_batch(35, 1)
    owner = budgeted_service.owner_of(way_in)
    owner.wait_for_generation(owner.request_refill())
    snapshot = budgeted.get_sampling_budget_snapshot()
    assert snapshot["unlocked_remaining_chunks"] == 35
    assert snapshot["total_delivered_chunks"] == before + 35


def test_b38_without_budgets_the_snapshot_says_so(plain: Way) -> None:
    """B38: empty rows, None counters."""
    snapshot = plain.get_sampling_budget_snapshot()
    assert (snapshot["enabled"], snapshot["rows"]) == (False, [])
    assert {value for name, value in snapshot.items() if name not in ("enabled", "rows")} == {None}


def test_b37_two_consumers_cancellations_and_a_kill_deliver_nothing_too_often(
    budgeted: Way, budgeted_service: Service, way_in: str, loop: LoopThread
) -> None:
    """B37: counted from the provenance that was received; the snapshot closes at every moment.

    One consumer draws here and gives up at random moments, one streams in a process that is killed while it draws.
    """
    owner = budgeted_service.owner_of(way_in)
    path = "frames" if way_in.endswith("frames") else "shared_memory"
    endpoint = next(e for e in owner.endpoints if e.startswith("tcp" if path == "frames" else "ipc"))
    other, told = start_consumer(endpoint, path)
    received: list[Counter[int]] = [Counter(), Counter()]

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):  # the last message may be cut short
            while True:
                received[1].update(json.loads(told.recv_bytes()))

    listener = threading.Thread(target=listen)
    listener.start()
    chance = random.Random(3)
    try:
        until(lambda: received[1].total() > 0, 30.0)
        for turn in range(4):
            owner.wait_for_generation(owner.request_refill())
            _draw_hastily(budgeted, received[0], chance, loop, seconds=0.4)
            _closes(budgeted.get_sampling_budget_snapshot())
            if turn == 2:
                other.kill()
    finally:
        other.kill()
        other.join()
        listener.join()
        told.close()
        other.close()
    both = received[0] + received[1]
    assert max(both.values()) <= BUDGET
    snapshot = budgeted.get_sampling_budget_snapshot()
    _closes(snapshot)
    for row in snapshot["rows"]:
        assert both[row["episode_id"]] <= row["delivered"]
    assert received[0].total() > 0


def _draw_hastily(way: Way, received: Counter[int], chance: random.Random, loop: LoopThread, seconds: float) -> None:
    """Draw as fast as can be, giving up one request in three before its answer can have come."""
    until_then = time.monotonic() + seconds
    while time.monotonic() < until_then:
        try:
            if chance.random() < 0.33:
                batch = _give_up(way, chance, loop)
                if batch is None:
                    continue
            else:
                batch = way.sample_batch(chance.randint(1, 4), 1, timeout=10.0)
        except ods.OnlineDataBudgetExhaustedError:
            time.sleep(0.01)
            continue
        received.update(fields_of(batch)["ods_episode_id",][:, 0].tolist())


def _give_up(way: Way, chance: random.Random, loop: LoopThread) -> Any | None:
    pause = chance.random() * 0.002
    if way.loop is None:
        try:
            return way.sample_batch(2, 1, timeout=1e-5 + pause)
        except TimeoutError:
            return None
    task = loop.begin(lambda: way.face.sample_batch(2, 1))
    time.sleep(pause)
    return loop.cancel(task)


def test_b37_what_nobody_took_of_a_stream_is_given_back(budgeted: Way) -> None:
    """B37: drawn ahead, and never handed to anybody."""
    with budgeted.streaming(2, 1, prefetch=6) as batches:
        taken = sum(len(next(batches)) for _ in range(3))
    until(lambda: budgeted.get_flow_status()["unlocked_remaining_chunks"] == 5 * BUDGET - taken, 10.0)
    _closes(budgeted.get_sampling_budget_snapshot())


def test_b36_draws_are_uniform_among_rows_with_quota_left_in_this_batch(budgeted: Way) -> None:
    """B36: one batch takes all there is, which no draw among exhausted rows could."""
    drawn = Counter(fields_of(budgeted.sample_batch(35, 1))["ods_episode_id",][:, 0].tolist())
    assert set(drawn.values()) == {BUDGET}
    assert len(drawn) == 5
