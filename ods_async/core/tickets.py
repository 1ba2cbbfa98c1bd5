"""Who was asked to make which rollout, and what to do when nobody answers.

A *unit* is one rollout of one generation. It is asked for with a ticket; a ticket that misses its start or its finish,
or whose worker is gone, is revoked and the unit gets a new one. Whichever ticket of a unit comes back first settles it;
later ones are duplicates. PUSH deals to busy and to dead peers alike and gives no receipt, so nothing here relies on
where a ticket went before a worker says that it started.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from ods_async.core.reports import Ticket

__all__ = ["Reissue", "TicketBook", "Unit"]

REMEMBERED_TICKETS = 4096
FIRST_REFUSAL_PAUSE = 0.5
LONGEST_REFUSAL_PAUSE = 60.0


@dataclass(slots=True)
class Unit:
    """One rollout of a generation: ``rollout`` counts from 0; ``refusals`` counts rollouts that were no good.

    ``not_before`` (monotonic seconds) is when it may be asked for again after a refusal.
    """

    generation: int
    rollout: int
    settled: bool = False
    refusals: int = 0
    queued: bool = True
    not_before: float = 0.0


@dataclass(slots=True)
class _Outstanding:
    ticket: Ticket
    unit: Unit
    issued_at: float
    worker_id: str | None = None
    started_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Reissue:
    """A ticket that was given up, and why."""

    ticket: Ticket
    reason: str


class TicketBook:
    """The book of all tickets of a run.

    Args:
        run_id: goes into every ticket.
        first_id: number of the first ticket; runs should not share numbers.
        start_timeout: seconds within which a ticket must be started while someone is idle.
        finish_timeout: seconds within which a started ticket must be finished.
    """

    def __init__(self, run_id: int, first_id: int, start_timeout: float, finish_timeout: float) -> None:
        self._run_id = run_id
        self._next_id = first_id
        self._start_timeout = start_timeout
        self._finish_timeout = finish_timeout
        self._demand: deque[Unit] = deque()
        self._outstanding: dict[int, _Outstanding] = {}
        self._units: OrderedDict[int, Unit] = OrderedDict()
        self.reissued = 0

    # --- demand -----------------------------------------------------------------------------------------------------

    def ask(self, generation: int, rollouts: int) -> None:
        """Ask for all rollouts of a generation."""
        self._demand.extend(Unit(generation, index) for index in range(rollouts))

    @property
    def demand(self) -> int:
        """Units that no ticket is out for."""
        return len(self._demand)

    @property
    def outstanding(self) -> int:
        """Tickets that are out."""
        return len(self._outstanding)

    @property
    def unstarted(self) -> int:
        """Tickets that are out and that no worker has said to have started."""
        return sum(entry.worker_id is None for entry in self._outstanding.values())

    def issue(self, allowed_unstarted: int, now: float) -> list[Ticket]:
        """New tickets for the demand, so that at most ``allowed_unstarted`` are out and not started."""
        tickets = []
        postponed = []
        unstarted = self.unstarted
        while self._demand and unstarted < allowed_unstarted:
            unit = self._demand.popleft()
            if unit.not_before > now:
                postponed.append(unit)
                continue
            unit.queued = False
            ticket = Ticket(self._next_id, unit.generation, unit.rollout, self._run_id)
            self._next_id += 1
            self._outstanding[ticket.ticket_id] = _Outstanding(ticket, unit, now)
            self._remember(ticket.ticket_id, unit)
            tickets.append(ticket)
            unstarted += 1
        self._demand.extendleft(reversed(postponed))
        return tickets

    def postponed(self, now: float) -> Unit | None:
        """A unit that was refused so often that it is asked for again only later, or None."""
        return next((unit for unit in self._demand if unit.not_before > now), None)

    # --- what workers say -------------------------------------------------------------------------------------------

    def started(self, ticket_id: int, worker_id: str, now: float) -> bool:
        """A worker began; False when the ticket was revoked or settled meanwhile."""
        entry = self._outstanding.get(ticket_id)
        if entry is None:
            return False
        entry.worker_id = worker_id
        entry.started_at = now
        return True

    def unit_of(self, ticket_id: int) -> Unit | None:
        """The unit a ticket asked for, also after it was revoked or settled; None when it is none of ours."""
        entry = self._outstanding.get(ticket_id)
        return entry.unit if entry is not None else self._units.get(ticket_id)

    def settle(self, ticket_id: int) -> tuple[Unit | None, tuple[int, ...]]:
        """A rollout came in. Returns its unit (None: unknown or a duplicate) and the sibling tickets to revoke."""
        unit = self.unit_of(ticket_id)
        self._outstanding.pop(ticket_id, None)
        if unit is None or unit.settled:
            return None, ()
        unit.settled = True
        if unit.queued:
            unit.queued = False
            self._demand.remove(unit)
        siblings = tuple(key for key, entry in self._outstanding.items() if entry.unit is unit)
        for key in siblings:
            del self._outstanding[key]
        return unit, siblings

    def refuse(self, unit: Unit, now: float, attempts: int) -> None:
        """The unit's rollout was no good: it is wanted again, first in line.

        After ``attempts`` refusals there is a pause before each further try, twice as long each time: what no worker
        can deliver (a text too many for the dictionary, say) must not keep them all busy for nothing.
        """
        unit.settled = False
        unit.refusals += 1
        over = unit.refusals - attempts
        if over >= 0:
            unit.not_before = now + min(LONGEST_REFUSAL_PAUSE, FIRST_REFUSAL_PAUSE * 2.0 ** min(over, 16))
        self._want_again(unit)

    # --- what time and death do -------------------------------------------------------------------------------------

    def overdue(self, now: float, *, someone_idle: bool) -> list[Reissue]:
        """Take back every ticket that missed its start or finish; its unit is wanted again, first in line.

        A ticket behind a busy worker is in its place; only while someone is idle (a live worker that has nothing to do)
        has an unstarted ticket evidently gone to the wrong one.
        """
        late = []
        for entry in self._outstanding.values():
            if entry.worker_id is None:
                if someone_idle and now - entry.issued_at >= self._start_timeout:
                    late.append((entry, f"not started within {self._start_timeout:g} s"))
            elif now - entry.started_at >= self._finish_timeout:
                late.append((entry, f"not finished by {entry.worker_id} within {self._finish_timeout:g} s"))
        return self._take_back(late)

    def excuse(self, seconds: float) -> None:
        """Nobody could be heard for so long: every deadline is that much later."""
        for entry in self._outstanding.values():
            entry.issued_at += seconds
            entry.started_at += seconds

    def abandon(self, worker_id: str, reason: str) -> list[Reissue]:
        """The worker is gone or silent: take back what it started."""
        return self._take_back(
            [(entry, reason) for entry in self._outstanding.values() if entry.worker_id == worker_id]
        )

    def cancel_all(self) -> tuple[int, ...]:
        """Nothing is wanted any more. Returns the tickets to revoke."""
        revoked = tuple(self._outstanding)
        self._outstanding.clear()
        self._demand.clear()
        return revoked

    def _take_back(self, late: Iterable[tuple[_Outstanding, str]]) -> list[Reissue]:
        taken = []
        for entry, reason in late:
            del self._outstanding[entry.ticket.ticket_id]
            if self._want_again(entry.unit):
                self.reissued += 1
                taken.append(Reissue(entry.ticket, reason))
        return taken

    def _want_again(self, unit: Unit) -> bool:
        """Queue the unit first in line, unless it is queued or asked for already."""
        if unit.queued or any(other.unit is unit for other in self._outstanding.values()):
            return False
        unit.queued = True
        self._demand.appendleft(unit)
        return True

    def _remember(self, ticket_id: int, unit: Unit) -> None:
        self._units[ticket_id] = unit
        while len(self._units) > REMEMBERED_TICKETS:
            self._units.popitem(last=False)
