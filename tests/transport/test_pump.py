"""The asyncio pump: no wakeup lost, no message twice, nobody starved."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from ods_async.errors import ClosedError
from ods_async.transport.pump import AsyncPump
from ods_async.transport.sockets import ChannelOptions, Frame, Hub, join_envelope, open_channel, split_envelope


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, ipc_folder: Path) -> str:
    return f"ipc://{ipc_folder}/b.sock" if request.param == "ipc" else "tcp://127.0.0.1:0"


async def test_no_wakeup_is_lost_under_load_in_both_directions(hub: Hub, endpoint: str) -> None:
    """zmq's descriptor is edge-triggered, and every send may use an edge up."""
    total, window, peers = 3000, 40, 3
    options = ChannelOptions(high_water_mark=10_000)
    router = open_channel(hub, "router", bind=[endpoint], options=options)
    pushes = open_channel(hub, "pull", bind=["tcp://127.0.0.1:0"], options=options)
    done = asyncio.Event()
    served = [0]
    pushed: list[int] = []

    def serve(frames: list[Frame]) -> None:
        peer, body = split_envelope(frames)
        served[0] += 1
        assert server.send(join_envelope(peer, body))

    server = AsyncPump(router, serve)
    all_pushed = asyncio.Event()

    def take(frames: list[Frame]) -> None:
        pushed.append(int(bytes(frames[0])))
        if len(pushed) == total:
            all_pushed.set()

    puller = AsyncPump(pushes, take)

    answers: list[list[int]] = [[] for _ in range(peers)]
    clients: list[AsyncPump] = []

    def ask(index: int) -> None:
        assert clients[index].send([b"%d" % len(answers[index])])

    def heard(index: int, frames: list[Frame]) -> None:
        answers[index].append(int(bytes(frames[0])))
        if len(answers[index]) < total // peers:
            ask(index)
        elif all(len(some) == total // peers for some in answers):
            done.set()

    for index in range(peers):
        channel = open_channel(hub, "req", connect=router.endpoints, options=options)
        clients.append(AsyncPump(channel, lambda frames, index=index: heard(index, frames)))
    pusher = AsyncPump(open_channel(hub, "push", connect=pushes.endpoints, options=options))

    async def push() -> None:
        await pusher.writable()
        for number in range(total):
            if not pusher.send([b"%d" % number]):
                await pusher.writable()
                assert pusher.send([b"%d" % number])
            if number % window == 0:
                await asyncio.sleep(0)

    async with asyncio.timeout(30):
        for client in clients:
            await client.writable()
        for index in range(peers):
            ask(index)
        await push()
        await done.wait()
        await all_pushed.wait()
    assert answers == [list(range(total // peers))] * peers
    assert pushed == list(range(total))
    for pump in (server, puller, pusher, *clients):
        pump.close()


async def test_messages_that_came_before_the_pump_are_delivered(hub: Hub, endpoint: str) -> None:
    pull = open_channel(hub, "pull", bind=[endpoint])
    push = open_channel(hub, "push", connect=pull.endpoints)
    assert push.wait(5, write=True)
    push.send([b"early"])
    assert pull.wait(5)
    assert pull.readable  # looked at: the edge is gone
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    pump = AsyncPump(pull, lambda frames: heard.put_nowait(bytes(frames[0])))
    assert await asyncio.wait_for(heard.get(), 5) == b"early"
    pump.close()


async def test_a_flood_lets_others_have_their_turn(hub: Hub, endpoint: str) -> None:
    pull = open_channel(hub, "pull", bind=[endpoint], options=ChannelOptions(high_water_mark=0))
    push = open_channel(hub, "push", connect=pull.endpoints, options=ChannelOptions(high_water_mark=0))
    assert push.wait(5, write=True)
    for _ in range(500):
        push.send([b"x"])
    heard: list[int] = []
    turns = 0
    pump = AsyncPump(pull, lambda frames: heard.append(turns), burst=10)
    async with asyncio.timeout(10):
        while len(heard) < 500:
            turns += 1
            await asyncio.sleep(0)
    assert max(heard.count(turn) for turn in set(heard)) <= 20
    pump.close()


async def test_a_handler_that_raises_ends_nothing(hub: Hub, endpoint: str) -> None:
    pull = open_channel(hub, "pull", bind=[endpoint])
    push = open_channel(hub, "push", connect=pull.endpoints)
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    reported: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))

    def handle(frames: list[Frame]) -> None:
        if frames[0] == b"bad":
            raise KeyError("bad")
        heard.put_nowait(bytes(frames[0]))

    pump = AsyncPump(pull, handle)
    assert push.wait(5, write=True)
    push.send([b"bad"])
    push.send([b"good"])
    assert await asyncio.wait_for(heard.get(), 5) == b"good"
    assert isinstance(reported[0]["exception"], KeyError)
    pump.close()


async def test_room_again_is_told_after_a_refusal(hub: Hub, endpoint: str) -> None:
    """Tickets wait for a worker to come: PUSH without a peer refuses, and says when that changes."""
    room = asyncio.Event()
    pump = AsyncPump(open_channel(hub, "push", bind=[endpoint]), on_writable=room.set)
    assert not pump.send([b"ticket"])
    waiting = asyncio.create_task(pump.writable())
    await asyncio.sleep(0)
    assert not room.is_set()
    pull = open_channel(hub, "pull", connect=pump.channel.endpoints)
    await asyncio.wait_for(room.wait(), 5)
    await asyncio.wait_for(waiting, 5)
    assert pump.send([b"ticket"])
    assert pull.wait(5)
    pump.close()


async def test_stopping_wakes_whoever_waits_for_room(hub: Hub, ipc_folder: Path) -> None:
    pump = AsyncPump(open_channel(hub, "push", connect=[f"ipc://{ipc_folder}/nobody.sock"]))
    waiting = asyncio.create_task(pump.writable())
    await asyncio.sleep(0)
    pump.close()
    pump.close()
    assert pump.stopped
    with pytest.raises(ClosedError):
        await waiting
