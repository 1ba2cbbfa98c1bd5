"""A signal ends a worker whatever its main thread was about to do."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from ods_async.worker.signals import insisting


@pytest.fixture
def seen() -> Iterator[list[int]]:
    """The numbers of the signals of which a handler in Python has heard."""
    numbers: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: numbers.append(number))
    yield numbers
    signal.signal(signal.SIGUSR1, before)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "ods-signals"]


def test_a_signal_that_another_thread_took_is_noticed_although_the_main_thread_blocks(seen: list[int]) -> None:
    """As one that came just before the call: Python has heard of it, and the call knows nothing of it."""
    reading, writing = os.pipe()
    with insisting(lambda: bool(seen)):
        hung = threading.Timer(20.0, os.write, (writing, b"hung"))
        other = threading.Timer(0.1, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1))
        hung.start()
        other.start()

        def leave(number: int, frame: object) -> None:
            seen.append(number)
            raise InterruptedError

        signal.signal(signal.SIGUSR1, leave)
        with pytest.raises(InterruptedError):
            os.read(reading, 4)
        hung.cancel()
    assert seen == [signal.SIGUSR1]
    hung.join()
    other.join()
    os.close(reading)
    os.close(writing)
    assert not threads()


def test_a_signal_that_is_handled_is_not_sent_again(seen: list[int]) -> None:
    with insisting(lambda: bool(seen)):
        signal.raise_signal(signal.SIGUSR1)
        assert not threading.Event().wait(0.3)
    assert seen == [signal.SIGUSR1]


def test_a_forked_childs_signals_are_its_own_and_what_it_holds_keeps_nobody_waiting(seen: list[int]) -> None:
    go_on, told = os.pipe()
    with insisting(lambda: bool(seen)):
        child = os.fork()
        if child == 0:
            signal.raise_signal(signal.SIGUSR1)
            os.write(told, b"x")
            signal.pause()
            os._exit(0)
        os.read(go_on, 1)
        assert not threading.Event().wait(0.3)
        assert not seen
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(go_on)
    os.close(told)
    assert not threads()
