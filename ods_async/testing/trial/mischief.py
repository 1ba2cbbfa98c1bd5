"""What goes wrong: faults drawn from a seed, each with the moment at which it ends."""

from __future__ import annotations

import concurrent.futures
import math
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from ods_async.core.requests import Welcome
from ods_async.testing.trial.house import House, Program, child_environment, until
from ods_async.testing.trial.noise import make_noise
from ods_async.testing.trial.relay import Relay

__all__ = ["ENVIRONMENTS", "Mischief", "Stage"]

Undo = Callable[[], None]

# Arguments of the environment that a worker gets at a start, and how often.
ENVIRONMENTS: Final[tuple[tuple[int, dict[str, Any]], ...]] = (
    (10, {}),
    (2, {"fail_phase": "step", "fail_step": 3, "fail_kind": "error"}),
    (1, {"fail_phase": "reset", "fail_kind": "error"}),
    (1, {"fail_phase": "plan", "fail_kind": "error"}),
    (1, {"fail_phase": "make", "fail_kind": "error"}),
    (1, {"fail_phase": "close", "fail_kind": "error"}),
    (2, {"fail_phase": "step", "fail_step": 2, "fail_kind": "failure"}),
    (1, {"fail_phase": "step", "fail_step": 5, "fail_kind": "nan"}),
    (1, {"fail_phase": "step", "fail_step": 4, "fail_kind": "shape"}),
    (2, {"fail_phase": "step", "fail_step": 1, "fail_kind": "exit"}),
    (2, {"fail_phase": "step", "fail_step": 2, "fail_kind": "kill"}),
    (2, {"step_delay": 0.1}),
    (1, {"reset_delay": 2.0}),
)
_FAILING_EPISODES: Final = 40
_RIVAL_SECONDS: Final = 30.0


class Stage(Protocol):
    """What the mischief-maker may touch."""

    house: House
    relay: Relay
    main: str
    welcome: Welcome | None


