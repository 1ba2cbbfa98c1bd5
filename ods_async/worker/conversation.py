"""The talk with one broker: finding it, and everything said until it is lost or no longer needed."""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import deque
from typing import Final

from ods_async.core.reports import (
    Heartbeat,
    Hello,
    RevokeTickets,
    ServiceBeat,
    ShutDown,
    Verdict,
)
from ods_async.core.requests import Connect, FieldDescription, Welcome
from ods_async.errors import AuthenticationError, BrokerUnreachableError, OdsError, ProtocolError, RolloutRefusedError
from ods_async.transport.probe import mechanism_of
from ods_async.transport.sockets import Channel, ChannelOptions, Frame, Hub, Waitable, open_channel
from ods_async.transport.watch import ConnectionWatch, handshake_error, watch_connection
from ods_async.wire.codec import (
    BEAT_TOPIC,
    STOP_TOPIC,
    TICKETS_TOPIC,
    VERDICT_TOPIC,
    decode_answer,
    decode_broadcast,
    decode_ticket,
    encode_report,
    encode_request,
)
from ods_async.wire.messages import PROTOCOL
from ods_async.worker.desk import Desk, LinkSettings
from ods_async.worker.trace import Trace

__all__ = ["LINGER", "Conversation", "find_broker", "make_hello"]

LINGER: Final = 2.0
HELLO_REFUSED: Final = -1  # the ticket id in a verdict that refuses a worker's hello
HELLO_WANTED: Final = -2  # the ticket id in a verdict that asks for the hello again, because it got lost
_LOST_AFTER_TIMEOUTS: Final = 3.0
_BLOCKED_PAUSE: Final = 0.02


def make_hello(
    settings: LinkSettings, num_envs: int = 1, fields: tuple[FieldDescription, ...] = (), environment: str = ""
) -> Hello:
    """How this worker introduces itself; without ``fields``, it is still making its environment."""
    return Hello(
        worker_id=settings.worker_id,
        pid=os.getpid(),
        host=socket.gethostname(),
        num_envs=num_envs,
        fields=fields,
        environment=environment[:200],
        restarts=settings.restarts,
    )


def find_broker(desk: Desk, hub: Hub, timeout: float) -> Welcome | None:
    """Ask for the other addresses; None when told to stop meanwhile.

    Raises:
        BrokerUnreachableError: nobody answered in time.
        AuthenticationError: the keys do not fit.
        OdsError: the broker's refusal.
    """
    endpoint = desk.settings.endpoint
    deadline = time.monotonic() + timeout
    options = ChannelOptions(curve=desk.settings.keys, watched=True)
    ask = Connect(via=endpoint, role="worker", name=desk.settings.worker_id, protocol=PROTOCOL)
    with open_channel(hub, "req", connect=[endpoint], options=options) as channel:
        watch = watch_connection(channel)
        ask_again, number = 0.0, 0
        while not desk.look_around():
            watch.poll()
            now = time.monotonic()
            if watch.doubtful:
                watch.probed(mechanism_of(endpoint))
            if watch.hopeless or (watch.failure is not None and now >= deadline):
                raise handshake_error(endpoint, desk.settings.keys, watch)
            if now >= deadline:
                raise BrokerUnreachableError(
                    f"no broker can be reached at {endpoint}: nobody answered within {timeout:g} s",
                    endpoint=endpoint,
                    timeout=timeout,
                )
            if now >= ask_again:
                number = secrets.randbits(32)
                if channel.send([encode_request(number, max(deadline - now, 0.1), ask)]):
                    ask_again = now + 2.0
            frames = channel.receive()
            if frames is None:
                desk.pause([channel, watch], min(0.1, deadline - now))
                continue
            answered, answer = decode_answer(frames[0])
            if isinstance(answer, OdsError):
                raise answer
            if isinstance(answer, Welcome) and answered == number:
                return answer
    return None


