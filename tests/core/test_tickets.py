"""Tickets: every unit of a generation is made exactly once, whoever gets lost on the way."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from ods_async.core.tickets import REMEMBERED_TICKETS, TicketBook


def book(start_timeout: float = 0.5, finish_timeout: float = 60.0) -> TicketBook:
    return TicketBook(run_id=7, first_id=100, start_timeout=start_timeout, finish_timeout=finish_timeout)


def test_tickets_carry_generation_rollout_and_run_and_have_numbers_of_their_own() -> None:
    tickets = book()
    tickets.ask(3, 2)
    issued = tickets.issue(5, now=0.0)
    assert [(t.ticket_id, t.generation, t.rollout, t.run_id) for t in issued] == [(100, 3, 0, 7), (101, 3, 1, 7)]


def test_only_so_many_are_out_unstarted() -> None:
    tickets = book()
    tickets.ask(1, 5)
    first = tickets.issue(2, now=0.0)
    assert len(first) == 2
    assert tickets.issue(2, now=0.0) == []
    assert tickets.started(first[0].ticket_id, "w0", now=0.0)
    assert len(tickets.issue(2, now=0.0)) == 1
    assert (tickets.demand, tickets.outstanding, tickets.unstarted) == (2, 3, 2)


def test_an_unstarted_ticket_is_taken_back_only_while_someone_is_idle() -> None:
    tickets = book()
    tickets.ask(1, 1)
    (ticket,) = tickets.issue(1, now=0.0)
    assert tickets.overdue(99.0, someone_idle=False) == []
    assert tickets.overdue(0.4, someone_idle=True) == []
    (taken,) = tickets.overdue(0.5, someone_idle=True)
    assert taken.ticket == ticket
    assert "not started" in taken.reason
    assert not tickets.started(ticket.ticket_id, "w0", now=0.6), "a revoked ticket cannot be started"


def test_a_started_ticket_has_a_deadline_to_finish() -> None:
    tickets = book(finish_timeout=10.0)
    tickets.ask(1, 1)
    (ticket,) = tickets.issue(1, now=0.0)
    tickets.started(ticket.ticket_id, "w0", now=5.0)
    assert tickets.overdue(14.9, someone_idle=True) == []
    (taken,) = tickets.overdue(15.0, someone_idle=False)
    assert "w0" in taken.reason


def test_a_ticket_that_is_out_is_known_however_many_others_came_and_went() -> None:
    """A slow worker's rollout counts, and what is remembered of the past stays bounded."""
    tickets = book(finish_timeout=1e9)
    tickets.ask(1, REMEMBERED_TICKETS + 9)
    (slow,) = tickets.issue(1, 0.0)
    tickets.started(slow.ticket_id, "slow", 0.0)
    for _ in range(REMEMBERED_TICKETS + 5):
        (other,) = tickets.issue(1, 0.0)
        assert tickets.settle(other.ticket_id)[0] is not None
    assert len(tickets._units) == REMEMBERED_TICKETS
    unit = tickets.unit_of(slow.ticket_id)
    assert unit is not None
    assert tickets.settle(slow.ticket_id) == (unit, ())
    assert tickets.settle(slow.ticket_id) == (None, ())


def test_the_first_ticket_of_a_unit_settles_it_and_its_siblings_are_revoked() -> None:
    tickets = book()
    tickets.ask(1, 1)
    (lost,) = tickets.issue(1, now=0.0)
    tickets.overdue(1.0, someone_idle=True)
    (fresh,) = tickets.issue(1, now=1.0)
    unit, siblings = tickets.settle(lost.ticket_id)
    assert unit is not None
    assert siblings == (fresh.ticket_id,)
    assert tickets.settle(fresh.ticket_id) == (None, ())
    assert tickets.unit_of(fresh.ticket_id) is unit


