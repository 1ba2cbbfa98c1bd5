"""The worker's way to the broker: one thread that owns all sockets, so that the simulation may be as slow as it likes.

The thread connects, reads tickets, verdicts and the broker's beats, and sends heartbeats, reports and rollouts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np

from ods_async.core.episode import Rollout
from ods_async.core.reports import Report, Ticket
from ods_async.core.requests import FieldDescription, Welcome
from ods_async.core.schema import EpisodeSchema
from ods_async.errors import BrokerUnreachableError
from ods_async.transport.sockets import Hub
from ods_async.wire.codec import encode_report
from ods_async.wire.rollout import pack_rollout, plan_rollout
from ods_async.worker.conversation import LINGER, Conversation, find_broker, make_hello
from ods_async.worker.desk import Desk, LinkSettings
from ods_async.worker.trace import Trace

__all__ = ["Link"]


class Link:
    """Sockets of one worker, in a thread of their own from :meth:`start` until :meth:`finish`.

    Args:
        settings: how to reach the broker.
        trace: what heartbeats tell.
        say: tells people something.
    """

    def __init__(self, settings: LinkSettings, trace: Trace, say: Callable[[str], None]) -> None:
        self.desk = Desk(settings, say)
        self._trace = trace
        self._lost: list[int] = []
        self._fields: tuple[FieldDescription, ...] = ()
        self._thread = threading.Thread(target=self._run, name=f"ods-link-{settings.worker_id}", daemon=True)

    @property
    def stop_reason(self) -> str | None:
        """Why the work is to end, or None; it may be read at any time."""
        return self.desk.stop_reason

    @property
    def error(self) -> BaseException | None:
        """Why the link ended by itself, or None."""
        return self.desk.error

    def start(self) -> None:
        """Start the thread, which connects at once."""
        self._thread.start()

    def wait_connected(self) -> Welcome | None:
        """The broker's welcome; None when the work is to end before there was one.

        Raises:
            BrokerUnreachableError: nobody answered in time.
            AuthenticationError: the keys do not fit.
            OdsError: the broker refused the worker.
        """
        return self.desk.wait_connected()

    def ready(self, schema: EpisodeSchema, num_envs: int, environment: str) -> None:
        """Tell the broker what this worker records; tickets may come from now on."""
        self._fields = tuple(FieldDescription(f.path, f.dtype, f.shape, f.pad, 0) for f in schema)
        hello = make_hello(self.desk.settings, num_envs, self._fields, environment)
        self.desk.do(lambda: setattr(self.desk, "hello", hello))

    def take_ticket(self) -> Ticket | None:
        """The next ticket; waits for one, and for verdicts while too much is without one. None: end.

        Raises:
            OdsError: the link ended by itself.
        """
        return self.desk.take_ticket()

    def report(self, report: Report) -> None:
        """Send a small report.

        Raises:
            ArgumentError, LimitExceededError: it cannot be sent.
        """
        data = encode_report(report)
        self.desk.do(lambda: self.desk.outbox.report(data))

    def hand_in(self, rollout: Rollout) -> None:
        """Pack a rollout, send it, and keep it until its verdict is read.

        Raises:
            SchemaMismatchError, LimitExceededError, ArgumentError: it cannot be sent; the message says why.
        """
        welcome = self.desk.welcome
        assert welcome is not None
        header, nbytes = plan_rollout(rollout, self._fields, welcome.limits)
        payload = np.empty(nbytes, np.uint8).data
        pack_rollout(rollout, header, payload)
        data = encode_report(header, welcome.limits)

        def keep() -> None:
            self.desk.outbox.keep(rollout.ticket_id, (data, payload))
            self.desk.note_room()

        self.desk.close_room()
        self.desk.do(keep)

    def request_stop(self, reason: str) -> None:
        """End between two steps. Safe to call from a signal handler and from any thread."""
        self.desk.request_stop(reason)

    def finish(self, last_words: Report | None, flush_timeout: float) -> tuple[int, ...]:
        """Wait for the verdicts that are missing, send ``last_words``, and end the thread.

        Args:
            last_words: a ``Goodbye``, or None.
            flush_timeout: seconds to wait for verdicts.

        Returns:
            The tickets whose rollout has no verdict: whether they were published is not known.
        """
        desk, at = self.desk, time.monotonic() + flush_timeout

        def close() -> None:
            desk.last_words, desk.close_at = last_words, at

        desk.do(close)
        self._thread.join(flush_timeout + LINGER + 5.0)
        if not self._thread.is_alive():
            desk.close()
        return (*self._lost, *desk.outbox.unjudged)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with Hub() as hub:
                self._serve(hub)
        except BaseException as caught:
            error = caught
        finally:
            self.desk.ended(error)

    def _serve(self, hub: Hub) -> None:
        desk = self.desk
        welcome = find_broker(desk, hub, desk.settings.connect_timeout)
        while welcome is not None:
            desk.connected(welcome)
            lost = Conversation(desk, hub, welcome, self._trace).hold()
            if not lost:
                return
            if desk.settings.patience <= 0 or desk.close_at is not None:
                raise BrokerUnreachableError(lost, endpoint=desk.settings.endpoint, timeout=0.0)
            desk.say(f"{lost}; looking for it for {desk.settings.patience:g} s")
            again = find_broker(desk, hub, desk.settings.patience)
            if again is not None and again.run_id != welcome.run_id:
                self._new_run()
            desk.outbox.connected_again()
            welcome = again

    def _new_run(self) -> None:
        """The tickets of the old run mean nothing to the new one."""
        gone = self.desk.outbox.forget()
        self._lost += gone
        self.desk.drop_tickets()
        self.desk.note_room()
        if gone:
            self.desk.say(f"the broker was started anew; rollouts without a verdict are lost: tickets {list(gone)}")
