from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
import zmq

from ods_async.transport.sockets import Hub, open_channel


@pytest.mark.parametrize("where", ["get", "set", "connect"])
def test_c21_ctrl_c_in_the_middle_of_making_a_channel_does_not_keep_the_hub_from_closing(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """C21: at exit, a hub waited for ever for a socket that nobody knew of any more."""

    def interrupted(*args: Any) -> NoReturn:
        raise KeyboardInterrupt

    hub = Hub()
    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, where, interrupted)
        with pytest.raises(KeyboardInterrupt) as caught:  # whose traceback keeps the socket alive
            open_channel(hub, "req", connect=["tcp://127.0.0.1:9"])
    closing = threading.Thread(target=hub.close, daemon=True)
    closing.start()
    closing.join(20.0)
    assert not closing.is_alive()
    assert caught.type is KeyboardInterrupt


def test_signals_while_it_closes_leave_no_thread_of_it_behind() -> None:
    """A sampling profiler sends hundreds a second."""
    closed, own = threading.Event(), threading.main_thread().ident
    assert own is not None

    def disturb() -> None:
        while not closed.wait(0.0002):
            signal.pthread_kill(own, signal.SIGUSR1)

    numbers: list[int] = []
    handler = signal.signal(signal.SIGUSR1, lambda number, frame: numbers.append(number))
    before = len(list(Path("/proc/self/task").iterdir()))
    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        for _ in range(100):
            with Hub() as hub:
                open_channel(hub, "router", bind=("tcp://127.0.0.1:0",))
    finally:
        closed.set()
        disturber.join()
        signal.signal(signal.SIGUSR1, handler)
    assert len(numbers) > 10
    assert len(list(Path("/proc/self/task").iterdir())) == before
