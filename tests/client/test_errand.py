"""The next question is under way while a batch is copied, and nothing of it is lost however it ends."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from ods_async.client.errand import Errand
from ods_async.client.exchange import Ask, Do
from ods_async.core.requests import CheckHealth, Done, GetStats, WaitReady
from ods_async.errors import OdsError
from ods_async.wire.asking import Answered


class Line:
    """Records what is asked; one question at a time, as on a lane."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.waiting: str | None = None

    def post(self, request: Any, deadline: float, limit: float | None = None) -> None:
        assert self.waiting is None, "two questions at once"
        self.waiting = type(request).__name__
        self.heard.append(f"post {self.waiting}")

    def collect(self) -> Answered:
        assert self.waiting is not None
        self.heard.append(f"collect {self.waiting}")
        self.waiting = None
        return Answered(Done())

    def ask(self, request: Any, deadline: float, limit: float | None = None) -> Answered:
        self.post(request, deadline, limit)
        return self.collect()

    def give_up(self) -> None:
        self.heard.append("give up")
        self.waiting = None


def talk(line: Line, owed: list[str], request: Any, then: Any = None, fails: bool = False) -> Generator[Any, Any, str]:
    yield Ask(request)
    name = type(request).__name__
    try:
        yield Do(lambda: line.heard.append(f"copy {name}"))
        if fails:
            raise OdsError("no")
        if then is not None:
            yield Ask(then)
    except BaseException:
        owed.append(name)
        raise
    return name


def test_the_next_question_is_asked_before_the_copy_and_collected_after_it() -> None:
    line, owed = Line(), []
    first = Errand(talk(line, owed, WaitReady()), line, 1.0)  # type: ignore[arg-type]
    outcome, second = first.finish(lambda: Errand(talk(line, owed, GetStats()), line, 1.0).post())  # type: ignore[arg-type]
    assert outcome == "WaitReady"
    assert second is not None
    assert line.heard == ["post WaitReady", "collect WaitReady", "post GetStats", "copy WaitReady"]
    assert second.finish(lambda: None) == ("GetStats", None)
    assert line.heard[4:] == ["collect GetStats", "copy GetStats"]
    assert not owed


def test_a_further_question_waits_until_the_line_is_free() -> None:
    line, owed = Line(), []
    first = Errand(talk(line, owed, WaitReady(), then=CheckHealth()), line, 1.0)  # type: ignore[arg-type]
    _, second = first.finish(lambda: Errand(talk(line, owed, GetStats()), line, 1.0).post())  # type: ignore[arg-type]
    assert line.heard[-3:] == ["collect GetStats", "post CheckHealth", "collect CheckHealth"]
    assert second is not None
    assert second.finish(lambda: None)[0] == "GetStats"


def test_without_room_before_the_first_copy_the_next_question_is_asked_before_a_later_one() -> None:
    line, owed = Line(), []

    def group() -> Generator[Any, Any, str]:
        yield Ask(WaitReady())
        for number in range(3):
            yield Do(lambda number=number: line.heard.append(f"copy {number}"))
        return "three"

    room = iter([False, True])
    first: Errand[str] = Errand(group(), line, 1.0)  # type: ignore[arg-type]
    outcome, second = first.finish(
        lambda: Errand(talk(line, owed, GetStats()), line, 1.0).post() if next(room) else None  # type: ignore[arg-type]
    )
    assert outcome == "three"
    assert second is not None
    assert line.heard[2:] == ["copy 0", "post GetStats", "copy 1", "copy 2"]
    second.collect()
    second.abandon()


@pytest.mark.parametrize("answered", [False, True])
def test_a_failure_calls_off_or_hands_back_what_was_asked_ahead(answered: bool) -> None:
    line, owed = Line(), []
    first = Errand(talk(line, owed, WaitReady(), fails=True), line, 1.0)  # type: ignore[arg-type]

    def follow() -> Any:
        second = Errand(talk(line, owed, GetStats()), line, 1.0).post()  # type: ignore[arg-type]
        if answered:
            second.collect()
        return second

    with pytest.raises(OdsError, match="no"):
        first.finish(follow)
    assert line.waiting is None
    assert owed == (["WaitReady", "GetStats"] if answered else ["WaitReady"])
    assert ("give up" in line.heard) is not answered
