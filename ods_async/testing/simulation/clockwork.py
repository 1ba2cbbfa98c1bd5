"""One loop for a whole service: simulated time, processes that can be stopped and killed, and a network between them.

Everything that happens is an entry in one queue, ordered by time and then by a serial number, and every choice comes
from one random generator. So one seed is one history, to the last detail.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from ods_async.core.stimuli import Instant

__all__ = ["Connection", "Network", "Process", "SimulationError", "Violation", "World"]

_CHANNELS = ("^requests", "^reports", "answers", "broadcast", "tickets")
_EPOCH_NS = 1_700_000_000_000_000_000


class SimulationError(AssertionError):
    """A schedule went wrong."""


class Violation(SimulationError):
    """An invariant does not hold.

    Attributes:
        invariant: its short name, see ``ledger.INVARIANTS``.
    """

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


class Process:
    """A simulated process. While it is stopped, what is due waits as bytes do in a socket; a dead one does nothing."""

    __slots__ = ("alive", "backlog", "name", "stopped")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.stopped = False
        self.backlog: list[tuple[bool, Callable[..., None], tuple[Any, ...]]] = []


class World:
    """Time, chance, and the queue of what happens next.

    Args:
        seed: everything follows from it.
        trace: called with a line for everything that happens, or None.
    """

    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.rng = random.Random(seed)
        self.now = 1_000_000_000  # monotonic nanoseconds
        self.wall_offset = _EPOCH_NS
        self.steps = 0
        self.calm = False
        self._trace = trace
        self._queue: list[tuple[int, int, Process | None, bool, Callable[..., None], tuple[Any, ...]]] = []
        self._serial = 0

    @property
    def seconds(self) -> float:
        """Monotonic seconds."""
        return self.now * 1e-9

    def instant(self) -> Instant:
        """Now, by both clocks."""
        return Instant(self.now, self.now + self.wall_offset)

    @property
    def tracing(self) -> bool:
        """Whether :meth:`note` is listened to."""
        return self._trace is not None

    def note(self, who: str, what: object) -> None:
        """A line for the trace."""
        if self._trace is not None:
            self._trace(f"{self.now * 1e-9:9.4f} {who:<10} {what}")

    def chance(self, probability: float) -> bool:
        """True that often."""
        return self.rng.random() < probability

    # --- the queue --------------------------------------------------------------------------------------------------

    def after(self, seconds: float, process: Process | None, do: Callable[..., None], *args: Any) -> None:
        """A timer of ``process``: ``do(*args)`` in ``seconds``, later if it is stopped then, never if it is dead."""
        self._serial += 1
        heapq.heappush(self._queue, (self.now + int(seconds * 1e9), self._serial, process, True, do, args))

    def arrive(self, at: int, process: Process, do: Callable[..., None], *args: Any) -> None:
        """Something reaches ``process`` at ``at`` (monotonic nanoseconds)."""
        self._serial += 1
        heapq.heappush(self._queue, (at, self._serial, process, False, do, args))

    def step(self) -> bool:
        """Let the next thing happen; False when nothing is left."""
        if not self._queue:
            return False
        at, _, process, timer, do, args = heapq.heappop(self._queue)
        self.now = max(self.now, at)
        if process is not None:
            if not process.alive:
                return True
            if process.stopped:
                process.backlog.append((timer, do, args))
                return True
        self.steps += 1
        do(*args)
        return True

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Go on until ``until()``; False when ``limit`` seconds pass before it."""
        end = self.now + int(limit * 1e9)
        while not until():
            if self.now > end or not self.step():
                return False
        return True

    def pass_time(self, seconds: float) -> None:
        """Go on for that long."""
        end = self.now + int(seconds * 1e9)
        while self._queue and self._queue[0][0] <= end:
            self.step()
        self.now = max(self.now, end)

    # --- signals ----------------------------------------------------------------------------------------------------

    def stop(self, process: Process, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after that long."""
        if process.alive and not process.stopped:
            self.note(process.name, f"SIGSTOP for {seconds:.2f} s")
            process.stopped = True
            self.after(seconds, None, self.resume, process)

    def resume(self, process: Process) -> None:
        """SIGCONT: what waited happens now. Timers may be served before or after what lies in the sockets."""
        if not process.stopped:
            return
        process.stopped = False
        if not process.alive:
            return
        self.note(process.name, "SIGCONT")
        backlog, process.backlog = process.backlog, []
        if self.chance(0.5):
            backlog.sort(key=lambda entry: not entry[0])
        for timer, do, args in backlog:
            self._serial += 1
            heapq.heappush(self._queue, (self.now, self._serial, process, timer, do, args))

    def kill(self, process: Process) -> None:
        """SIGKILL."""
        if process.alive:
            self.note(process.name, "SIGKILL")
            process.alive = False
            process.backlog.clear()


class Connection:
    """One peer's way to one broker. Each channel of it keeps its order, as a TCP stream does; nothing else does.

    Attributes:
        identity: how the broker knows it; a new connection is a new identity.
        open: whether anything still arrives.
        dark: channels that swallow everything without a sign.
    """

    __slots__ = ("_last", "_lost", "_network", "broker", "dark", "identity", "open", "peer")

    def __init__(
        self, network: Network, peer: Process, broker: Process, identity: bytes, lost: Callable[[Connection], None]
    ) -> None:
        self._network = network
        self.peer = peer
        self.broker = broker
        self.identity = identity
        self.open = True
        self.dark: set[str] = set()
        self._lost = lost
        self._last: dict[str, int] = {}

    def up(self, channel: str, do: Callable[..., None], *args: Any) -> None:
        """Send to the broker."""
        self._network.send(self, "^" + channel, self.broker, do, args)

    def down(self, channel: str, do: Callable[..., None], *args: Any) -> None:
        """Send to the peer."""
        self._network.send(self, channel, self.peer, do, args)

    def close(self) -> None:
        """What is under way is lost, and the peer is told soon."""
        if self.open:
            self.open = False
            world = self._network.world
            world.after(world.rng.uniform(0.001, 0.1), self.peer, self._lost, self)


class Network:
    """Carries messages with delay, and while the faults last also loses and repeats some.

    Args:
        world: time and chance.
        lossy: channel -> how often a message of it is lost. What is in no such channel is lost only when its
            connection is cut, as over TCP: a broadcast may be dropped at a full queue, a report may not.
        delay: typical seconds under way.
        repeat: how often a message arrives twice.
        reread: makes of a channel and a receiver's arguments what the receiver gets, or None to pass them on.
    """

    def __init__(
        self,
        world: World,
        lossy: dict[str, float],
        delay: float,
        repeat: float,
        reread: Callable[[str, tuple[Any, ...]], tuple[Any, ...]] | None = None,
    ) -> None:
        self.world = world
        self._lossy = lossy
        self._delay = delay
        self._repeat = repeat
        self._reread = reread
        self._identities = 0
        self.connections: list[Connection] = []

    def connect(self, peer: Process, broker: Process, lost: Callable[[Connection], None]) -> Connection:
        """A new connection; ``lost`` is called in ``peer`` when it is no more."""
        self._identities += 1
        connection = Connection(self, peer, broker, b"\x00%04d" % self._identities, lost)
        self.connections = [known for known in self.connections if known.open]
        self.connections.append(connection)
        return connection

    def send(
        self, connection: Connection, channel: str, target: Process, do: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        """Put a message on its way."""
        if not connection.open:
            return
        world = self.world
        rng = world.rng
        if not world.calm and (channel in connection.dark or rng.random() < self._lossy.get(channel, 0.0)):
            if world.tracing:
                world.note("network", f"loses a message of {channel} from or to {connection.peer.name}")
            return
        if self._reread is not None:
            args = self._reread(channel, args)
        delay = rng.expovariate(1.0 / self._delay) if not world.calm else self._delay
        last = connection._last
        at = max(last.get(channel, 0), world.now + 50_000 + int(delay * 1e9))
        last[channel] = at
        world.arrive(at, target, _deliver, connection, do, args)
        if not world.calm and rng.random() < self._repeat:
            last[channel] = at + 1_000_000
            world.arrive(at + 1_000_000, target, _deliver, connection, do, args)

    def cut(self, connection: Connection, silent_for: float) -> None:
        """Cut a connection; with ``silent_for`` it first swallows everything for that long without a sign."""
        self.world.note("network", f"cuts {connection.peer.name} off, silently for {silent_for:.2f} s")
        connection.dark |= set(_CHANNELS)
        self.world.after(silent_for, None, connection.close)

    def darken(self, connection: Connection, channel: str, seconds: float) -> None:
        """One socket of a peer is cut off and comes back by itself, as zmq's do: nobody is told."""
        self.world.note("network", f"swallows {channel} of {connection.peer.name} for {seconds:.2f} s")
        connection.dark.add(channel)
        self.world.after(seconds, None, connection.dark.discard, channel)

    def cut_all_of(self, process: Process) -> None:
        """The process is dead: everyone connected with it loses the connection."""
        for connection in self.connections:
            if process in (connection.peer, connection.broker):
                connection.close()


def _deliver(connection: Connection, do: Callable[..., None], args: tuple[Any, ...]) -> None:
    if connection.open:
        do(*args)