def test_a_settled_unit_that_was_queued_again_is_not_issued_again() -> None:
    tickets = book()
    tickets.ask(1, 1)
    (lost,) = tickets.issue(1, now=0.0)
    tickets.overdue(1.0, someone_idle=True)
    tickets.settle(lost.ticket_id)
    assert tickets.issue(1, now=2.0) == []
    assert tickets.demand == 0


def test_a_refused_unit_is_wanted_again_first_in_line() -> None:
    tickets = book()
    tickets.ask(1, 3)
    (ticket,) = tickets.issue(1, now=0.0)
    unit, _ = tickets.settle(ticket.ticket_id)
    assert unit is not None
    tickets.refuse(unit, 0.0, attempts=2)
    (again,) = tickets.issue(1, now=0.0)
    assert (again.rollout, unit.refusals) == (ticket.rollout, 1)


def test_a_unit_refused_too_often_waits_longer_each_time_and_holds_up_no_other() -> None:
    tickets = book()
    tickets.ask(1, 2)
    (ticket,) = tickets.issue(1, now=0.0)
    unit = tickets.unit_of(ticket.ticket_id)
    assert unit is not None
    for now, again_at in ((0.0, 0.0), (0.0, 0.5), (0.5, 1.5), (1.5, 3.5)):
        tickets.settle(ticket.ticket_id)
        tickets.refuse(unit, now, attempts=2)
        assert unit.not_before == again_at
        if again_at > now:
            assert tickets.postponed(again_at - 0.1) is unit
            assert tickets.issue(0, again_at - 0.1) == []
        assert tickets.postponed(again_at) is None
        (ticket,) = tickets.issue(1, again_at)
        assert ticket.rollout == 0
    tickets.settle(ticket.ticket_id)
    tickets.refuse(unit, 3.5, attempts=2)
    assert [other.rollout for other in tickets.issue(2, now=3.5)] == [1]
    assert tickets.demand == 1


def test_cancelling_leaves_nothing_outstanding() -> None:
    tickets = book()
    tickets.ask(1, 3)
    issued = tickets.issue(2, now=0.0)
    assert tickets.cancel_all() == tuple(t.ticket_id for t in issued)
    assert tickets.issue(9, now=0.0) == []


@given(st.data())
def test_every_unit_is_settled_exactly_once_under_any_losses(data: st.DataObject) -> None:
    """B12: lost, late, abandoned and refused tickets in any order; in the end each unit was settled once."""
    tickets = book(start_timeout=1.0, finish_timeout=5.0)
    units = data.draw(st.integers(1, 5))
    tickets.ask(1, units)
    settled: list[int] = []
    out: list[int] = []
    now = 0.0
    for _ in range(data.draw(st.integers(0, 40))):
        now += data.draw(st.floats(0, 3))
        out += [t.ticket_id for t in tickets.issue(data.draw(st.integers(1, 3)), now)]
        action = data.draw(st.sampled_from(["start", "settle", "overdue", "abandon", "refuse"]))
        chosen = data.draw(st.sampled_from(out)) if out else None
        if action == "start" and chosen is not None:
            tickets.started(chosen, data.draw(st.sampled_from(["w0", "w1"])), now)
        elif action in ("settle", "refuse") and chosen is not None:
            unit, _ = tickets.settle(chosen)
            if unit is not None and action == "refuse":
                tickets.refuse(unit, now, attempts=2)
            elif unit is not None:
                settled.append(unit.rollout)
        elif action == "overdue":
            tickets.overdue(now, someone_idle=data.draw(st.booleans()))
        elif action == "abandon":
            tickets.abandon(data.draw(st.sampled_from(["w0", "w1"])), "gone")
    for _ in range(100):
        now += 100.0
        tickets.overdue(now, someone_idle=True)
        for ticket in tickets.issue(3, now):
            unit, _ = tickets.settle(ticket.ticket_id)
            assert unit is not None
            settled.append(unit.rollout)
    assert sorted(settled) == list(range(units))
    assert (tickets.demand, tickets.outstanding) == (0, 0)
