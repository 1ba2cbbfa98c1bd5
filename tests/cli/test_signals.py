"""The signals of a command line: remembered, acted on, and what the exit code says of them (C46)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ods_async.cli.signals import Interrupted, SignalWatch, listen_early, take_watch
from tests.cli.programs import environment


@pytest.fixture
def watch() -> Iterator[SignalWatch]:
    watch = take_watch()
    yield watch
    watch.close()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_what_came_before_anybody_could_act_on_it_is_not_lost() -> None:
    listen_early()
    os.kill(os.getpid(), signal.SIGTERM)
    watch = take_watch()
    assert watch.number == signal.SIGTERM
    with pytest.raises(Interrupted):
        watch.interrupt()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_the_first_signal_is_acted_on_once(watch: SignalWatch) -> None:
    told: list[int] = []
    watch.tell(lambda: told.append(1))
    assert not watch.wait(0.0)
    for _ in range(2):  # the second right behind it is the same one
        os.kill(os.getpid(), signal.SIGTERM)
    assert watch.wait(60.0)
    assert told == [1]


@pytest.mark.parametrize(
    ("number", "service", "question"), [(signal.SIGINT, 130, 130), (signal.SIGTERM, 0, 130), (signal.SIGHUP, 0, 130)]
)
def test_c46_exit_codes(watch: SignalWatch, number: int, service: int, question: int) -> None:
    assert watch.exit_code(service=True) == watch.exit_code(service=False) == 0
    os.kill(os.getpid(), number)
    assert (watch.exit_code(service=True), watch.exit_code(service=False)) == (service, question)


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    """``nohup ods-async up …``"""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        SignalWatch().install()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_last_thing_before_a_cut_may_fail_and_the_cut_happens() -> None:
    program = """
import os, signal
from ods_async.cli.signals import take_watch
watch = take_watch()
watch.before_cut = lambda: 1 / 0
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGINT)
"""
    done = subprocess.run([sys.executable, "-c", program], env=environment(), timeout=60.0, check=False)
    assert done.returncode == 130