class Mischief:
    """Chooses faults and does them.

    Args:
        stage: whom they hit.
        rng: chooses.
        longest: seconds that a stop, a cut or a delay lasts at most.

    Attributes:
        done: how often each fault was done.
        faults: what noise and rivals brought to light that should not be.
        rival_seen: when a second broker was there last (monotonic seconds).
    """

    def __init__(self, stage: Stage, rng: random.Random, longest: float) -> None:
        self.done: Counter[str] = Counter()
        self.faults: list[str] = []
        self.rival_seen = -math.inf
        self._stage = stage
        self._rng = rng
        self._longest = longest
        self._pool = concurrent.futures.ThreadPoolExecutor(2, "mischief")
        self._busy: set[concurrent.futures.Future[str]] = set()
        self._choices: tuple[tuple[float, Callable[[], tuple[float, Undo] | None]], ...] = (
            (6, self._kill_worker),
            (5, self._stop_worker),
            (2, self._end_worker),
            (3, self._kill_broker),
            (3, self._stop_broker),
            (0.5, self._end_broker),
            (4, self._kill_consumer),
            (6, self._stop_consumer),
            (1.5, self._kill_subscriber),
            (1.5, self._stop_subscriber),
            (5, self._cut),
            (2, self._drop),
            (4, self._delay),
            (10, self._noise),
            (1, self._rival),
        )

    def one(self) -> tuple[float, Undo] | None:
        """Do one fault. Returns how long it lasts and how it ends, or None where there is nothing to end."""
        weights = [weight for weight, _ in self._choices]
        return self._rng.choices([choice for _, choice in self._choices], weights)[0]()

    def environment(self) -> dict[str, Any]:
        """Arguments for the environment of a worker that is about to start."""
        kwargs = dict(self._rng.choices([k for _, k in ENVIRONMENTS], [w for w, _ in ENVIRONMENTS])[0])
        if kwargs.get("fail_phase") in ("reset", "plan", "step"):
            kwargs["fail_episode"] = self._rng.randrange(_FAILING_EPISODES)
            kwargs["fail_times"] = self._rng.choice((1, 2, 1000))
        if kwargs:
            self.done["environment: " + str(kwargs.get("fail_kind") or "slow")] += 1
        return kwargs

    def settle(self) -> None:
        """Wait for noise and rivals that are still at it."""
        for future in concurrent.futures.as_completed(self._busy, timeout=60.0):
            self._collect(future)
        self._busy.clear()

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(cancel_futures=True)

    # --- processes --------------------------------------------------------------------------------------------------

    def _some(self, kind: str) -> Program | None:
        found = [p for name, p in sorted(self._stage.house.programs.items()) if name.startswith(kind) and p.running]
        return self._rng.choice(found) if found else None

    def _kill(self, kind: str, number: int, words: str) -> None:
        program = self._some(kind)
        if program is not None:
            program.doomed = True
            program.signal(number)
            program.signal(signal.SIGCONT)
            self.done[f"{words} {kind}"] += 1

    def _stop(self, kind: str) -> tuple[float, Undo] | None:
        program = self._some(kind)
        if program is None:
            return None
        program.signal(signal.SIGSTOP)
        self.done[f"stop {kind}"] += 1
        return self._rng.uniform(0.05, self._longest), lambda: program.signal(signal.SIGCONT)

    def _kill_worker(self) -> None:
        self._kill("worker", signal.SIGKILL, "kill")

    def _end_worker(self) -> None:
        self._kill("worker", signal.SIGTERM, "end")

    def _stop_worker(self) -> tuple[float, Undo] | None:
        return self._stop("worker")

    def _kill_broker(self) -> None:
        self._kill("broker", signal.SIGKILL, "kill")

    def _end_broker(self) -> None:
        self._kill("broker", signal.SIGTERM, "end")

    def _stop_broker(self) -> tuple[float, Undo] | None:
        return self._stop("broker")

    def _kill_consumer(self) -> None:
        self._kill("consumer", signal.SIGKILL, "kill")

    def _stop_consumer(self) -> tuple[float, Undo] | None:
        return self._stop("consumer")

    def _kill_subscriber(self) -> None:
        self._kill("subscriber", signal.SIGKILL, "kill")

    def _stop_subscriber(self) -> tuple[float, Undo] | None:
        return self._stop("subscriber")

    # --- network ----------------------------------------------------------------------------------------------------

    def _cut(self) -> tuple[float, Undo]:
        self.done["cut the network"] += 1
        self._stage.relay.cut()
        return self._rng.uniform(0.1, self._longest), self._rng.choice((self._mend, self._mend_and_drop))

    def _mend(self) -> None:
        self._stage.relay.mend()

    def _mend_and_drop(self) -> None:
        self._stage.relay.drop()
        self._stage.relay.mend()

    def _drop(self) -> None:
        self.done["drop connections"] += 1
        self._stage.relay.drop()

    def _delay(self) -> tuple[float, Undo]:
        self.done["delay the network"] += 1
        self._stage.relay.delay(self._rng.uniform(0.01, 0.4))
        return self._rng.uniform(0.5, self._longest), lambda: self._stage.relay.delay(0.0)

    # --- strangers --------------------------------------------------------------------------------------------------

    def _noise(self) -> None:
        welcome = self._stage.welcome
        if welcome is not None:
            rng, main = random.Random(self._rng.random()), self._stage.main
            self._later(lambda: "noise: " + make_noise(rng, welcome, main))

    def _rival(self) -> None:
        broker = self._stage.house.programs["broker"]
        if broker.running and self._stage.welcome is not None:
            settings, pid = self._stage.house.folder / "settings.json", broker.pid
            self._later(lambda: self._run_rival(settings, broker, pid))

    def _run_rival(self, settings: Path, broker: Program, pid: int) -> str:
        """A second broker on a live one's endpoint fails and says why."""
        command = [sys.executable, "-m", "ods_async", "broker", str(settings)]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=child_environment()
        ) as rival:
            told, first_lives = "", True
            for _ in until(time.monotonic() + _RIVAL_SECONDS, 0.05):
                self.rival_seen = time.monotonic()
                first_lives = first_lives and broker.current_pid == pid and not broker.doomed
                if rival.poll() is not None or not first_lives:
                    break  # where the first one has died meanwhile, the second one rightly takes its place
            else:
                self.faults.append(f"a second broker on the endpoint has not ended after {_RIVAL_SECONDS:g} s")
            rival.kill()
            told = rival.communicate()[1]
        self.rival_seen = time.monotonic()
        if first_lives and rival.returncode == 1:
            if "another broker" not in told:
                self.faults.append(f"a second broker on the endpoint did not say why it ended: {told}")
        elif first_lives:
            self.faults.append(f"a second broker on the endpoint ended with {rival.returncode}: {told}")
        return "second broker"

    def _later(self, work: Callable[[], str]) -> None:
        for future in [future for future in self._busy if future.done()]:
            self._collect(future)
            self._busy.discard(future)
        if len(self._busy) < 2:
            self._busy.add(self._pool.submit(work))

    def _collect(self, future: concurrent.futures.Future[str]) -> None:
        error = future.exception()
        if error is None:
            self.done[future.result()] += 1
        else:
            self.faults.append(f"mischief failed: {type(error).__name__}: {error}")
