"""Brokers that outlive a test: what they make on demand must be there before, or the test seems to leave it behind."""

from __future__ import annotations

import threading

from ods_async.broker.effects import THREADS
from ods_async.testing.broker import RunningBroker


def make_all_threads(running: RunningBroker) -> None:
    """Let the broker's pool start every thread that it may have, by keeping all of them busy at once."""
    pool = running._broker._effects._threads
    together = threading.Barrier(THREADS)
    for job in [pool.submit(together.wait, 30.0) for _ in range(THREADS)]:
        job.result()
