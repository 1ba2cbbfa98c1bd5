"""What can happen to the broker, and what follows. Read beside ``core/broker_state.py``."""

from __future__ import annotations

import numpy as np
import pytest

from ods_async.core import events
from ods_async.core.reports import AttemptFailed, Heartbeat, Hello, RevokeTickets, ShutDown, TicketStarted, WorkerFailed
from ods_async.core.requests import (
    BufferDescription,
    Cancel,
    Connect,
    Describe,
    Done,
    Drain,
    GenerationPromise,
    GetFlow,
    GetStats,
    GetStatus,
    Plans,
    Refill,
    Release,
    Replay,
    ReportExit,
    Sample,
    Stop,
    WaitGeneration,
    WaitReady,
    Welcome,
)
from ods_async.core.schema import FieldSpec
from ods_async.core.states import OnlineDataEngineState as State
from ods_async.core.stimuli import AnswerLost, ConnectionRefused, Malformed, Peer
from ods_async.errors import (
    ArgumentError,
    ClosedError,
    DataUnavailableError,
    LimitExceededError,
    OnlineDataWorkerError,
    OwnerOnlyError,
    RequestTimeoutError,
    SchemaMismatchError,
    SessionLostError,
    StateError,
    WorkerExitedError,
)
from ods_async.testing.in_memory import ENV_FIELDS, OWNER, InMemoryBroker, episode_of


def ready(**changes: object) -> InMemoryBroker:
    broker = InMemoryBroker(**changes)
    broker.join()
    broker.fill()
    broker.connect()
    assert broker.answer(1) is not None
    return broker


class TestStart:
    def test_the_first_generation_is_requested_at_birth_and_tickets_wait_for_a_ready_worker(self) -> None:
        broker = InMemoryBroker()
        assert broker.state.state is State.STARTING
        assert [event.reason for event in broker.events_of(events.GenerationRequested)] == ["start"]
        assert not broker.tickets
        broker.join()
        assert len(broker.tickets) == 1

    def test_no_more_tickets_are_out_unstarted_than_workers_are_ready(self) -> None:
        broker = InMemoryBroker(buffer_size=6)
        broker.join("w0")
        broker.join("w1", pid=2)
        assert len(broker.tickets) == 2
        broker.start_ticket("w0")
        assert len(broker.tickets) == 2

    def test_ready_when_the_whole_first_generation_is_published(self) -> None:
        """B7"""
        broker = InMemoryBroker()
        broker.join()
        broker.fill(limit=3)
        assert broker.state.state is State.STARTING
        broker.fill(limit=1)
        assert broker.state.state is State.READY
        assert [event.generation for event in broker.events_of(events.GenerationCompleted)] == [1]

    def test_describe_is_parked_until_a_worker_says_what_it_records(self) -> None:
        broker = InMemoryBroker()
        broker.connect()
        asked = broker.ask(Describe())
        assert broker.answer(asked) is None
        broker.join()
        description = broker.answer(asked)
        assert isinstance(description, BufferDescription)
        assert (description.rows, description.steps) == (6, 10)

    def test_a_sample_before_the_first_generation_waits_and_is_answered_by_it(self) -> None:
        broker = InMemoryBroker()
        broker.connect()
        asked = broker.ask(Sample(5, 3))
        broker.join()
        broker.fill(limit=3)
        assert broker.answer(asked) is None
        broker.fill()
        assert isinstance(broker.answer(asked), Plans)

    def test_an_empty_buffer_raises_at_the_deadline_and_says_what_is_missing(self) -> None:
        """C35"""
        broker = InMemoryBroker()
        broker.connect()
        broker.report(Hello("w0", 1, "host", 1, (), "env"))
        asked = broker.ask(Sample(5, 3), timeout=2.0)
        broker.pass_time(1.9)
        assert broker.answer(asked) is None
        broker.pass_time(0.2)
        error = broker.answer(asked)
        assert isinstance(error, RequestTimeoutError)
        assert "0 of 5 windows" in str(error)
        assert "0 of 4 episodes" in str(error)
        assert "1 starting" in str(error)

    def test_bad_arguments_are_refused_before_any_waiting(self) -> None:
        """B23, C12"""
        broker = InMemoryBroker()
        broker.connect()
        for bad in (Sample(0, 3), Sample(-1, 3), Sample(10**9, 3), Sample(2, 11), Sample(2, 3, "no such mode")):
            with pytest.raises(ValueError):
                broker.get(bad)

    def test_an_unknown_connection_is_told_to_connect_again(self) -> None:
        broker = InMemoryBroker()
        with pytest.raises(SessionLostError):
            broker.get(GetStats(), who=b"stranger")
        assert isinstance(broker.get(Connect("ipc://x", "consumer", "a", 1), who=b"stranger"), Welcome)
        broker.get(GetStats(), who=b"stranger")


