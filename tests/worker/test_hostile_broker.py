"""What a broken or false broker may send to a worker: it is counted, and what is valid goes on being done."""

from __future__ import annotations

import random
from typing import Any

from ods_async.core.reports import RolloutReport
from ods_async.testing.fuzz import Fuzzer
from ods_async.wire.codec import BEAT_TOPIC, STOP_TOPIC, TICKETS_TOPIC, VERDICT_TOPIC
from ods_async.worker.runtime import Worker
from tests.worker.test_runtime import config

NOISE = ([b""], [b"x"] * 50, [b"GET / HTTP/1.1\r\n\r\n"], [b"\x91" * 5000], [b"\xdd\xff\xff\xff\xff"], [b"\x80\x04c"])


async def test_c45_garbage_from_the_broker_is_counted_and_the_next_ticket_is_done(peer: Any) -> None:
    fuzzer = Fuzzer(2)
    async with Worker(config(), peer.endpoint, worker_id="w0") as worker:
        peer.ready()
        for number, noise in enumerate(NOISE):
            peer.raw("push", noise)
            for topic in (BEAT_TOPIC, STOP_TOPIC, TICKETS_TOPIC, VERDICT_TOPIC + b"w0"):
                peer.raw("pub", [topic, *noise])
                peer.raw("pub", [topic])
            peer.ticket(100 + number, rollout=number)
            peer.first(RolloutReport, number + 1)
        for seed in range(200):
            ticket, _ = fuzzer.message("ticket", random.Random(seed))
            peer.raw("push", [ticket])
        peer.ticket(999, rollout=99)
        peer.until(lambda: any(report.ticket_id == 999 for report in peer.said(RolloutReport)))
        assert worker._shift.link.desk.malformed >= 5 * len(NOISE)
    assert worker.failure is None