class Conversation:
    """One connection to one broker, from its welcome until it is lost or no longer needed."""

    def __init__(self, desk: Desk, hub: Hub, welcome: Welcome, trace: Trace) -> None:
        self._desk = desk
        self._hub = hub
        self._welcome = welcome
        self._trace = trace
        self._worker_id = desk.settings.worker_id
        self._hellos: deque[bytes] = deque([encode_report(make_hello(desk.settings))])
        self._introduced: Hello | None = None
        self._heard_at = self._turn_at = self._beat_due = self._began = time.monotonic()
        self._heard = False
        self._pull: Channel | None = None

    def hold(self) -> str:
        """Talk; returns why the broker is lost, or nothing when the work is over."""
        desk, welcome = self._desk, self._welcome
        topics = (VERDICT_TOPIC + self._worker_id.encode(), TICKETS_TOPIC, STOP_TOPIC, BEAT_TOPIC)
        with (
            open_channel(self._hub, "sub", connect=[welcome.events], options=self._options(topics)) as sub,
            open_channel(self._hub, "push", connect=[welcome.rollouts], options=self._options()) as push,
        ):
            watch = watch_connection(sub)
            try:
                while True:
                    desk.look_around()
                    now = time.monotonic()
                    if now - self._turn_at > welcome.heartbeat_timeout:
                        self._heard_at = now  # this process was stopped for a while, not the broker
                    self._turn_at = now
                    self._check_keys(watch)
                    lost = self._listen(sub, now)
                    if lost:
                        return lost
                    self._introduce(now)
                    blocked = self._speak(push, now)
                    if self._ending(push, now):
                        push.close(LINGER)
                        return ""
                    self._wait(sub, now, blocked)
            finally:
                if self._pull is not None:
                    self._pull.close()

    def _options(self, topics: tuple[bytes, ...] = ()) -> ChannelOptions:
        return ChannelOptions(
            high_water_mark=64,
            max_message_bytes=self._welcome.limits.header_bytes,
            curve=self._desk.settings.keys,
            topics=topics,
            watched=bool(topics),
        )

    def _check_keys(self, watch: ConnectionWatch) -> None:
        """Taken off the allow-list in the meantime: all else heals, or shows as silence."""
        watch.poll()
        if watch.hopeless:
            error = handshake_error(self._desk.settings.endpoint, self._desk.settings.keys, watch)
            if isinstance(error, AuthenticationError):
                raise error

    def _listen(self, sub: Channel, now: float) -> str:
        for channel, read in ((self._pull, self._read_ticket), (sub, self._read_news)):
            while channel is not None and (frames := channel.receive()) is not None:
                self._heard_at, self._heard = now, True
                try:
                    lost = read(frames)
                except ProtocolError:
                    self._desk.malformed += 1
                    continue
                if lost:
                    return lost
        silent = now - self._heard_at
        if silent > _LOST_AFTER_TIMEOUTS * self._welcome.heartbeat_timeout:
            return f"the broker at {self._desk.settings.endpoint} has been silent for {silent:.1f} s"
        return ""

    def _read_ticket(self, frames: list[Frame]) -> str:
        ticket = decode_ticket(frames[0])
        if ticket.run_id == self._welcome.run_id:
            self._desk.add_ticket(ticket)
        return ""

    def _read_news(self, frames: list[Frame]) -> str:
        if len(frames) != 2:
            raise ProtocolError("a broadcast has two frames", reason="frames")
        desk, news = self._desk, decode_broadcast(frames[0], frames[1], self._welcome.limits)
        if isinstance(news, Verdict):
            if news.worker_id == self._worker_id:
                self._read_verdict(news)
        elif isinstance(news, RevokeTickets):
            desk.revoke(news)
        elif isinstance(news, ShutDown):
            desk.request_stop(f"told to end: {news.reason}")
            desk.look_around()
        elif isinstance(news, ServiceBeat) and news.run_id != self._welcome.run_id:
            return f"the broker at {desk.settings.endpoint} was started anew"
        return ""

    def _read_verdict(self, verdict: Verdict) -> None:
        desk = self._desk
        if verdict.ticket_id == HELLO_REFUSED:
            raise RolloutRefusedError(
                f"the broker refused this worker: {verdict.reason}", ticket_id=HELLO_REFUSED, reason=verdict.reason
            )
        if verdict.ticket_id == HELLO_WANTED:
            if not self._hellos:
                self._hellos.append(encode_report(self._introduced or make_hello(desk.settings)))
            return
        if not desk.outbox.judged(verdict.ticket_id):
            return
        if verdict.outcome == "accepted":
            desk.accepted += 1
        else:
            desk.refused += verdict.outcome == "refused"
            if desk.stop_reason is None:  # once the run ends, what was under way is refused: nothing to report
                desk.say(f"rollout for ticket {verdict.ticket_id}: {verdict.outcome}: {verdict.reason}")
        desk.note_room()

    def _introduce(self, now: float) -> None:
        """Say hello once what is broadcast can be heard, so that no verdict is missed; then open for tickets."""
        hello = self._desk.hello
        if hello is None or hello is self._introduced:
            return
        if self._heard or now - self._began > 2 * self._welcome.heartbeat_interval:
            self._introduced = hello
            self._hellos.append(encode_report(hello))
            self._pull = open_channel(self._hub, "pull", connect=[self._welcome.tickets], options=self._options())

    def _speak(self, push: Channel, now: float) -> bool:
        """Send what can be sent; True if something had to stay."""
        desk = self._desk
        while self._hellos:
            if not push.send([self._hellos[0]]):
                return True
            self._hellos.popleft()
        if now >= self._beat_due:
            self._beat_due = now + self._welcome.heartbeat_interval
            trace = self._trace
            push.send([encode_report(Heartbeat(self._worker_id, trace.phase, desk.ticket_id, trace.steps))])
        if desk.hello is not None and self._introduced is None:
            return desk.outbox.waiting  # a rollout for someone who never heard the hello would be refused
        while (frames := desk.outbox.next(now)) is not None:
            if not push.send(frames, copy=False):
                return True
            desk.outbox.sent(now)
        return False

    def _ending(self, push: Channel, now: float) -> bool:
        desk = self._desk
        if desk.close_at is None:
            return False
        if (desk.outbox.unjudged or desk.outbox.waiting) and now < desk.close_at:
            return False
        last, desk.last_words = desk.last_words, None
        if last is not None:
            push.send([encode_report(last)])
        return True

    def _wait(self, sub: Channel, now: float, blocked: bool) -> None:
        desk = self._desk
        moments = (self._beat_due, desk.outbox.next_due(), desk.close_at)
        timeout = min(moment for moment in moments if moment is not None) - now
        if not blocked:
            readers: list[Waitable | int] = [sub] if self._pull is None else [sub, self._pull]
            desk.pause(readers, min(max(timeout, 0.001), self._welcome.heartbeat_interval))
        else:
            desk.pause([sub], max(min(timeout, _BLOCKED_PAUSE), 0.001))
