"""A consumer that was stopped past its lease, in the middle of a copy out of rows of tens of MB (law 3)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ods_async import Client, OnlineDataEngine
from tests.e2e.programs import Consumer
from tests.e2e.test_integrity import engine

FACTS = {"min_length": 23, "max_length": 31}
IMAGE = [512, 640, 3]  # 983,040 bytes a step, 33 MB a row


@pytest.fixture(scope="module")
def running(_nothing_left_by_the_run: None) -> Any:
    made = engine(
        1,
        FACTS,
        env={"image_shape": IMAGE},
        buffer_size=3,
        refill_policy="continuous",
        lease_seconds=0.5,
        include_provenance=False,
    )
    with made as started:
        yield started


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def until(condition: Callable[[], bool], within: float = 60.0) -> None:
    deadline = time.monotonic() + within
    tick = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        tick.wait(0.01)


@pytest.mark.parametrize(
    ("kind", "prefetch"),
    [("blocking", 0), ("asyncio", 0), ("blocking", 4)],
    ids=["blocking", "asyncio", "drawn ahead"],
)
def test_a_consumer_stopped_past_its_lease_in_the_middle_of_a_copy_notices_and_draws_again(
    kind: str, prefetch: int, running: OnlineDataEngine, consumers: tuple[Consumer, Consumer, Consumer]
) -> None:
    """Law 3: what it copied is torn, which the stamps show; production goes on while it is stopped."""
    stopped = consumers[0]
    with Client(running.endpoint) as watcher:
        stopped.tell(
            "stop_midway", kind=kind, endpoint=running.endpoint, batch=5, chunk=7, facts=FACTS, prefetch=prefetch
        )
        assert stopped.hear("stopping")
        until(lambda: is_stopped(stopped.pid))
        try:
            before = watcher.get_stats()["completed_generation"]
            # Every row is written again: buffer_size slots and two spare rows, so two generations are enough.
            until(lambda: watcher.get_stats()["completed_generation"] >= before + 3)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        found = stopped.hear("result")
        assert "trace" not in found, found["trace"]
        assert found["torn"] != [[]], "the copy was not disturbed: this test proves nothing"
        assert len(found["torn"]) == 1
        assert found["redrawn"] >= 1
        assert found["faults"] == []
        assert watcher.get_status()["state"] == "READY"


def test_consumers_stopped_until_their_connections_were_cut_draw_again_over_new_ones(
    running: OnlineDataEngine, consumers: tuple[Consumer, Consumer, Consumer]
) -> None:
    """The broker cuts off who has been silent for eight seconds; nobody who comes back later need know about it."""
    ways = [("blocking", 0), ("asyncio", 0), ("asyncio", 4)]
    with Client(running.endpoint) as watcher:
        sessions = watcher.get_stats()["extra"]["sessions"]
        for stopped, (kind, prefetch) in zip(consumers, ways, strict=True):
            stopped.tell(
                "stop_midway", kind=kind, endpoint=running.endpoint, batch=5, chunk=7, facts=FACTS, prefetch=prefetch
            )
            assert stopped.hear("stopping")
        try:
            until(lambda: all(is_stopped(stopped.pid) for stopped in consumers))
            cut = time.monotonic() + 10.5
            until(lambda: time.monotonic() > cut)
        finally:
            for stopped in consumers:
                os.kill(stopped.pid, signal.SIGCONT)
        for found in [stopped.hear("result") for stopped in consumers]:
            assert "trace" not in found, found["trace"]
            assert found["torn"] not in ([], [[]])
            assert found["redrawn"] >= 1
            assert found["faults"] == []
        assert watcher.get_stats()["extra"]["sessions"] >= sessions + 6, (
            "no connection was cut: this test proves nothing"
        )


def test_a_consumer_of_frames_stopped_for_longer_than_any_lease_goes_on(
    running: OnlineDataEngine, consumers: tuple[Consumer, Consumer, Consumer]
) -> None:
    """Its leases end with the copy in the broker: it holds nothing up, and what it reads later is whole."""
    stopped = consumers[1]
    tcp = running.endpoints[1]
    arguments = {"windows": 200, "generations": 1, "batch": 5, "chunk": 4, "facts": FACTS}
    stopped.tell("draw", kind="blocking", endpoint=tcp, data_path="frames", **arguments)
    with Client(running.endpoint) as watcher:
        begun = watcher.get_stats()["sampled_chunks"]
        until(lambda: watcher.get_stats()["sampled_chunks"] > begun + 20)
        os.kill(stopped.pid, signal.SIGSTOP)
        try:
            until(lambda: is_stopped(stopped.pid))
            before = watcher.get_stats()["completed_generation"]
            until(lambda: watcher.get_stats()["completed_generation"] >= before + 4)
        finally:
            os.kill(stopped.pid, signal.SIGCONT)
        found = stopped.hear("result")
        assert "trace" not in found, found["trace"]
        assert found["faults"] == []