class TestPublication:
    def test_a_rollout_is_published_as_a_whole_and_only_once(self) -> None:
        """B15"""
        broker = InMemoryBroker(num_envs=2)
        broker.join()
        ticket = broker.start_ticket()
        pair = (episode_of(8, 1.0), episode_of(5, 2.0))
        broker.hand_in(ticket, *pair)
        broker.hand_in(ticket, *pair)
        assert [verdict.outcome for verdict in broker.verdicts()] == ["accepted", "accepted"]
        assert [event.episode_id for event in broker.events_of(events.EpisodePublished)] == [0, 1]

    def test_nothing_can_be_drawn_from_a_rollout_that_is_still_being_written(self) -> None:
        """B15"""
        broker = InMemoryBroker(buffer_size=1, auto_write=False)
        broker.connect()
        broker.join()
        asked = broker.ask(Sample(2, 3))
        broker.fill()
        assert len(broker.writes) == 1
        assert broker.answer(asked) is None
        broker.write()
        assert isinstance(broker.answer(asked), Plans)

    def test_the_oldest_episode_is_replaced_and_stays_drawable_until_then(self) -> None:
        """B18"""
        broker = ready(auto_write=True)
        broker.get(Refill(OWNER))
        before = {float(w) for w in broker.draw(Sample(64, 3))[("obs", "qpos")][:, 0, 0]}
        assert len(before) == 4
        broker.auto_write = False
        ticket = broker.start_ticket()
        broker.hand_in(ticket, episode_of(8, -5.0))
        assert {float(w) for w in broker.draw(Sample(64, 3))[("obs", "qpos")][:, 0, 0]} == before
        broker.write()
        after = {float(w) for w in broker.draw(Sample(64, 3))[("obs", "qpos")][:, 0, 0]}
        assert after - before == {-5.0}
        assert len(after) == 4
        assert [event.episode_id for event in broker.events_of(events.EpisodeEvicted)] == [0]

    def test_b18_of_a_rollout_larger_than_the_buffer_only_the_newest_episodes_can_be_drawn(self) -> None:
        """The configuration does not allow it; the books hold all the same."""
        broker = InMemoryBroker(buffer_size=2, num_envs=3, spare_rows=6)
        broker.join()
        broker.connect()
        broker.hand_in(broker.start_ticket(), *(episode_of(4, number) for number in (5.0, 6.0, 7.0)))
        batch = broker.draw(Sample(60, 2))
        assert set(batch["obs", "qpos"].ravel().tolist()) == {6.0, 7.0}
        assert broker.state.run.index.published == broker.state.run.store.episodes == 2

    def test_a_leased_row_is_never_written_and_publication_goes_on_when_the_lease_ends(self) -> None:
        broker = ready(spare_rows=1)
        answer = broker.get(Sample(64, 3))
        held = broker.gather(answer.plans[0])
        broker.get(Refill(OWNER))
        broker.fill()
        assert len(broker.verdicts()) == 5, "one spare row: one publication, then every old row is leased"
        again = broker.gather(answer.plans[0])
        for path in held:
            assert np.array_equal(held[path], again[path])
        broker.ask(Release((answer.plans[0].lease_id,)))
        broker.fill()
        assert broker.state.production.completed == 2

    def test_a_lease_ends_at_its_deadline(self) -> None:
        broker = ready(spare_rows=1, lease_seconds=3.0)
        broker.get(Sample(64, 3))
        broker.get(Refill(OWNER))
        broker.fill()
        assert broker.state.production.completed == 1
        broker.pass_time(2.9)
        broker.fill()
        assert broker.state.production.completed == 1
        broker.beat()
        broker.pass_time(0.2)
        broker.fill()
        assert broker.state.production.completed == 2

    @pytest.mark.parametrize(
        ("episode", "words"),
        [
            (episode_of(11), "11 steps"),
            (episode_of(4).__class__(5, episode_of(4).arrays), "5 steps"),
            (episode_of(4).__class__(4, {("actions",): episode_of(4).arrays[("actions",)]}), "obs/qpos"),
        ],
    )
    def test_a_rollout_that_does_not_fit_is_refused_with_the_numbers_and_made_again(
        self, episode: object, words: str
    ) -> None:
        """B17, C11, C25, C38"""
        broker = InMemoryBroker(buffer_size=1)
        broker.join()
        broker.hand_in(broker.start_ticket(), episode)  # type: ignore[arg-type]
        verdict = broker.verdicts()[-1]
        assert verdict.outcome == "refused"
        assert words in verdict.reason
        broker.fill()
        assert broker.state.state is State.READY

    def test_a_run_that_gets_only_bad_rollouts_fails_with_the_reason(self) -> None:
        broker = InMemoryBroker(buffer_size=1, worker_failure="fail", max_generation_attempts=3)
        broker.join()
        for _ in range(3):
            broker.hand_in(broker.start_ticket(), episode_of(11))
        assert broker.state.state is State.FAILED
        assert isinstance(broker.state.run.failure, SchemaMismatchError)

    def test_a_full_dictionary_refuses_the_rollout_and_old_texts_stay(self) -> None:
        """B44"""
        broker = InMemoryBroker(buffer_size=1, language_buffer_bytes=10, worker_failure="tolerate")
        broker.join()
        broker.hand_in(broker.start_ticket(), episode_of(4, instruction="pick"))
        assert broker.verdicts()[-1].outcome == "accepted"
        broker.connect()
        broker.get(Refill(OWNER))
        broker.hand_in(broker.start_ticket(), episode_of(4, instruction="something longer"))
        assert broker.verdicts()[-1].outcome == "refused"
        assert "language_buffer_bytes" in broker.verdicts()[-1].reason
        assert broker.state.run.language.resolve(0) == "pick"

    def test_a_full_lifecycle_log_holds_production_back_and_never_sampling(self) -> None:
        """B40"""
        broker = ready(lifecycle_event_capacity=8)
        broker.get(Refill(OWNER))
        broker.fill()
        stalled_at = len(broker.verdicts())
        assert stalled_at < 8
        assert "lifecycle log is full" in broker.get(GetStatus()).waiting
        broker.draw(Sample(4, 3))
        from ods_async.core.requests import Drain

        records = []
        while broker.state.production.completed < 2:
            received = records[-1]["sequence"] + 1 if records else 0
            records += broker.get(Drain(OWNER, received=received)).events
            broker.fill()
        records += broker.get(Drain(OWNER, received=records[-1]["sequence"] + 1)).events
        assert [r["kind"] for r in records].count("published") == 8
        assert [r["kind"] for r in records].count("evicted") == 4

    def test_failed_attempts_are_counted(self) -> None:
        """B15, B19"""
        broker = ready()
        broker.report(AttemptFailed("w0", 1, 1, 3, "no grasp"))
        assert broker.get(GetStats()).failed_episodes == 3


