"""A small broker for tests: real sockets, no rules. It records what workers say, and says what it is told."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ods_async.core.episode import Rollout
from ods_async.core.reports import Hello, Report, RolloutReport, ServiceBeat, Ticket, Verdict
from ods_async.core.requests import Connect, Limits, Welcome
from ods_async.errors import OdsError
from ods_async.transport.sockets import Hub, join_envelope, open_channel, split_envelope, wait_any
from ods_async.wire.codec import decode_report, decode_request, encode_answer, encode_broadcast, encode_ticket
from ods_async.wire.messages import PROTOCOL
from ods_async.wire.rollout import unpack_rollout

LIMITS = Limits()


class Peer:
    """Answers ``Connect``, beats, and does what the test says. ``judge=False``: no verdict comes by itself."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:0", run_id: int = 77, judge: bool = True) -> None:
        self.run_id = run_id
        self.judge = judge
        self.beating = True
        self.refuse: OdsError | None = None
        self.limits = LIMITS
        self.heartbeat = (0.05, 1.0)
        self.settings: dict[str, object] = {"max_episode_steps": 60}
        self.reports: list[Report] = []
        self.times: list[float] = []
        self.rollouts: list[Rollout] = []
        self.problems: list[BaseException] = []
        self._changed = threading.Condition()
        self._out: deque[tuple[str, list[bytes]]] = deque()
        self._stop = False
        self._hub = Hub()
        kinds: tuple[Any, ...] = ("router", "push", "pull", "pub")
        ends = [endpoint, *["tcp://127.0.0.1:0"] * 3]
        self._channels = {k: open_channel(self._hub, k, bind=[e]) for k, e in zip(kinds, ends, strict=True)}
        self.endpoint = self._channels["router"].endpoints[0]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # --- what a test does -------------------------------------------------------------------------------------------

    def ticket(self, number: int, rollout: int = 0) -> None:
        """Push a ticket."""
        self._out.append(("push", [encode_ticket(Ticket(number, 1, rollout, self.run_id))]))

    def tell(self, what: Any) -> None:
        """Broadcast."""
        self._out.append(("pub", list(encode_broadcast(what))))

    def raw(self, kind: str, frames: list[bytes]) -> None:
        """Send bytes as they are."""
        self._out.append((kind, frames))

    def until(self, condition: Callable[[], Any], timeout: float = 20.0) -> Any:
        """Wait until something is true of what was received."""
        with self._changed:
            assert self._changed.wait_for(condition, timeout), [type(r).__name__ for r in self.reports]
            return condition()

    def said(self, kind: type[Any]) -> list[Any]:
        """The reports of one kind so far."""
        return [report for report in self.reports if isinstance(report, kind)]

    def first(self, kind: type[Any], count: int = 1) -> Any:
        """Wait for the ``count``-th report of a kind."""
        return self.until(lambda: self.said(kind)[count - 1 : count])[0]

    def ready(self) -> Hello:
        """Wait until a worker said what it records."""
        found: Hello = self.until(lambda: [h for h in self.said(Hello) if h.fields])[0]
        return found

    def close(self) -> None:
        """End, and raise what went wrong inside."""
        self._stop = True
        self._thread.join(10)
        self._hub.close()
        if self.problems:
            raise self.problems[0]

    # --- inside -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stop:
                self._turn()
        except BaseException as error:
            self.problems.append(error)

    def _turn(self) -> None:
        if self.beating:
            self._channels["pub"].send(list(encode_broadcast(ServiceBeat(self.run_id, 0, "STARTING"))))
        while self._out:
            kind, frames = self._out[0]
            if not self._channels[kind].send(frames):
                break
            self._out.popleft()
        wait_any([self._channels["router"], self._channels["pull"]], 0.02)
        while (frames := self._channels["router"].receive()) is not None:
            who, body = split_envelope(frames)
            number, _, request = decode_request(body[0])
            assert isinstance(request, Connect)
            answer: Any = self.refuse or self._welcome()
            self._channels["router"].send(join_envelope(who, [encode_answer(number, answer)]))
        while (frames := self._channels["pull"].receive()) is not None:
            self._read(frames)

    def _read(self, frames: list[Any]) -> None:
        report = decode_report(frames[0])
        with self._changed:
            self.reports.append(report)
            self.times.append(time.monotonic())
            if isinstance(report, RolloutReport):
                self.rollouts.append(unpack_rollout(report, memoryview(frames[1]), LIMITS))
            self._changed.notify_all()
        if isinstance(report, RolloutReport) and self.judge:
            self.tell(Verdict(report.ticket_id, report.worker_id, "accepted"))

    def _welcome(self) -> Welcome:
        ends = {kind: channel.endpoints[0] for kind, channel in self._channels.items()}
        return Welcome(
            run_id=self.run_id,
            protocol=PROTOCOL,
            server="test",
            state="STARTING",
            tickets=ends["push"],
            rollouts=ends["pull"],
            events=ends["pub"],
            heartbeat_interval=self.heartbeat[0],
            heartbeat_timeout=self.heartbeat[1],
            lease_seconds=5.0,
            limits=self.limits,
            settings=self.settings,
        )


@pytest.fixture
def peer() -> Iterator[Peer]:
    """A broker that accepts everything."""
    made = Peer()
    yield made
    made.close()


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    """Brokers of any kind; closed at the end."""
    made: list[Peer] = []

    def make(**kwargs: Any) -> Peer:
        made.append(Peer(**kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()
