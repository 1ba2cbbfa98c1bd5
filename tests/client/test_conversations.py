"""Conversations, driven by hand: no socket, no thread, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from ods_async.client.exchange import Ask, Do, Exchange, Talk
from ods_async.client.session import Session
from ods_async.core.requests import (
    Batch,
    BufferDescription,
    Connect,
    Describe,
    Done,
    GetLanguage,
    GetStats,
    LanguageEntries,
    Plan,
    Plans,
    Release,
    Sample,
    WaitReady,
    Welcome,
)
from ods_async.errors import (
    BrokerUnreachableError,
    OwnerOnlyError,
    ProtocolError,
    RequestTimeoutError,
    RunChangedError,
    SessionLostError,
)
from ods_async.wire.asking import Answered
from tests.wire.test_asking import WELCOME

DESCRIPTION = BufferDescription((), 2, 3, None, 4096, b"t" * 32, 4096)
WANTED = Sample(5, 4)


def plan(lease: int, **changes: Any) -> Plan:
    return replace(Plan(lease, 5, 4, 0, b"", b"", b"", b"", b""), **changes)


class Words:
    """A memory that makes batches of words; leases in ``stale`` are found to have changed."""

    def __init__(self, shared: bool) -> None:
        self.shared = shared
        self.stale: set[int] = set()
        self.closed = False
        self.number = 5
        self.together: list[int] = []

    @property
    def edition(self) -> int | None:
        return self.number if self.shared else None

    def nbytes(self, batch_size: int, length: int, history: int) -> int:
        return batch_size * length

    def prepare(self, batch_size: int, length: int, history: int, landing: object) -> str:
        return f" in memory for {(batch_size, length, history)}"

    def gather(self, plans: Sequence[Plan], landing: object, prepared: Sequence[object] = ()) -> list[str | None]:
        self.together.append(len(plans))
        places = [*prepared, *[""] * len(plans)]
        return [
            None if plan.lease_id in self.stale else f"batch {plan.lease_id} to {landing}{place}"
            for plan, place in zip(plans, places, strict=False)
        ]

    def wrap(self, answer: Batch, payload: bytes | memoryview, landing: object) -> str:
        return f"frame {bytes(payload).decode()} to {landing}"

    def close(self) -> None:
        self.closed = True


def exchange(shared: bool = True, owner: bytes | None = None) -> tuple[Exchange[str], Words]:
    memory = Words(shared)
    made = Exchange[str](
        endpoint="ipc:///x",
        role="consumer",
        name="me",
        owner=owner,
        connect_timeout=2.0,
        make_memory=lambda welcome, description: memory,
    )
    return made, memory


class Script:
    """Drives a conversation: questions are answered from a list, in order, and noted."""

    def __init__(self, talk: Talk[Any], *answers: Any) -> None:
        self.questions: list[Any] = []
        self.result: Any = None
        left = list(answers)
        try:
            step = next(talk)
            while True:
                if isinstance(step, Do):
                    step = talk.send(step.work())
                    continue
                assert isinstance(step, Ask)
                self.questions.append(step.request)
                answer = left.pop(0)
                if isinstance(answer, BaseException):
                    step = talk.throw(answer)
                else:
                    step = talk.send(answer if isinstance(answer, Answered) else Answered(answer))
        except StopIteration as done:
            self.result = done.value
        assert not left


def ready(shared: bool = True) -> tuple[Exchange[str], Words, Session]:
    made, memory = exchange(shared)
    session = Session()
    Script(made.ready(session), WELCOME, DESCRIPTION)
    return made, memory, session


def test_hello_is_said_once_a_session_and_the_buffer_asked_for_once_a_run() -> None:
    made, _, session = ready()
    script = Script(made.sample(session, WANTED, "here"), Plans((plan(3),), (0, 0)))
    assert script.result == "batch 3 to here"
    assert [type(question) for question in script.questions] == [Sample]
    other = Script(made.sample(Session(), WANTED, "here"), WELCOME, Plans((plan(4),), (0, 0)))
    assert [type(question) for question in other.questions] == [Connect, Sample]


def test_a_lease_is_handed_back_after_the_copy_with_the_next_draw_or_by_notice() -> None:
    made, _, session = ready()
    Script(made.sample(session, WANTED, ""), Plans((plan(3),), (0, 0)))
    script = Script(made.sample(session, WANTED, ""), Plans((plan(4),), (0, 0)))
    assert script.questions[0].release == (3,)
    assert session.notice() == Release((4,))
    assert session.notice() is None


def test_what_a_batch_needs_may_be_made_while_its_plan_is_on_the_way() -> None:
    made, _, session = ready()
    talk = made.sample(session, WANTED, "host")
    step = next(talk)
    assert isinstance(step, Ask)
    assert step.meanwhile is not None
    step.meanwhile()
    work = talk.send(Answered(Plans((plan(7),), (0, 0))))
    assert isinstance(work, Do)
    assert work.work() == ["batch 7 to host in memory for (5, 4, 0)"]
    talk.close()

    frames, _, session = ready(shared=False)
    step = next(frames.sample(session, WANTED, "host"))
    assert isinstance(step, Ask)
    assert step.meanwhile is None


def test_a_changed_row_means_drawing_again_and_the_batch_is_given_back_b37() -> None:
    made, memory, session = ready()
    memory.stale = {3, 4}
    plans = [Plans((plan(lease),), (0, 0)) for lease in (3, 4, 5)]
    script = Script(made.sample(session, WANTED, ""), *plans)
    assert script.result == "batch 5 to "
    assert [question.undelivered for question in script.questions] == [(), (3,), (4,)]
    assert made.redrawn == 2


def test_a_group_is_copied_in_eights_so_that_the_interpreter_is_needed_seldom_and_the_changed_are_given_back_b37() -> (
    None
):
    made, memory, session = ready()
    memory.stale = {4, 20}
    plans = tuple(plan(lease) for lease in range(3, 22))
    script = Script(made.draw(session, replace(WANTED, count=18), "x"), Plans(plans, (0, 0)))
    assert script.result == [(lease, f"batch {lease} to x") for lease in range(3, 21) if lease not in memory.stale]
    assert memory.together == [8, 8, 2]
    assert session.undelivered == [4, 20]


def test_frames_are_asked_for_one_at_a_time_where_memory_is_not_shared() -> None:
    made, _, session = ready(shared=False)
    talk = made.draw(session, replace(WANTED, count=4), "there")
    script = Script(talk, Answered(Batch(5, 4, 0, 3, (0, 0)), b"abc"))
    assert script.questions[0].frame
    assert script.questions[0].count == 1
    assert script.result == [(None, "frame abc to there")]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_frame_is_handed_back_where_episodes_have_budgets_b37(interrupted: bool) -> None:
    made, _ = exchange(shared=False)
    session = Session()
    Script(made.ready(session), replace(WELCOME, settings={"episode_sample_budget": 9}), DESCRIPTION)
    answer = Answered(Batch(5, 4, 0, 3, (0, 0), 8), b"abc")
    if not interrupted:
        Script(made.sample(session, WANTED, ""), answer)
        assert session.notice() == Release((8,))
        return
    talk = made.sample(session, WANTED, "")
    next(talk)
    assert isinstance(talk.send(answer), Do)
    with pytest.raises(KeyboardInterrupt):
        talk.throw(KeyboardInterrupt())
    assert session.notice() == Release((), (8,))


def test_an_error_while_copying_gives_every_plan_back_b37() -> None:
    made, memory, session = ready()
    talk = made.draw(session, replace(WANTED, count=9), "")
    step = next(talk)
    assert isinstance(step, Ask)
    step = talk.send(Answered(Plans(tuple(plan(lease) for lease in range(3, 12)), (0, 0))))
    assert isinstance(step, Do)
    step = talk.send(step.work())
    with pytest.raises(KeyboardInterrupt):
        talk.throw(KeyboardInterrupt())
    assert sorted(session.undelivered) == list(range(3, 12))
    assert session.finished == []
    assert not memory.closed


@pytest.mark.parametrize("wrong", [{"batch_size": 6}, {"length": 5}, {"history": 1}])
def test_a_batch_of_another_shape_is_refused_and_given_back(wrong: dict[str, int]) -> None:
    made, _, session = ready()
    with pytest.raises(ProtocolError, match="5 windows of 4 steps"):
        Script(made.sample(session, WANTED, ""), Plans((plan(3, **wrong),), (0, 0)))
    assert session.undelivered == [3]


@pytest.mark.parametrize("answer", [Done(), Batch(5, 4, 0, 0, (0, 0))])
def test_an_answer_of_the_wrong_kind_is_a_protocol_error(answer: Any) -> None:
    made, _, session = ready()
    with pytest.raises(ProtocolError):
        Script(made.plain(session, GetStats(), Welcome), answer)


def test_nobody_answering_hello_means_unreachable() -> None:
    made, _ = exchange()
    with pytest.raises(BrokerUnreachableError, match="ipc:///x"):
        Script(made.greet(Session()), RequestTimeoutError("late", timeout=2.0))


def test_a_short_time_out_on_a_new_connection_to_a_broker_heard_before_is_a_time_out() -> None:
    made, _, _ = ready()
    with pytest.raises(RequestTimeoutError):
        Script(made.greet(Session()), RequestTimeoutError("late", timeout=0.001))
    with pytest.raises(BrokerUnreachableError):
        Script(made.greet(Session()), RequestTimeoutError("late", timeout=2.0))


def test_another_protocol_is_refused_with_both_numbers() -> None:
    made, _ = exchange()
    with pytest.raises(ProtocolError, match="protocol 99"):
        Script(made.greet(Session()), replace(WELCOME, protocol=99))


def test_another_run_is_told_once_and_its_memory_is_new() -> None:
    made, memory, _ = ready()
    session = Session()
    with pytest.raises(RunChangedError):
        Script(made.greet(session), replace(WELCOME, run_id=8))
    assert memory.closed
    script = Script(made.sample(session, WANTED, ""), DESCRIPTION, Plans((plan(3),), (0, 0)))
    assert [type(question) for question in script.questions] == [Describe, Sample]


def test_a_forgotten_connection_says_hello_again_and_asks_again() -> None:
    made, _, session = ready()
    session.finished.append(2)
    answers = SessionLostError("who are you"), WELCOME, Plans((plan(3),), (0, 0))
    script = Script(made.sample(session, WANTED, ""), *answers)
    assert [type(question) for question in script.questions] == [Sample, Connect, Sample]
    assert script.questions[2].release == (2,)
    assert script.result == "batch 3 to "


def test_new_words_are_fetched_with_the_batch_that_needs_them_b43() -> None:
    made, _, session = ready()
    entries = [
        LanguageEntries("task", 0, ("pick",)),
        LanguageEntries("subtask", 0, ("reach",)),
        LanguageEntries("subtask", 1, ("grasp", "lift")),
    ]
    script = Script(made.sample(session, WANTED, ""), Plans((plan(3),), (1, 3)), *entries)
    assert script.questions[1:] == [GetLanguage("task", 0), GetLanguage("subtask", 0), GetLanguage("subtask", 1)]
    assert made.known is not None
    assert made.known.language.resolve([2, 0], kind="subtask") == ["lift", "reach"]
    again = Script(made.sample(session, WANTED, ""), Plans((plan(4),), (1, 3)))
    assert len(again.questions) == 1


def test_words_that_cannot_be_fetched_do_not_cost_the_batch() -> None:
    made, _, session = ready()
    talk = made.sample(session, WANTED, "")
    script = Script(talk, Plans((plan(3),), (1, 0)), RequestTimeoutError("late", timeout=1.0))
    assert script.result == "batch 3 to "


def test_words_that_contradict_known_ones_are_refused() -> None:
    made, _, session = ready()
    Script(made.language(session, {"task": 1}), LanguageEntries("task", 0, ("pick",)))
    with pytest.raises(ProtocolError):
        Script(made.language(session, {"task": 2}), LanguageEntries("task", 0, ("place", "x")))


def test_asking_for_words_ends_when_the_broker_has_no_more() -> None:
    made, _, session = ready()
    script = Script(
        made.language(session, {"task": 9}), LanguageEntries("task", 0, ("pick",)), LanguageEntries("task", 1, ())
    )
    assert len(script.questions) == 2


def test_without_a_token_the_owners_verbs_are_refused_by_name_b13() -> None:
    made, _ = exchange()
    with pytest.raises(OwnerOnlyError, match="request_refill"):
        made.owned("request_refill")
    assert exchange(owner=b"key")[0].owned("stop") == b"key"


def test_a_plain_question_greets_first() -> None:
    made, _ = exchange()
    script = Script(made.plain(Session(), WaitReady(), Done), WELCOME, Done())
    assert [type(question) for question in script.questions] == [Connect, WaitReady]
    assert script.result == Done()