class TestTickets:
    def test_a_ticket_that_nobody_starts_goes_to_someone_who_is_idle(self) -> None:
        broker = InMemoryBroker(buffer_size=2, ticket_start_timeout=0.5)
        broker.join("w0")
        broker.join("w1", pid=2)
        lost = broker.tickets.popleft()
        broker.start_ticket("w0")
        broker.beat("w1")
        broker.pass_time(0.6)
        assert any(isinstance(what, RevokeTickets) and lost.ticket_id in what.ticket_ids for what in broker.announced)
        fresh = broker.tickets[-1]
        assert (fresh.generation, fresh.rollout) == (lost.generation, lost.rollout)
        assert fresh.ticket_id != lost.ticket_id

    def test_a_ticket_behind_a_busy_worker_stays_where_it_is(self) -> None:
        broker = InMemoryBroker(buffer_size=3, ticket_start_timeout=0.5)
        broker.join()
        broker.start_ticket()
        broker.pass_time(1.0)
        assert not any(isinstance(what, RevokeTickets) for what in broker.announced)

    def test_a_silent_worker_loses_its_ticket_and_its_late_rollout_is_a_duplicate(self) -> None:
        """B12, C33"""
        broker = InMemoryBroker(buffer_size=1, worker_failure="tolerate", heartbeat_timeout=5.0)
        broker.join("w0")
        broker.join("w1", pid=2)
        mine = broker.start_ticket("w0")
        broker.pass_time(4.0)
        broker.beat("w1")
        broker.pass_time(2.0)
        assert [event.worker_id for event in broker.events_of(events.WorkerStalled)] == ["w0"]
        broker.fill(worker_id="w1")
        assert broker.state.state is State.READY
        broker.hand_in(mine, episode_of(8), worker_id="w0")
        assert broker.verdicts()[-1].outcome == "duplicate"
        assert [event.worker_id for event in broker.events_of(events.WorkerReturned)] == ["w0"]

    def test_a_rollout_that_comes_back_late_but_first_is_taken(self) -> None:
        broker = InMemoryBroker(buffer_size=1, worker_failure="tolerate", heartbeat_timeout=5.0)
        broker.join("w0")
        mine = broker.start_ticket("w0")
        broker.pass_time(6.0)
        broker.hand_in(mine, episode_of(8), worker_id="w0")
        assert broker.verdicts()[-1].outcome == "accepted"
        assert broker.state.state is State.READY

    def test_a_ticket_of_another_run_is_refused(self) -> None:
        broker = ready()
        broker.hand_in(broker.start_ticket() if broker.tickets else _foreign(), episode_of(8))
        assert broker.verdicts()[-1].outcome == "refused"

    def test_unreadable_bytes_of_a_known_ticket_are_refused_and_the_unit_made_again(self) -> None:
        """C38"""
        broker = InMemoryBroker(buffer_size=1)
        broker.join()
        ticket = broker.start_ticket()
        broker.tell(Malformed("rollouts", "a field is cut short", "w0", ticket.ticket_id))
        assert broker.verdicts()[-1].outcome == "refused"
        broker.fill()
        assert broker.state.state is State.READY
        assert broker.state.run.malformed == 1


def _foreign() -> object:
    from ods_async.core.reports import Ticket

    return Ticket(3, 1, 0, 99)


