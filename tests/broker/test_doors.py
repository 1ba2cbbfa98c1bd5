from __future__ import annotations

import asyncio

from ods_async.broker.doors import Doors
from ods_async.core.requests import Limits
from ods_async.transport.sockets import Hub


def test_rollouts_are_read_again_when_every_pause_has_ended() -> None:
    """Two parts of the broker may hold workers back at once; one of them ending must not let them in."""

    async def scenario() -> list[bool]:
        hub = Hub()
        doors = Doors(hub, ["tcp://127.0.0.1:0"], Limits())
        doors.open(lambda frames: None, lambda frames: None, lambda: None)
        reading = []
        for pause in (True, True, False, False):
            doors.pause_rollouts(pause)
            reading.append(not doors.rollouts._stopped)
        doors.close(0.0)
        hub.close(0.0)
        return reading

    assert asyncio.run(scenario()) == [False, False, False, True]
