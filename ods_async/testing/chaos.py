"""``python -m ods_async.testing.chaos``: real processes, random faults, and what must hold all the same.

A standing broker, two workers, three consumers (asyncio and blocking over shared memory, blocking over tcp frames) and
a subscriber, each a process of its own. Faults come at random from a seed: kills, stops, ends, failing and slow
environments, garbage at every port, stolen tickets, a second broker on the endpoint, and a network (a relay on
loopback) that is cut without a close, drops connections, or delays.

Checked: no window is torn and no episode is published twice; every rollout that was accepted was published; every
request has one answer or one error within its deadline and some slack; events have no gap that is not told; the broker
never errs; when the faults end, everybody is served again and no lease stays; nothing is left over at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import itertools
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from ods_async.client.sync import Client
from ods_async.core.requests import Welcome
from ods_async.errors import OdsError
from ods_async.testing.peers import RawConsumer
from ods_async.testing.trial.ending import ended_by_signals
from ods_async.testing.trial.house import House, Program, until
from ods_async.testing.trial.mischief import Mischief
from ods_async.testing.trial.relay import Relay
from ods_async.testing.trial.verdict import events_faults, fatal_words, run_faults, sum_of
from ods_async.testing.trial.witness import Witness
from ods_async.transport.endpoint import parse_endpoint, sibling

__all__ = ["Chaos", "main"]

_LOOK: Final = 0.05
_ENDS: Final = 20.0
_RIVAL_SECONDS: Final = 10.0
_FINE_CODES: Final = {"broker": (0,), "consumer": (0,), "subscriber": (0, 1), "worker": (0, 1, 3, -9)}


class Chaos:
    """One trial.

    Args:
        folder: where everything lies.
        seed: of all that is random here.
        rate: requests a second of each consumer.
        pause: mean seconds between two faults.
        longest: seconds that a stop, a cut or a delay lasts at most.
    """

    def __init__(
        self, folder: Path, seed: int, *, rate: float = 20.0, pause: float = 0.7, longest: float = 6.0
    ) -> None:
        self.faults: list[str] = []
        self.welcome: Welcome | None = None
        self.main = f"ipc://{folder / 'c.sock'}"
        self.port = _free_port()
        self.house = House(folder, _settings(self.main, self.port))
        self.relay = Relay()
        self.witness = Witness(str(sibling(self.main, "events")))
        self.mischief = Mischief(self, random.Random(seed), longest)
        self._rng = random.Random(seed + 1)
        self._rate, self._pause = rate, pause
        self._ends: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._start_at: dict[str, float] = {}
        self._greeted = 0
        self._calm = False

    def run(self, seconds: float) -> bool:
        """All of it. Returns True when everything held; what did not is in ``faults``."""
        try:
            self._begin()
            next_fault = time.monotonic()
            for _ in until(time.monotonic() + seconds, _LOOK):
                self._look()
                if time.monotonic() >= next_fault:
                    next_fault = time.monotonic() + self._rng.expovariate(1 / self._pause)
                    self._do(self.mischief.one())
            self._come_to_rest()
            self._end()
        finally:
            self._give_back()
        self.faults += self.mischief.faults + self.witness.faults + run_faults(self.witness.runs.values())
        return not self.faults

    # --- going on ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        house, relayed = self.house, f"tcp://127.0.0.2:{self.port}"
        house.add_broker()
        for _ in until(time.monotonic() + 60.0, _LOOK):
            self._greet()
            if self.welcome is not None:
                break
        else:
            raise OdsError(f"the broker does not start: {house.programs['broker'].words()}")
        house.add_worker("worker-ipc", self.main, "--patience", "60")
        house.add_worker("worker-tcp", relayed, "--patience", "60")
        rate = ("--rate", str(self._rate))
        shared = ("--data-path", "shared_memory", *rate)
        house.add_consumer("consumer-asyncio", self.main, "--style", "asyncio", "--seed", "1", *shared)
        house.add_consumer("consumer-blocking", self.main, "--seed", "2", *shared)
        house.add_consumer("consumer-frames", relayed, "--seed", "3", "--data-path", "frames", *rate)
        house.add_events(relayed, "--timeout", "30")
        self._wait_until(self._served, 60.0, "the start")

    def _look(self) -> None:
        """End what is over, and start again what has ended."""
        now = time.monotonic()
        while self._ends and self._ends[0][0] <= now:
            heapq.heappop(self._ends)[2]()
        for name, program in self.house.programs.items():
            if program.running:
                continue
            due = self._start_at.get(name)
            if due is None:
                self._judge_end(name, program)
                self._start_at[name] = now + (0.0 if self._calm else self._rng.uniform(0.0, 1.5))
            elif now >= due:
                del self._start_at[name]
                if name.startswith("worker"):
                    self.house.set_environment(name, {} if self._calm else self.mischief.environment())
                program.start()
        self._greet()

    def _judge_end(self, name: str, program: Program) -> None:
        kind = name.partition("-")[0]
        if kind == "broker":
            self.welcome = None
        code = program.exit_codes[-1]
        if kind == "broker" and code == 1 and time.monotonic() - self.mischief.rival_seen < _RIVAL_SECONDS:
            return  # it came back while a second one had taken its place
        if code not in _FINE_CODES[kind] and not program.doomed:
            self.faults.append(f"{name} ended by itself with code {code}:\n{program.words()}")

    def _greet(self) -> None:
        """After a start of the broker: learn the ports of its sockets, and relay them."""
        broker = self.house.programs["broker"]
        if self._greeted == broker.starts or not broker.running or not any(broker.told()[-1:]):
            return
        with (
            contextlib.suppress(TimeoutError, OdsError),
            RawConsumer(f"tcp://127.0.0.1:{self.port}", timeout=0.5) as tcp,
            RawConsumer(self.main, timeout=0.5) as ipc,
        ):
            told = tcp.welcome
            self.relay.follow(parse_endpoint(e).port for e in (self.main_tcp, told.tickets, told.rollouts, told.events))
            self.welcome = self._rng.choice((told, ipc.welcome))
            self._greeted = broker.starts

    @property
    def main_tcp(self) -> str:
        """The broker's tcp address, without the relay."""
        return f"tcp://127.0.0.1:{self.port}"

    def _do(self, ending: tuple[float, Callable[[], None]] | None) -> None:
        if ending is not None:
            heapq.heappush(self._ends, (time.monotonic() + ending[0], next(self._numbers), ending[1]))

    # --- coming to rest ---------------------------------------------------------------------------------------------

    def _come_to_rest(self) -> None:
        self._calm = True
        while self._ends:
            heapq.heappop(self._ends)[2]()
        self.relay.mend()
        self.mischief.settle()
        for name, program in self.house.programs.items():
            program.signal(signal.SIGCONT)
            if name.startswith("worker"):  # as they are now they may go on failing
                program.doomed = True
                program.signal(signal.SIGTERM)
        self._wait_until(self._healthy, 60.0, "the last fault")
        self._wait_until(self._served, 60.0, "the last fault")

    def _healthy(self) -> bool:
        if self._start_at or not all(program.running for program in self.house.programs.values()):
            return False
        with contextlib.suppress(OdsError), Client(self.main, timeout=2.0) as client:
            status = client.get_status()
            ready = sum(worker["state"] in ("idle", "busy") for worker in status["workers"])
            return status["state"] == "READY" and ready >= 2
        return False

    def _served(self) -> bool:
        """Every consumer has had five batches since this was asked first."""
        batches = {report["pid"]: report["counts"].get("batches", 0) for report in self.house.reports()}
        pids = [p.pid for name, p in self.house.programs.items() if name.startswith("consumer") and p.running]
        if self._before is None:
            self._before = batches
        return len(pids) == 3 and all(batches.get(pid, 0) >= self._before.get(pid, 0) + 5 for pid in pids)

    _before: dict[int, int] | None = None

    def _wait_until(self, condition: Callable[[], bool], seconds: float, after: str) -> None:
        self._before = None
        for _ in until(time.monotonic() + seconds, 0.2):
            self._look()
            if condition():
                return
        words = "\n".join(f"--- {name}:\n{p.words()[-800:]}" for name, p in self.house.programs.items())
        self.faults.append(f"{condition.__name__.strip('_')} was not reached within {seconds:g} s of {after}:\n{words}")

    # --- the end ----------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        programs = self.house.programs
        for kind in ("consumer", "subscriber", "worker"):
            for name, program in programs.items():
                if name.startswith(kind) and not program.end(_ENDS):
                    self.faults.append(f"{name} did not end within {_ENDS:g} s of SIGTERM:\n{program.words()}")
        self.witness.settle()
        with Client(self.main, timeout=10.0) as client:
            self._wait_until_free(client)
            stats = client.get_stats()
        book = self.witness.runs.get(stats["run_id"])
        if book is None or stats["successful_episodes"] != book.highest + 1:
            self.faults.append(f"the broker counts {stats['successful_episodes']} episodes, announced were {book}")
        if not programs["broker"].end(_ENDS):
            self.faults.append(f"the broker did not end within {_ENDS:g} s of SIGTERM")

    def _wait_until_free(self, client: Client) -> None:
        for _ in until(time.monotonic() + 10.0, 0.1):
            status = client.get_status()
            if status["open_leases"] == 0:
                return
        self.faults.append(f"{status['open_leases']} leases stay open although all consumers are gone")

    def _give_back(self) -> None:
        self.mischief.close()
        self.house.end()
        self.relay.close()
        self.witness.close()
        self.faults += [f"{name} had to be killed at the end" for name in self.house.stubborn]
        self.faults += [f"left over: {words}" for words in self.house.left_over()]
        self.faults += fatal_words(self.house.programs["broker"].told())
        for name in ("consumer-asyncio", "consumer-blocking", "consumer-frames", "subscriber"):
            if name in self.house.programs:
                self.faults += fatal_words(self.house.programs[name].told())

    def tell(self) -> str:
        """All counts, in a few lines."""
        counts, errors, faults, slowest = sum_of(self.house.reports())
        self.faults += faults
        events, wrong = events_faults(self.house.programs["subscriber"].told())
        self.faults += wrong
        books = self.witness.runs.values()
        unanswered = counts["requests"] - counts["answers"] - counts["refusals"] - counts["surprises"]
        done = ", ".join(f"{count} x {what}" for what, count in sorted(self.mischief.done.items()))
        starts = ", ".join(f"{name} {program.starts}" for name, program in self.house.programs.items())
        return (
            f"faults done: {sum(self.mischief.done.values())} ({done})\n"
            f"starts: {starts}; {self.relay.connections} connections relayed\n"
            f"errors told to consumers: {dict(errors)}; cut short by a kill: {unanswered}; "
            f"slowest call {slowest:.2f} s\n"
            f"{counts['requests']} requests, {counts['answers']} answers, {counts['refusals']} errors, "
            f"{counts['late']} late, {counts['surprises']} unexpected; {counts['batches']} batches, "
            f"{counts['windows']} windows, {counts['torn']} torn; {len(self.witness.runs)} runs, "
            f"{self.witness.accepted} rollouts accepted, {self.witness.published} episodes published, "
            f"{sum(b.duplicates for b in books)} duplicates and {sum(b.refused for b in books)} refused; "
            f"{events} events read; {len(self.faults)} faults found"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Make trouble.

    Returns:
        0 when everything held, else 1.
    """
    parser = argparse.ArgumentParser(prog="python -m ods_async.testing.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second of each consumer (default 20)")
    parser.add_argument("--pause", type=float, default=0.7, help="mean seconds between two faults (default 0.7)")
    parser.add_argument("--longest", type=float, default=6.0, help="seconds a fault lasts at most (default 6)")
    parser.add_argument("--keep", action="store_true", help="keep the folder with all logs")
    given = parser.parse_args(arguments)
    with ended_by_signals():
        return _make_trouble(given)


def _make_trouble(given: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="ods-chaos-", dir="/tmp"))
    chaos = Chaos(folder, given.seed, rate=given.rate, pause=given.pause, longest=given.longest)
    try:
        chaos.run(60 * given.minutes)
        print(f"{given.minutes:g} minutes, seed {given.seed}\n{chaos.tell()}")
    finally:
        for words in chaos.faults:
            print(f"FAULT: {words}")
        if given.keep:
            print(f"logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 1 if chaos.faults else 0


def _settings(main: str, port: int) -> dict[str, Any]:
    return {
        "buffer_size": 12,
        "max_episode_steps": 32,
        "refill_policy": "continuous",
        "include_provenance": True,
        "endpoint": main,
        "extra_endpoints": [f"tcp://127.0.0.1:{port}"],
        "lease_seconds": 1.0,
        "heartbeat_interval": 0.25,
        "heartbeat_timeout": 3.0,
        "ticket_finish_timeout": 10.0,
        "event_history": 1024,
        "shutdown_timeout": 2.0,
        "gym_config": {
            "id": "ods_async/Counting-v0",
            "kwargs": {"min_length": 12, "max_length": 30, "image_shape": [32, 32, 3], "step_delay": 0.002},
        },
    }


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


if __name__ == "__main__":
    sys.exit(main())