class TestWorkers:
    @pytest.mark.parametrize("policy", ["fail", "tolerate"])
    def test_a_killed_worker_fails_the_run_or_hands_its_ticket_on(self, policy: str) -> None:
        """B10, B12"""
        broker = InMemoryBroker(buffer_size=2, worker_failure=policy, supervised=("w0", "w1"))
        broker.connect(b"own", "owner")
        broker.connect()
        broker.join("w0")
        broker.join("w1", pid=2)
        waiting = broker.ask(WaitReady(), timeout=60.0)
        broker.start_ticket("w0")
        broker.get(ReportExit("w0", -9, False, OWNER), b"own")
        if policy == "fail":
            assert broker.state.state is State.FAILED
            error = broker.answer(waiting)
            assert isinstance(error, WorkerExitedError)
            assert error.exit_code == -9
            assert "signal 9" in str(error)
            with pytest.raises(WorkerExitedError):
                broker.get(Sample(2, 3))
            assert any(isinstance(what, ShutDown) for what in broker.announced)
        else:
            assert broker.answer(waiting) is None
            broker.fill(worker_id="w1")
            assert isinstance(broker.answer(waiting), Done)
            assert [event.exit_code for event in broker.events_of(events.WorkerExited)] == [-9]

    def test_an_exit_with_a_code_names_the_code(self) -> None:
        broker = InMemoryBroker(worker_failure="fail", supervised=("w0",))
        broker.connect(b"own", "owner")
        broker.get(ReportExit("w0", 3, False, OWNER), b"own")
        assert "exit code 3" in str(broker.state.run.failure)

    def test_a_failure_that_will_be_restarted_does_not_fail_the_run(self) -> None:
        """B12"""
        broker = InMemoryBroker(buffer_size=1, worker_failure="fail", supervised=("w0",), max_worker_restarts=1)
        broker.connect(b"own", "owner")
        broker.join()
        broker.start_ticket()
        broker.report(_failure("w0"))
        assert broker.state.state is State.STARTING
        broker.get(ReportExit("w0", 1, True, OWNER), b"own")
        assert [event.restarts for event in broker.events_of(events.WorkerRestarted)] == [1]
        broker.join(pid=2)
        broker.fill()
        assert broker.state.state is State.READY

    def test_a_worker_whose_hello_was_lost_is_asked_for_it(self) -> None:
        """Its heartbeats arrive, and nobody knows it, or that it is ready."""
        broker = InMemoryBroker(buffer_size=1)
        broker.beat("w0")
        broker.report(Hello("w1", 1, "host", 1, (), "env"))
        broker.report(Heartbeat("w1", "make", None, 0))
        broker.report(Heartbeat("w1", "idle", None, 0))
        asked = [(verdict.worker_id, verdict.outcome) for verdict in broker.verdicts()]
        assert asked == [("w0", "unknown"), ("w1", "unknown")]
        broker.join("w0")
        broker.join("w1")
        for worker_id in ("w0", "w1"):
            broker.beat(worker_id)
        assert len(broker.verdicts()) == 2
        broker.fill()
        assert broker.state.state is State.READY

    def test_last_words_that_come_after_the_successors_hello_do_not_end_it_for_good(self) -> None:
        broker = InMemoryBroker(buffer_size=1, worker_failure="tolerate")
        broker.join(pid=1)
        broker.join(pid=2)
        broker.report(_failure("w0"))
        assert broker.state.run.roster.ready == 0
        broker.beat("w0")
        assert [(verdict.worker_id, verdict.outcome) for verdict in broker.verdicts()] == [("w0", "unknown")]
        broker.join(pid=2)
        broker.fill()
        assert broker.state.state is State.READY

    def test_workers_are_not_blamed_for_the_brokers_own_sleep(self) -> None:
        """C33: the broker was stopped for longer than the heartbeat time-out, and its tick comes before their beats."""
        broker = InMemoryBroker(buffer_size=2, worker_failure="fail", heartbeat_timeout=2.0, ticket_finish_timeout=9.0)
        broker.join()
        ticket = broker.start_ticket()
        broker.sleep(30.0)
        assert broker.events_of(events.WorkerStalled) == []
        assert broker.events_of(events.TicketReissued) == []
        broker.hand_in(ticket, episode_of(4))
        for _ in range(30):
            broker.pass_time(0.1)
        assert [event.worker_id for event in broker.events_of(events.WorkerStalled)] == ["w0"]

    @pytest.mark.parametrize("known", [False, True])
    def test_b12_words_of_a_process_whose_end_was_told_already_do_not_bring_it_back(self, known: bool) -> None:
        """Its hello and the news of its end come by different sockets. The successor is welcome."""
        broker = InMemoryBroker(buffer_size=1, worker_failure="tolerate", supervised=("w0",))
        broker.connect(b"own", "owner")
        if known:
            broker.report(Hello("w0", 7, "host", 1, (), "env"))
        for _ in range(2):
            broker.get(ReportExit("w0", -9, True, OWNER, pid=7), b"own")
        (status,) = broker.get(GetStatus(), b"own").workers
        assert (status.worker_id, status.state, status.failures, status.restarts) == ("w0", "gone", 1, 1)
        broker.join(pid=7)
        assert broker.state.run.roster.ready == 0
        assert not broker.tickets
        broker.join(pid=8)
        broker.fill()
        assert broker.state.state is State.READY
        (status,) = broker.get(GetStatus(), b"own").workers
        assert (status.state, status.restarts) == ("idle", 1)

    def test_a_late_report_of_an_exit_does_not_end_the_successor(self) -> None:
        """B12: the new process of that name has said hello before the old one's end is reported."""
        broker = InMemoryBroker(buffer_size=1, worker_failure="tolerate", supervised=("w0",))
        broker.connect(b"own", "owner")
        broker.join(pid=1)
        broker.start_ticket()
        broker.join(pid=2)
        ticket = broker.start_ticket()
        for _ in range(2):  # the first answer may have got lost
            broker.get(ReportExit("w0", -9, True, OWNER, pid=1), b"own")
        assert [event.exit_code for event in broker.events_of(events.WorkerExited)] == [-9]
        assert broker.state.run.roster.ready == 1
        broker.hand_in(ticket, episode_of(4))
        assert broker.state.state is State.READY

    def test_a_worker_that_starts_anew_under_its_name_gives_up_the_ticket_of_its_old_process(self) -> None:
        """B12: nobody else has noticed that the old process is gone."""
        broker = InMemoryBroker(buffer_size=1, ticket_finish_timeout=600.0)
        broker.join(pid=1)
        old = broker.start_ticket()
        broker.join(pid=2)
        (reissued,) = broker.events_of(events.TicketReissued)
        assert (reissued.ticket_id, reissued.reason) == (old.ticket_id, "w0 is another process now")
        broker.fill()
        assert broker.state.state is State.READY

    def test_what_no_worker_can_deliver_does_not_keep_them_all_busy(self) -> None:
        """B12, B44: after max_generation_attempts refusals every further try waits longer, and the status says so."""
        broker = InMemoryBroker(buffer_size=1, language_buffer_bytes=10, max_generation_attempts=2)
        broker.join()
        broker.connect()
        tries = []
        for _ in range(2000):
            while broker.tickets:
                broker.hand_in(broker.start_ticket(), episode_of(4, instruction="far too long"))
                tries.append(broker.now.seconds)
            broker.beat()
            broker.pass_time(0.05)
        assert len(tries) == 9
        assert tries[0] == tries[1]
        assert "refused 9 times" in broker.get(GetStatus()).waiting
        while not broker.tickets:
            broker.beat()
            broker.pass_time(1.0)
        broker.fill()
        assert broker.state.state is State.STARTING  # "unknown_task" is too long as well
        while not broker.tickets:
            broker.beat()
            broker.pass_time(1.0)
        broker.hand_in(broker.start_ticket(), episode_of(4, instruction="pick"))
        assert broker.state.state is State.READY
        assert broker.get(GetStatus()).waiting == ""

    def test_answered_requests_with_far_deadlines_leave_nothing_behind(self) -> None:
        broker = InMemoryBroker(buffer_size=1)
        broker.connect()
        for _ in range(1000):
            broker.ask(WaitReady(), timeout=7 * 86400.0)
            broker.ask(Cancel())
        assert len(broker.state.run.parking._deadlines) <= 64

    def test_after_the_last_restart_the_workers_own_words_are_the_failure(self) -> None:
        """B11, B12, C34"""
        broker = InMemoryBroker(worker_failure="fail", supervised=("w0",), max_worker_restarts=1)
        broker.connect(b"own", "owner")
        broker.join()
        broker.report(_failure("w0"))
        broker.get(ReportExit("w0", 1, False, OWNER), b"own")
        failure = broker.state.run.failure
        assert isinstance(failure, OnlineDataWorkerError)
        assert (failure.type_name, failure.phase, failure.step) == ("KeyError", "step", 7)

    def test_a_failure_is_published_once_with_its_cause(self) -> None:
        broker = InMemoryBroker(worker_failure="tolerate", supervised=("w0",))
        broker.connect(b"own", "owner")
        broker.join()
        broker.report(_failure("w0"))
        broker.get(ReportExit("w0", 1, False, OWNER), b"own")
        failures = broker.events_of(events.WorkerFailure)
        assert [(event.type_name, event.phase, event.step) for event in failures] == [("KeyError", "step", 7)]

    def test_a_worker_with_other_fields_is_refused_by_name_and_the_first_goes_on(self) -> None:
        """C11"""
        broker = InMemoryBroker(worker_failure="tolerate")
        broker.join("w0")
        broker.join("w1", fields=(ENV_FIELDS[0], FieldSpec(("actions",), "float32", (5,))), pid=2)
        refusal = [verdict for verdict in broker.verdicts() if verdict.worker_id == "w1"]
        assert [verdict.outcome for verdict in refusal] == ["refused"]
        assert "actions float32 [2]" in refusal[0].reason
        assert "actions float32 [5]" in refusal[0].reason
        broker.fill()
        assert broker.state.state is State.READY

    def test_a_remote_workers_silence_fails_a_run_that_fails_on_failure(self) -> None:
        """B10"""
        broker = InMemoryBroker(worker_failure="fail", heartbeat_timeout=5.0)
        broker.join("far")
        broker.pass_time(5.1)
        assert broker.state.state is State.FAILED

    def test_a_watched_workers_silence_is_no_death(self) -> None:
        """C33"""
        broker = InMemoryBroker(worker_failure="fail", heartbeat_timeout=5.0, supervised=("w0",))
        broker.join("w0")
        broker.pass_time(5.1)
        assert broker.state.state is State.STARTING
        broker.pass_time(60.0)
        broker.beat("w0")
        broker.fill()
        assert broker.state.state is State.READY

    def test_the_wall_clock_decides_nothing(self) -> None:
        """C33"""
        broker = InMemoryBroker(worker_failure="fail", heartbeat_timeout=5.0)
        broker.join("far")
        broker.now = type(broker.now)(broker.now.monotonic_ns, broker.now.unix_ns - 3_600_000_000_000)
        broker.pass_time(0.1)
        assert broker.state.state is State.STARTING

    def test_a_worker_that_started_a_revoked_ticket_is_not_booked_for_it(self) -> None:
        broker = InMemoryBroker()
        broker.join()
        broker.report(TicketStarted("w0", 12345))
        assert broker.state.run.roster.idle == 1


