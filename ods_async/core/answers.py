"""What the state says about itself: detached values, read from the books (B38, B41, B43, B47)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ods_async.core.events import to_record
from ods_async.core.requests import (
    Drain,
    FlowStatus,
    GetLanguage,
    LanguageEntries,
    Records,
    Replay,
    ServiceStatus,
    Stats,
    Welcome,
)
from ods_async.errors import ArgumentError

if TYPE_CHECKING:
    from ods_async.core.broker_state import BrokerState

__all__ = ["drained", "flow", "language", "replayed", "stats", "status", "welcome"]

LANGUAGE_ENTRIES_PER_ANSWER = 4096
LANGUAGE_BYTES_PER_ANSWER = 1 << 20
RECORDS_PER_ANSWER = 1024


def welcome(state: BrokerState) -> Welcome:
    """The answer to ``Connect``; the endpoints are filled in by whoever knows how the asker dialled."""
    run = state.run
    settings = run.settings
    return Welcome(
        run_id=run.run_id,
        protocol=settings.protocol,
        server=settings.server_version,
        state=run.state.value,
        tickets="",
        rollouts="",
        events="",
        heartbeat_interval=settings.heartbeat_interval,
        heartbeat_timeout=settings.heartbeat_timeout,
        lease_seconds=settings.lease_seconds,
        limits=settings.limits,
        settings=dict(settings.described),
    )


def stats(state: BrokerState) -> Stats:
    """Counters of production and sampling (B47)."""
    run, production, sampling = state.run, state.production, state.sampling
    return Stats(
        run_id=run.run_id,
        requested_generation=production.requested,
        completed_generation=production.completed,
        successful_episodes=production.successful_episodes,
        failed_episodes=production.failed_episodes,
        generated_frames=production.generated_frames,
        production_seconds=production.production_seconds,
        sampled_chunks=sampling.sampled_windows,
        valid_frames=production.valid_frames,
        extra={
            "state": run.state.value,
            "sampled_batches": sampling.sampled_batches,
            "retained_episodes": run.index.published,
            "longest_episode_steps": run.index.longest("episode"),
            "shortest_episode_steps": run.index.shortest("episode"),
            "undrawn_episodes": run.store.undrawn,
            "evicted_undrawn_episodes": run.store.evicted_undrawn,
            "refused_rollouts": production.refused_rollouts,
            "duplicate_rollouts": production.duplicate_rollouts,
            "reissued_tickets": run.tickets.reissued,
            "malformed_messages": run.malformed,
            "refused_connections": run.refused_connections,
            "open_leases": run.store.open_leases,
            "parked_requests": len(run.parking),
            "sessions": len(state.reception.sessions),
            "events": run.events.next,
        },
    )


def status(state: BrokerState) -> ServiceStatus:
    """State, workers, and what is being waited for, in words."""
    run, production = state.run, state.production
    waiting = production.pause or run.refill.sampling_pause or production.trouble
    if not waiting and run.alive and production.completed < production.requested and not run.roster.ready:
        waiting = f"a worker for generation {production.requested}: {run.roster.in_words()}"
    return ServiceStatus(
        run_id=run.run_id,
        state=run.state.value,
        requested_generation=production.requested,
        completed_generation=production.completed,
        episodes=run.index.published,
        slots=run.settings.buffer_size,
        waiting=waiting,
        last_failure=run.failure_text,
        workers=run.roster.statuses(run.now.seconds),
        malformed_messages=run.malformed,
        refused_rollouts=production.refused_rollouts,
        open_leases=run.store.open_leases,
    )


def flow(state: BrokerState) -> FlowStatus:
    """The few counters a training loop steers by."""
    run, production = state.run, state.production
    return FlowStatus(
        requested_generation=production.requested,
        completed_generation=production.completed,
        successful_episodes=production.successful_episodes,
        unlocked_remaining_chunks=run.budget.unlocked_remaining,
        total_delivered_chunks=run.budget.delivered,
    )


def drained(state: BrokerState, drain: Drain) -> Records:
    """Drop the lifecycle records that the owner has received, and show the oldest others, as many as one answer holds.

    Raises:
        ArgumentError: the owner claims to have received what does not exist yet.
    """
    run = state.run
    if not 0 <= drain.received <= run.events.next:
        raise ArgumentError(
            f"received={drain.received}, and the next event of this run will be number {run.events.next}",
            argument="received",
            value=str(drain.received),
            rule=f"0 to {run.events.next}",
        )
    run.log.forget(drain.received)
    records = run.log.oldest(min(drain.limit, RECORDS_PER_ANSWER))
    oldest = records[0].sequence if records else run.events.next
    return Records(tuple(map(to_record, records)), oldest, run.events.next)


def replayed(state: BrokerState, replay: Replay) -> Records:
    """Events that are still held, from a sequence number on."""
    found, oldest, following = state.run.events.since(
        max(0, replay.since), max(0, min(replay.limit, RECORDS_PER_ANSWER))
    )
    return Records(tuple(map(to_record, found)), oldest, following)


def language(state: BrokerState, request: GetLanguage) -> LanguageEntries:
    """Dictionary entries from an index on, as many as one answer holds; ask again from where they end."""
    if request.kind not in ("task", "subtask"):
        raise ArgumentError(
            f"kind={request.kind!r} is no dictionary; ask for 'task' or 'subtask'",
            argument="kind",
            value=repr(request.kind)[:80],
            rule="'task' or 'subtask'",
        )
    taken: list[str] = []
    size = 0
    for text in state.run.language.entries(request.kind, request.since)[:LANGUAGE_ENTRIES_PER_ANSWER]:
        size += len(text.encode())
        if taken and size > LANGUAGE_BYTES_PER_ANSWER:
            break
        taken.append(text)
    return LanguageEntries(request.kind, request.since, tuple(taken))
