"""The names of all invariants, and the second set of books on leases and sampling budgets."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from ods_async.core.broker_state import BrokerState
from ods_async.core.requests import Plan
from ods_async.core.settings import BrokerSettings
from ods_async.testing.simulation.clockwork import Violation, World

__all__ = ["INVARIANTS", "Held", "LeaseLedger", "Unheard"]

INVARIANTS = {
    "lease": "a leased row does not change",
    "once": "a rollout is published at most once, and a unit of a generation is filled at most once",
    "kept": "an accepted rollout is in the buffer, whole, in the oldest slot, and the buffer never shrinks",
    "window": "a window shows consecutive steps of one published episode, and padding only beyond its run",
    "answer": "every request gets exactly one answer, by its deadline",
    "budget": "budgets close: assigned = delivered + remaining for each episode and over the run, none below zero",
    "delivered": "no consumer's batches together hold an episode more often than its budget",
    "sequence": "events are numbered without a gap, and a subscriber sees each one or is told that it is lost",
    "memory": "books stay within their bounds: tickets, rollouts held, parked requests, leases, sessions",
    "rest": "once faults stop, generations complete, queues empty, and every asker has its answer",
    "log": "the owner gets every lifecycle record, once, in order",
    "fate": "the run fails only when it was told to fail on a worker's failure",
}


@dataclass(frozen=True, slots=True)
class Unheard:
    """What a session got with its newest answer, and may still say it never heard."""

    request_id: int
    leases: tuple[int, ...]
    windows: Counter[int]
    until: float


@dataclass(slots=True)
class Held:
    """An open lease."""

    identity: bytes
    request_id: int
    rows: frozenset[int]
    deadline: float
    windows: Counter[int]  # by episode id
    heard: bool | None = None  # of a frame being gathered: whether its asker went on, or gave up (False)


class LeaseLedger:
    """Who holds which rows until when, and what each episode was charged.

    Args:
        world: time.
        settings: of the run.
        state: whose snapshot of the budgets is held against these books.
    """

    def __init__(self, world: World, settings: BrokerSettings, state: BrokerState) -> None:
        self.world = world
        self.settings = settings
        self.state = state
        self.leases: dict[int, Held] = {}
        self.episode_in_row: dict[int, int] = {}
        self.remaining: dict[int, int] = {}  # by episode id
        self.charged = 0
        self._budget_touched = True
        self._unheard: dict[bytes, Unheard] = {}

    def fail(self, invariant: str, text: str) -> None:
        """Raise a :class:`Violation`."""
        raise Violation(invariant, text)

    def _lease(self, plan: Plan, identity: bytes, request_id: int, deadline: float) -> None:
        rows = np.frombuffer(plan.rows, "<i4").tolist()
        windows: Counter[int] = Counter()
        for row, count in Counter(rows).items():
            episode_id = self.episode_in_row.get(row)
            if episode_id is None:
                self.fail("lease", f"row {row} holds no episode and was planned on")
                return
            windows[episode_id] = count
        if plan.lease_id in self.leases:
            self.fail("lease", f"lease {plan.lease_id} was given out twice")
        self.leases[plan.lease_id] = Held(identity, request_id, frozenset(rows), deadline, windows)
        for episode_id, count in windows.items():
            if self.settings.episode_sample_budget is not None:
                self.remaining[episode_id] -= count
                if self.remaining[episode_id] < 0:
                    self.fail("budget", f"episode {episode_id} was promised {-self.remaining[episode_id]} too often")
        self.charged += len(rows)
        self._budget_touched = True

    def _release(self, lease_ids: tuple[int, ...], identity: bytes, *, refund: bool) -> None:
        for lease_id in lease_ids:
            held = self.leases.get(lease_id)
            if held is not None and held.identity == identity:
                self._end(lease_id, refund=refund)

    def _end(self, lease_id: int, *, refund: bool) -> None:
        held = self.leases.pop(lease_id, None)
        if held is not None and refund:
            self._refund(held.windows)

    def _cancelled(self, identity: bytes, request_id: int) -> None:
        """A session gave that request up before it read its answer, so nobody has what that gave.

        An answer to another request was read before.
        """
        for held in self.leases.values():
            if held.identity == identity and held.deadline == float("inf") and held.heard is None:
                held.heard = held.request_id != request_id
        unheard = self._unheard.pop(identity, None)
        if unheard is not None and unheard.request_id == request_id:
            self._release(unheard.leases, identity, refund=True)
            self._refund(unheard.windows)

    def _decide(self, identity: bytes, *, heard: bool) -> None:
        for held in self.leases.values():
            if held.identity == identity and held.deadline == float("inf") and held.heard is None:
                held.heard = heard

    def _refund(self, windows: Counter[int]) -> None:
        for episode_id, count in windows.items():
            if episode_id in self.remaining:
                self.remaining[episode_id] += count
            self.charged -= count
        self._budget_touched = True

    def _check_budget(self) -> None:
        self._budget_touched = False
        budget = self.settings.episode_sample_budget
        if budget is None:
            return
        snapshot = self.state.run.budget.snapshot()
        found = {row.episode_id: row.remaining for row in snapshot.rows}
        expected = {episode: self.remaining[episode] for episode in self.episode_in_row.values()}
        if found != expected:
            self.fail("budget", f"remaining by episode is {found}, should be {expected}")
        if snapshot.total_delivered_chunks != self.charged:
            self.fail("budget", f"{snapshot.total_delivered_chunks} windows delivered, should be {self.charged}")
        for row in snapshot.rows:
            if row.assigned != row.delivered + row.remaining or not 0 <= row.remaining <= budget:
                self.fail("budget", f"{row} does not add up")