def _failure(worker_id: str) -> WorkerFailed:
    return WorkerFailed(worker_id, None, "builtins", "KeyError", "'cup'", "Traceback …", "step", 7)


class TestOwner:
    def test_only_the_owner_refills_drains_reports_and_stops(self) -> None:
        """B13"""
        broker = ready()
        for request in (Refill(b"guess"), Drain(b""), ReportExit("w0", 1, False, b"x"), Stop(b"owner-toke")):
            with pytest.raises(OwnerOnlyError):
                broker.get(request)
        assert broker.state.state is State.READY

    def test_a_refill_that_is_outstanding_is_not_requested_again(self) -> None:
        """B32"""
        broker = ready()
        assert broker.get(Refill(OWNER)) == GenerationPromise(2)
        assert broker.get(Refill(OWNER)) == GenerationPromise(2)
        waiting = broker.ask(WaitGeneration(2))
        assert broker.answer(waiting) is None
        broker.fill()
        assert broker.answer(waiting) == Done()
        assert broker.get(Refill(OWNER)) == GenerationPromise(3)

    def test_a_generation_never_requested_is_a_value_error(self) -> None:
        """B32"""
        broker = ready()
        with pytest.raises(ArgumentError, match="never requested"):
            broker.get(WaitGeneration(2))

    def test_a_refill_needs_ready(self) -> None:
        """B6"""
        broker = InMemoryBroker()
        broker.connect()
        with pytest.raises(StateError) as caught:
            broker.get(Refill(OWNER))
        assert (caught.value.required, caught.value.current) == ("READY", "STARTING")

    def test_drawing_past_the_threshold_requests_the_next_generation_once(self) -> None:
        """B31"""
        broker = ready(refill_threshold=5)
        broker.draw(Sample(19, 3))
        assert broker.state.production.requested == 1
        broker.draw(Sample(1, 3))
        assert broker.state.production.requested == 2
        broker.draw(Sample(19, 3))
        assert broker.state.production.requested == 2
        broker.fill()
        broker.pass_time(6.0)  # the leases of those draws end
        broker.fill()
        assert broker.state.production.completed == 2

    def test_stop_is_answered_when_workers_have_left_and_everyone_else_is_refused(self) -> None:
        """B8"""
        broker = ready()
        waiting = broker.ask(Refill(OWNER))
        broker.answer(waiting)
        parked = broker.ask(WaitGeneration(2), timeout=60.0)
        stop = broker.ask(Stop(OWNER, 5.0), timeout=10.0)
        assert isinstance(broker.answer(parked), ClosedError)
        assert broker.answer(stop) is None
        broker.leave()
        assert broker.answer(stop) == Done()
        assert broker.state.state is State.STOPPED
        assert broker.ended is None
        broker.get(GetStats())
        broker.get(Stop(OWNER))
        assert broker.ended is not None
        assert not broker.ended.failed

    def test_b40_a_stopped_service_shows_its_records_until_they_are_received_or_it_ends(self) -> None:
        """B40: an answer that is lost costs nothing while the service can be asked; then the log ends with it"""
        broker = ready(buffer_size=3, lifecycle_event_capacity=6)
        stop = broker.ask(Stop(OWNER, 5.0), timeout=10.0)
        broker.leave()
        assert broker.answer(stop) == Done()
        lost = broker.get(Drain(OWNER))
        broker.pass_time(1.9)
        found = broker.get(Drain(OWNER))
        assert found.events == lost.events
        assert [record["slot"] for record in found.events] == [0, 1, 2]
        assert broker.get(Drain(OWNER, received=int(found.events[-1]["sequence"]) + 1)).events == ()
        assert broker.ended is None
        broker.pass_time(0.2)
        assert broker.ended is not None

    def test_stop_does_not_wait_longer_than_its_grace(self) -> None:
        broker = ready()
        stop = broker.ask(Stop(OWNER, 1.0), timeout=10.0)
        broker.pass_time(1.1)
        assert broker.answer(stop) == Done()
        broker.pass_time(3.0)
        assert broker.ended is not None

    def test_a_rollout_on_its_way_when_stop_comes_is_judged_before_the_answer(self) -> None:
        broker = InMemoryBroker(buffer_size=1, auto_write=False)
        broker.connect()
        broker.join()
        broker.fill()
        stop = broker.ask(Stop(OWNER, 5.0), timeout=10.0)
        broker.leave()
        assert broker.answer(stop) is None
        broker.write()
        assert broker.answer(stop) == Done()
        assert len(broker.verdicts()) == 1

    def test_stop_ends_the_wait_for_room_in_the_log(self) -> None:
        """B40: the rollout gets its verdict, so that its worker can leave in good order"""
        broker = InMemoryBroker(buffer_size=2, lifecycle_event_capacity=4)
        broker.connect()
        broker.join()
        broker.fill()
        broker.get(Refill(OWNER))
        broker.fill()
        broker.fill()
        assert "lifecycle log is full" in broker.get(GetStatus()).waiting
        stop = broker.ask(Stop(OWNER, 5.0), timeout=10.0)
        assert [verdict.outcome for verdict in broker.verdicts()] == ["accepted"] * 3 + ["refused"]
        assert broker.answer(stop) is None
        broker.leave()
        assert broker.answer(stop) == Done()

    def test_whoever_waits_for_a_generation_hears_of_the_failure_first(self) -> None:
        """B23, B10: of the failure, even where the generation is complete"""
        broker = ready(supervised=("w0",), worker_failure="fail")
        broker.report(_failure("w0"))
        broker.get(ReportExit("w0", 1, False, OWNER))
        for generation in (1, 99):
            with pytest.raises(OnlineDataWorkerError, match="cup"):
                broker.get(WaitGeneration(generation))

    def test_a_failure_of_close_during_a_graceful_end_is_the_answer_to_stop(self) -> None:
        """B8"""
        broker = ready(supervised=("w0",))
        stop = broker.ask(Stop(OWNER, 5.0), timeout=10.0)
        broker.report(WorkerFailed("w0", None, "builtins", "OSError", "disk full", "…", "close", None))
        error = broker.answer(stop)
        assert isinstance(error, OnlineDataWorkerError)
        assert "disk full" in str(error)


