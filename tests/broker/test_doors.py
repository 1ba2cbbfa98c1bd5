from __future__ import annotations

import asyncio
import os
from pathlib import Path

from ods_async.broker.doors import Doors, doors_hub
from ods_async.core.requests import Limits
from ods_async.transport.sockets import Hub, open_channel


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


def threads() -> dict[int, str]:
    """The names of this process's threads, zmq's own among them."""
    return {int(task.name): (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}


def processor_ticks(thread: int) -> int:
    fields = Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_the_bytes_of_rollouts_are_not_moved_by_the_thread_that_moves_answers() -> None:
    """Or who asks would wait for whoever hands in, although the loop is free. Rollouts' thread lets others go first."""
    payload = bytearray(32 * 1024 * 1024)
    own_nice = os.getpriority(os.PRIO_PROCESS, 0)

    async def scenario() -> list[int]:
        with Hub() as sender, doors_hub() as hub:
            before = threads()
            doors = Doors(hub, ["tcp://127.0.0.1:0"], Limits())
            own: dict[str, int] = {}
            # Each thread gives itself its name a little after it is there, in no order.
            while not {"ZMQbg/IO/0", "ZMQbg/IO/1"} <= own.keys():
                own = {name: thread for thread, name in threads().items() if thread not in before}
            got, enough = [], asyncio.Event()

            def on_report(frames: list[object]) -> None:
                got.append(len(frames))
                if len(got) == 12:
                    enough.set()

            doors.open(lambda frames: None, on_report, lambda: None)
            with open_channel(sender, "push", connect=[doors.siblings_for(doors.endpoints[0]).rollouts]) as push:
                for _ in range(12):
                    await asyncio.to_thread(push.wait, 10.0, True)
                    assert push.send([b"a rollout", payload], copy=False)
                await asyncio.wait_for(enough.wait(), 20.0)
            nice = [os.getpriority(os.PRIO_PROCESS, own[f"ZMQbg/IO/{number}"]) for number in (0, 1)]
            assert nice == [own_nice, min(19, own_nice + 10)]
            ticks = [processor_ticks(own[f"ZMQbg/IO/{number}"]) for number in (0, 1)]
            doors.close(0.0)
            return ticks

    answering, rollouts = asyncio.run(scenario())
    assert rollouts > 4 * answering
