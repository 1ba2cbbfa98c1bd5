"""A conversation over a blocking lane whose first question may be on its way while other work is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

from ods_async.client.exchange import Ask, Do, Step, Talk
from ods_async.transport.lane import Lane
from ods_async.wire.asking import Answered

__all__ = ["Errand"]

A = TypeVar("A")


class Errand(Generic[A]):
    """Carried out by :meth:`finish`; begun earlier with :meth:`post`, if at all. A lane has one question under way.

    Args:
        talk: begins with a question.
        lane: where to ask.
        deadline: for all of its questions, monotonic seconds.
    """

    def __init__(self, talk: Talk[A], lane: Lane, deadline: float) -> None:
        self._talk = talk
        self._lane = lane
        self._deadline = deadline
        self._begun = False
        self._waiting = False
        self._first: Answered | BaseException | None = None

    def post(self) -> Self:
        """Ask the first question and do not wait for the answer. What goes wrong is raised by :meth:`finish`."""
        step = next(self._talk)
        assert isinstance(step, Ask)
        self._begun = True
        try:
            self._lane.post(step.request, self._deadline, step.limit)
            self._waiting = True
        except Exception as error:
            self._first = error
        return self

    def collect(self) -> None:
        """Wait for the answer to what was posted, so that the lane can be asked something else."""
        if self._waiting:
            self._waiting = False
            try:
                self._first = self._lane.collect()
            except BaseException as error:
                self._first = error

    def abandon(self) -> None:
        """Do not carry it out: an answer that is there already is handed back, one still to come is called off."""
        if self._waiting:
            self._waiting = False
            self._lane.give_up()
        elif isinstance(self._first, Answered):
            self._talk.send(self._first)  # it must know what it was given to hand it back on closing
        self._talk.close()

    def finish(self, follow: Callable[[], Errand[A] | None]) -> tuple[A, Errand[A] | None]:
        """Carry it out to its end.

        Args:
            follow: called before every piece of work until it has posted the next errand on the same lane.

        Returns:
            The outcome, and the errand that ``follow`` posted.
        """
        following: Errand[A] | None = None
        try:
            step = self._resume()
            while True:
                if isinstance(step, Do) and following is None:
                    following = follow()
                elif isinstance(step, Ask) and following is not None:
                    following.collect()
                step = self._carry_out(step)
        except StopIteration as done:
            return done.value, following
        except BaseException:
            if following is not None:
                following.abandon()
            raise
        finally:
            self._talk.close()

    def _resume(self) -> Step:
        if not self._begun:
            return next(self._talk)
        self.collect()
        if isinstance(self._first, BaseException):
            return self._talk.throw(self._first)
        return self._talk.send(self._first)

    def _carry_out(self, step: Step) -> Step:
        outcome: Any
        try:
            outcome = self._lane.ask(step.request, self._deadline, step.limit) if isinstance(step, Ask) else step.work()
        except BaseException as error:
            return self._talk.throw(error)
        return self._talk.send(outcome)