class TestConsumers:
    def test_a_cancelled_request_is_answered_once_and_costs_nothing(self) -> None:
        """B37"""
        broker = InMemoryBroker(buffer_size=1, episode_sample_budget=3, episode_sample_hard_limit=3)
        broker.connect()
        asked = broker.ask(Sample(3, 2), timeout=60.0)
        broker.ask(Cancel())
        assert isinstance(broker.answer(asked), RequestTimeoutError)
        broker.join()
        broker.fill()
        assert broker.get(GetFlow()).unlocked_remaining_chunks == 3

    def test_what_was_provably_not_delivered_returns_to_the_budget(self) -> None:
        """B37"""
        broker = ready(buffer_size=1, episode_sample_budget=3, episode_sample_hard_limit=3)
        answer = broker.get(Sample(2, 2))
        assert broker.get(GetFlow()).unlocked_remaining_chunks == 1
        broker.ask(Release((), (answer.plans[0].lease_id,)))
        assert broker.get(GetFlow()).unlocked_remaining_chunks == 3
        answer = broker.get(Sample(2, 2))
        broker.tell(AnswerLost(Peer(b"c0"), 99, answer))
        assert broker.get(GetFlow()).unlocked_remaining_chunks == 3

    def test_a_lease_that_expired_may_have_been_delivered_and_stays_spent(self) -> None:
        """B37"""
        broker = ready(buffer_size=1, episode_sample_budget=3, episode_sample_hard_limit=3, lease_seconds=1.0)
        answer = broker.get(Sample(2, 2))
        broker.pass_time(1.1)
        broker.ask(Release((), (answer.plans[0].lease_id,)))
        assert broker.get(GetFlow()).unlocked_remaining_chunks == 1

    def test_one_session_cannot_end_the_lease_of_another(self) -> None:
        broker = ready()
        answer = broker.get(Sample(2, 2))
        broker.connect(b"c1")
        broker.ask(Release((answer.plans[0].lease_id,)), b"c1")
        assert broker.get(GetStats()).extra["open_leases"] == 1

    def test_several_plans_at_once_and_leases_handed_back_on_the_way(self) -> None:
        broker = ready()
        first = broker.get(Sample(2, 3, count=4))
        assert len(first.plans) == 4
        ids = tuple(plan.lease_id for plan in first.plans)
        broker.get(Sample(2, 3, count=2, release=ids))
        assert broker.get(GetStats()).extra["open_leases"] == 2

    def test_a_session_cannot_hold_leases_without_limit(self) -> None:
        from ods_async.core.requests import Limits

        broker = ready(limits=Limits(leases_per_session=3))
        broker.get(Sample(2, 3, count=3))
        with pytest.raises(LimitExceededError):
            broker.get(Sample(2, 3))

    def test_a_frame_is_gathered_by_the_broker_and_its_lease_ends_with_it(self) -> None:
        broker = ready()
        broker.ask(Sample(5, 3, frame=True))
        assert broker.frames[0][("obs", "qpos")].shape == (5, 3, 3)
        assert broker.get(GetStats()).extra["open_leases"] == 0

    def test_a_frame_larger_than_the_limit_is_refused_with_both_sizes(self) -> None:
        """C43"""
        from ods_async.core.requests import Limits

        broker = ready(limits=Limits(batch_bytes=1000))
        with pytest.raises(LimitExceededError) as caught:
            broker.get(Sample(5, 3, frame=True))
        assert caught.value.limit == 1000
        assert caught.value.size > 1000

    def test_the_same_seed_draws_the_same_windows(self) -> None:
        """B24"""
        broker = ready()
        one, two, other = (broker.get(Sample(9, 3, seed=seed)).plans[0] for seed in (4, 4, 5))
        assert (one.rows, one.starts) == (two.rows, two.starts)
        assert (one.rows, one.starts) != (other.rows, other.starts)

    def test_a_window_longer_than_every_episode_is_told_at_once(self) -> None:
        """B23, C25"""
        broker = ready()
        with pytest.raises(DataUnavailableError, match="8"):
            broker.get(Sample(2, 9))

    def test_consumers_ahead_of_the_insert_ratio_wait_with_a_reason_and_go_on(self) -> None:
        """B33"""
        broker = ready(refill_policy="continuous", samples_per_insert=2.0)
        for _ in range(2):
            plan = broker.get(Sample(8, 3)).plans[0]
            broker.ask(Release((plan.lease_id,)))
        asked = broker.ask(Sample(8, 3), timeout=60.0)
        assert broker.answer(asked) is None
        assert "consumers are ahead" in broker.get(GetStatus()).waiting
        for _ in range(4):
            broker.fill(limit=1)
        broker.pass_time(0.1)
        assert isinstance(broker.answer(asked), Plans)

    def test_events_are_numbered_without_a_gap_and_can_be_replayed(self) -> None:
        """B41, C42"""
        broker = ready()
        assert [event.sequence for event in broker.events] == list(range(len(broker.events)))
        records = broker.get(Replay(2))
        assert [record["sequence"] for record in records.events] == list(range(2, len(broker.events)))
        assert records.next == len(broker.events)

    def test_events_about_garbage_are_limited_in_rate_and_the_count_is_not(self) -> None:
        """C45"""
        broker = ready()
        for _ in range(100):
            broker.tell(Malformed("router", "not msgpack"))
        assert broker.get(GetStats()).extra["malformed_messages"] == 100
        assert len(broker.events_of(events.MessageRejected)) <= 5

    def test_connections_with_bad_keys_are_counted_and_told_and_change_nothing_else(self) -> None:
        """C19, C45: beside garbage, not instead of it; events are limited in rate."""
        broker = ready()
        for number in range(100):
            broker.tell(Malformed("router", "not msgpack"))
            broker.tell(ConnectionRefused("requests", "not on the allow-list", f"10.0.0.{number}", "k" * 200))
        extra = broker.get(GetStats()).extra
        assert (extra["refused_connections"], extra["malformed_messages"]) == (100, 100)
        told = broker.events_of(events.ClientRefused)
        assert 1 <= len(told) <= 5
        assert (told[0].socket, told[0].address, told[0].total, len(told[0].key)) == ("requests", "10.0.0.0", 1, 100)


def test_rollouts_are_crowded_only_while_one_is_written_and_others_wait() -> None:
    """Issue 4: the broker's memory is a constant. But a worker must be heard while nothing can be written (C33)."""
    broker = InMemoryBroker(buffer_size=5, spare_rows=2, auto_write=False)
    broker.join()
    production = broker.state.production
    crowded = []
    for _ in range(4):
        broker.hand_in(broker.start_ticket(), episode_of(3))
        crowded.append(production.crowded)
    assert crowded == [False, False, True, True]
    broker.write()
    assert production.crowded
    broker.write()
    assert not production.crowded
    full = InMemoryBroker(refill_policy="manual", lifecycle_event_capacity=4)
    full.join()
    full.connect()
    full.fill()
    full.get(Refill(OWNER))
    full.fill()
    assert full.state.production.pause.startswith("the lifecycle log is full")
    assert not full.state.production.crowded
