"""``up``: a broker and its local workers, with the progress of the first fill and then a status line."""

from __future__ import annotations

import argparse
import sys
import threading
import time

from ods_async.cli.output import print_json, to_json
from ods_async.cli.settings import settings_for
from ods_async.cli.signals import SignalWatch
from ods_async.cli.tokens import published_token, withdraw_token
from ods_async.core.requests import GetStats, GetStatus, ServiceStatus, Stats
from ods_async.errors import OdsError, StartCancelledError
from ods_async.supervise.line import Line
from ods_async.supervise.owner import Owner

__all__ = ["run"]

_LOOK_SECONDS = 0.5
_NAP_SECONDS = 0.05
_ASK_SECONDS = 2.0
_PLAIN_EVERY = 10.0


def run(options: argparse.Namespace) -> int:
    """Run until a signal, the owner's stop, or a failure ends it."""
    owner = Owner(settings_for(options))
    watch: SignalWatch = options.watch
    watch.before_cut = lambda: _cut(owner)
    watch.tell(lambda: None)
    shown = _Shown(options.json)
    problem: list[BaseException] = []

    def start() -> None:
        try:
            owner.start()
        except BaseException as error:
            problem.append(error)

    starting = threading.Thread(target=start, name="ods-start", daemon=True)
    starting.start()
    while starting.is_alive() and not watch.wait(0.0):
        shown.progress(owner)
        for _ in range(round(_LOOK_SECONDS / _NAP_SECONDS)):
            if watch.wait(_NAP_SECONDS) or not starting.is_alive():
                break
    if watch.wait(0.0):
        shown.say("ending", now=True)
        try:
            owner.stop()
        finally:
            starting.join()
            shown.close()
        if problem and not isinstance(problem[0], StartCancelledError):
            raise problem[0]
        return watch.exit_code(service=True)
    starting.join()
    if problem:
        shown.close()
        raise problem[0]
    supervisor = owner.supervisor
    with published_token(supervisor.endpoints, supervisor.owner_token):
        shown.ready(owner)
        while not owner.wait(0.0) and not watch.wait(_LOOK_SECONDS):
            shown.progress(owner)
        shown.say("ending", now=True)
        shown.close()
        owner.stop()
    return watch.exit_code(service=True)


def _cut(owner: Owner) -> None:
    owner.kill()
    withdraw_token(owner.supervisor.endpoints, owner.supervisor.owner_token)


class _Shown:
    """What is shown: a line that is written over on a terminal, a line now and then elsewhere, or JSON."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        self._terminal = sys.stderr.isatty() and not as_json
        self._line: Line | None = None
        self._last = ""
        self._last_at = 0.0
        self._sampled = (0, time.monotonic())

    def ready(self, owner: Owner) -> None:
        if self._json:
            endpoints = list(owner.supervisor.endpoints)
            print_json({"endpoints": endpoints, "run_id": owner.run_id, "pids": owner.supervisor.pids})
        else:
            self.say("")
            print(f"ready on {', '.join(owner.supervisor.endpoints)} (run {owner.run_id})", flush=True)

    def progress(self, owner: Owner) -> None:
        if not owner.supervisor.listening:
            return
        if self._line is None:
            self._line = Line(owner.supervisor.local_endpoint, role="observer", name="ods-async up")
        try:
            status = self._line.ask(GetStatus(), ServiceStatus, _ASK_SECONDS)
            stats = self._line.ask(GetStats(), Stats, _ASK_SECONDS)
        except (OdsError, TimeoutError):
            return
        if self._json:
            if time.monotonic() - self._last_at >= 1.0:
                self._last_at = time.monotonic()
                print_json({"status": to_json(status), "stats": to_json(stats)})
            return
        self.say(self._words(status, stats))

    def _words(self, status: ServiceStatus, stats: Stats) -> str:
        alive = sum(worker.state not in ("gone", "stalled") for worker in status.workers)
        before, at = self._sampled
        now = time.monotonic()
        rate = (stats.sampled_chunks - before) / max(now - at, 1e-3)
        self._sampled = stats.sampled_chunks, now
        words = (
            f"{status.state.lower()}: {status.episodes}/{status.slots} episodes, generation "
            f"{status.completed_generation} of {status.requested_generation}, {alive} workers, "
            f"{stats.successful_episodes} made, {stats.failed_episodes} failed, {rate:.0f} windows/s"
        )
        return words + (f"; {status.waiting}" if status.waiting else "")

    def say(self, words: str, *, now: bool = False) -> None:
        if self._json:
            return
        if self._terminal:
            sys.stderr.write(f"\r\x1b[K{words[:200]}")
            sys.stderr.flush()
        elif words and (
            now or not self._last or (words != self._last and time.monotonic() - self._last_at >= _PLAIN_EVERY)
        ):
            self._last, self._last_at = words, time.monotonic()
            print(words, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._terminal:
            sys.stderr.write("\n")
        if self._line is not None:
            self._line.close()
            self._line = None
