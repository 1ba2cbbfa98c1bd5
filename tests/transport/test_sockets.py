"""Channels over real sockets, and over real processes where the fact is about processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ods_async.core.stimuli import Peer
from ods_async.errors import ClosedError, EndpointError, ProtocolError
from ods_async.transport.sockets import (
    Channel,
    ChannelOptions,
    Hub,
    join_envelope,
    open_channel,
    open_channel_count,
    split_envelope,
    wait_any,
)
from ods_async.transport.watch import watch_connection


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture(params=["ipc", "tcp"])
def endpoint(request: pytest.FixtureRequest, ipc_folder: Path) -> str:
    return f"ipc://{ipc_folder}/b.sock" if request.param == "ipc" else "tcp://127.0.0.1:0"


def pair(hub: Hub, endpoint: str, options: ChannelOptions | None = None) -> tuple[Channel, Channel]:
    router = open_channel(hub, "router", bind=[endpoint], options=options)
    client = open_channel(hub, "req", connect=router.endpoints, options=options)
    assert client.wait(5, write=True)
    return router, client


def got(channel: Channel) -> list[bytes]:
    while (frames := channel.receive()) is None:  # also when what came first was a stale answer, which is dropped
        assert channel.wait(5)
    return [bytes(frame) for frame in frames]


def asked(router: Channel) -> tuple[Peer, list[bytes]]:
    peer, body = split_envelope(got(router))
    return peer, [bytes(frame) for frame in body]


def test_question_and_answer_with_a_payload_that_is_not_copied(hub: Hub, endpoint: str) -> None:
    router, client = pair(hub, endpoint)
    assert client.send([b"header"])
    peer, body = asked(router)
    assert body == [b"header"]
    payload = np.arange(70_000, dtype=np.uint8)
    assert router.send(join_envelope(peer, [b"answer", memoryview(payload)]), copy=False)
    assert client.wait(5)
    frames = client.receive()
    assert frames is not None
    assert frames[0] == b"answer"
    assert isinstance(frames[1], memoryview)
    assert not frames[1].readonly, "a batch made of it belongs to its receiver (C30)"
    assert np.array_equal(np.frombuffer(frames[1], np.uint8), payload)
    assert client.receive() is None


def test_real_endpoints_are_told_and_connectable(hub: Hub) -> None:
    with open_channel(hub, "pull", bind=["tcp://127.0.0.1:0", "tcp://localhost:0", "tcp://[::1]:0"]) as pull:
        assert all(not text.endswith(":0") for text in pull.endpoints)
        for text in pull.endpoints:
            with open_channel(hub, "push", connect=[text]) as push:
                assert push.wait(5, write=True)
                assert push.send([text.encode()])
                assert got(pull) == [text.encode()]


def test_a_req_left_after_a_timeout_gets_its_own_next_answer(hub: Hub, endpoint: str) -> None:
    """Late answers to a question given up must never be taken for the next one's."""
    router, client = pair(hub, endpoint)
    client.send([b"first"])
    first, _ = asked(router)
    assert not client.wait(0.01)
    assert client.send([b"second"])
    second, body = asked(router)
    assert body == [b"second"]
    assert second.identity == first.identity, "the session stays the same"
    assert router.send(join_envelope(first, [b"answer to the first"]))
    assert router.send(join_envelope(second, [b"answer to the second"]))
    assert got(client) == [b"answer to the second"]
    assert client.receive() is None


def test_notices_need_no_answer_and_keep_the_session(hub: Hub, endpoint: str) -> None:
    router, client = pair(hub, endpoint)
    sessions = set()
    for number in range(50):
        assert client.send([b"notice"])
        assert client.send([b"question %d" % number])
        peer, body = asked(router)
        assert body == [b"notice"]
        sessions.add(peer.identity)
        peer, body = asked(router)
        assert body == [b"question %d" % number]
        sessions.add(peer.identity)
        router.send(join_envelope(peer, [b"answer %d" % number]))
        assert got(client) == [b"answer %d" % number]
    assert len(sessions) == 1


def test_with_nobody_there_a_send_is_refused_at_once(hub: Hub, ipc_folder: Path) -> None:
    """C20: nothing queues up for a broker that is away."""
    for kind in ("req", "push"):
        with open_channel(hub, kind, connect=[f"ipc://{ipc_folder}/nobody.sock"]) as channel:  # type: ignore[arg-type]
            assert not channel.send([b"x"])
            assert channel.last_refusal == "full"
            assert not channel.wait(0.02, write=True)


def test_a_full_queue_refuses_and_takes_again_when_emptied(hub: Hub, endpoint: str) -> None:
    options = ChannelOptions(high_water_mark=3)
    pull = open_channel(hub, "pull", bind=[endpoint], options=options)
    push = open_channel(hub, "push", connect=pull.endpoints, options=options)
    assert push.wait(5, write=True)
    big = bytes(1_000_000)
    sent = 0
    while push.send([big]):
        sent += 1
        assert sent < 1000
    assert push.last_refusal == "full"
    for _ in range(sent):
        assert got(pull) == [big]
    assert push.wait(5, write=True)
    assert push.send([b"again"])
    assert got(pull) == [b"again"]


def test_an_answer_to_a_peer_that_left_is_counted(hub: Hub, endpoint: str) -> None:
    router, client = pair(hub, endpoint, ChannelOptions(watched=True))
    client.send([b"question"])
    peer, _ = asked(router)
    client.close()
    watch = watch_connection(router)
    while not watch.disconnects:
        assert wait_any([watch], 5)
        watch.poll()
    for _ in range(1000):  # zmq reports the loss a moment before its router knows of it
        if not router.send(join_envelope(peer, [b"answer"])):
            break
        router.wait(0.002)
    assert (router.last_refusal, router.unroutable) == ("gone", 1)


def test_too_large_a_message_cuts_its_sender_off_and_is_seen(hub: Hub, endpoint: str) -> None:
    """C43: it vanishes at the sender, so the receiver's side must show it; what follows arrives."""
    pull = open_channel(hub, "pull", bind=[endpoint], options=ChannelOptions(max_message_bytes=1000, watched=True))
    push = open_channel(hub, "push", connect=pull.endpoints)
    assert push.wait(5, write=True)
    watch = watch_connection(pull)
    push.send([b"h", bytes(1001)])
    while not watch.disconnects:
        assert wait_any([watch], 5)
        watch.poll()
    assert pull.receive() is None
    while watch.connections < 1:
        assert wait_any([watch], 5)
        watch.poll()
    assert push.wait(5, write=True)
    assert push.send([b"h", bytes(1000)])
    assert got(pull) == [b"h", bytes(1000)]


def test_subscribers_hear_only_their_topics(hub: Hub, endpoint: str) -> None:
    pub = open_channel(hub, "pub", bind=[endpoint], options=ChannelOptions(watched=True))
    sub = open_channel(hub, "sub", connect=pub.endpoints, options=ChannelOptions(topics=(b"a.",)))
    sub.subscribe(b"c.")
    sub.subscribe(b"b.")
    sub.unsubscribe(b"b.")
    frames: list[bytes] = []
    while not frames:
        pub.send([b"b.x", b"other"])
        pub.send([b"c.x", b"mine"])
        if sub.wait(0.01):
            frames = got(sub)
    assert frames == [b"c.x", b"mine"]


def test_a_message_of_very_many_frames_is_cut_not_kept(hub: Hub, endpoint: str) -> None:
    pull = open_channel(hub, "pull", bind=[endpoint])
    push = open_channel(hub, "push", connect=pull.endpoints)
    assert push.wait(5, write=True)
    push.send([b"x"] * 5000)
    push.send([b"next"])
    assert len(got(pull)) == 64
    assert got(pull) == [b"next"]


def test_an_empty_message_is_a_mistake_of_the_caller(hub: Hub) -> None:
    with open_channel(hub, "pub", bind=["tcp://127.0.0.1:0"]) as pub, pytest.raises(ValueError, match="at least one"):
        pub.send([])


@pytest.mark.parametrize(
    "frames",
    [
        [b"id"],
        [b"id", b"body"],
        [b"", b"body"],
        [b"id", *[b"x"] * 9, b"", b"body"],
        [b"id", b"y" * 300, b"", b"body"],
    ],
    ids=["nothing", "no delimiter", "no identity", "endless", "bloated"],
)
def test_messages_without_an_honest_envelope_are_no_requests(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match="REQ"):
        split_envelope(frames)


def test_an_envelope_is_split_and_joined() -> None:
    peer, body = split_envelope([b"id", b"1234", b"", b"header", b""])
    assert peer == Peer(b"id", (b"1234",))
    assert body == [b"header", b""]
    assert join_envelope(peer, body) == [b"id", b"1234", b"", b"header", b""]


def test_wait_any_tells_channels_and_descriptors_apart(hub: Hub, endpoint: str) -> None:
    router, client = pair(hub, endpoint)
    other = open_channel(hub, "pull", bind=["tcp://127.0.0.1:0"])
    wake = os.eventfd(0)
    try:
        assert wait_any([router, other, wake], 0.0) == []
        os.eventfd_write(wake, 1)
        assert wait_any([router, other, wake], 5) == [wake]
        client.send([b"x"])
        assert router.wait(5)
        assert wait_any([other, wake, router], 5) == [wake, router]
    finally:
        os.close(wake)


def test_closed_channels_and_hubs_say_so(hub: Hub) -> None:
    others = open_channel_count()  # services that the whole session shares
    channel = open_channel(hub, "pull", bind=["tcp://127.0.0.1:0"])
    assert open_channel_count() == others + 1
    channel.close()
    channel.close()
    assert channel.closed
    assert open_channel_count() == others
    for act in (channel.receive, lambda: channel.wait(0.0), lambda: channel.send([b"x"])):
        with pytest.raises(ClosedError, match="closed"):
            act()
    hub.close()
    hub.close()
    with pytest.raises(ClosedError, match="hub"):
        open_channel(hub, "pull", bind=["tcp://127.0.0.1:0"])


def test_a_hub_ends_at_once_with_unsent_messages_for_nobody(ipc_folder: Path) -> None:
    """C21: closing never hangs on a peer that is not there."""
    with Hub() as hub:
        pull = open_channel(hub, "pull", bind=[f"ipc://{ipc_folder}/p.sock"], options=ChannelOptions(high_water_mark=1))
        push = open_channel(hub, "push", connect=pull.endpoints, options=ChannelOptions(high_water_mark=50))
        assert push.wait(5, write=True)
        while push.send([bytes(1_000_000)]):
            pass


def test_linger_lets_the_last_messages_arrive(hub: Hub, endpoint: str) -> None:
    """A worker that hands in its last rollout and exits loses nothing."""
    pull = open_channel(hub, "pull", bind=[endpoint])
    with Hub() as other:
        push = open_channel(other, "push", connect=pull.endpoints)
        assert push.wait(5, write=True)
        for number in range(20):
            assert push.send([b"%d" % number, bytes(2_000_000)], copy=False)
        reader: list[bytes] = []

        def read() -> None:
            while len(reader) < 20:
                reader.append(got(pull)[0])

        thread = threading.Thread(target=read)
        thread.start()
        push.close(linger=10.0)
    thread.join(20)
    assert reader == [b"%d" % number for number in range(20)]


def sending_buffers(port: int) -> list[int]:
    """What the kernel keeps for each connection of this process that was accepted on ``port``, in bytes."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            if not str(descriptor.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor.name))) as other:
                if other.family == socket.AF_INET and other.getpeername() and other.getsockname()[1] == port:
                    found.append(other.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF))
        except OSError:
            continue  # closed meanwhile, or a listening one
    return found


def test_what_waits_to_be_sent_is_kept_small_on_loopback_and_left_to_the_kernel_elsewhere(hub: Hub) -> None:
    most = int(Path("/proc/sys/net/core/wmem_max").read_text())
    with open_channel(hub, "router", bind=["tcp://0.0.0.0:0", "tcp://127.0.0.1:0"]) as router:
        anywhere, loopback = (int(endpoint.rpartition(":")[2]) for endpoint in router.endpoints)
        for port in (anywhere, loopback):
            with open_channel(hub, "req", connect=[f"tcp://127.0.0.1:{port}"]) as client:
                assert client.wait(5, write=True)
                assert client.send([b"here"])
                assert router.wait(5)
                assert router.receive() is not None
                (kept,) = sending_buffers(port)
            assert (kept == 2 * min(450_000, most)) == (port == loopback), kept


def test_a_busy_tcp_port_is_named(hub: Hub) -> None:
    first = open_channel(hub, "router", bind=["tcp://127.0.0.1:0"])
    with pytest.raises(EndpointError, match="another program has this port") as caught:
        open_channel(hub, "router", bind=first.endpoints)
    assert first.endpoints[0] in str(caught.value)
    assert hub.open_channels == 1, "the failed one is not left open"


FORKED = """
import os, sys
from ods_async.errors import ClosedError
from ods_async.transport.sockets import *
hub = Hub()
router = open_channel(hub, "router", bind=[sys.argv[1]])
client = open_channel(hub, "req", connect=router.endpoints)
assert client.wait(5, write=True)
client.send([b"before"])
peer, body = (router.wait(5), split_envelope(router.receive()))[1]
pid = os.fork()
if pid == 0:
    code = 1
    try:
        client.send([b"from the child"])
    except ClosedError as error:
        assert "another process" in str(error), error
        mine = open_channel(hub, "req", connect=router.endpoints)
        assert mine.wait(5, write=True) and mine.send([b"child's own"])
        assert mine.wait(5) and mine.receive() == [b"hello child"]
        client.close(); router.close()
        hub.close()
        code = 0
    finally:
        if sys.argv[2] == "hard":
            os._exit(code)
    sys.exit(code)
assert router.wait(5)
child, body = split_envelope(router.receive())
assert body == [b"child's own"], body
router.send(join_envelope(child, [b"hello child"]))
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
router.send(join_envelope(peer, [b"after"]))
assert client.wait(5) and client.receive() == [b"after"]
hub.close()
print("parent ok")
"""


@pytest.mark.parametrize("ending", ["hard", "soft"])
def test_a_forked_child_never_touches_the_parents_sockets(ending: str, endpoint: str) -> None:
    """C41: the child has channels of its own, the parent goes on, and nobody aborts, hangs or complains."""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORKED, endpoint, ending], capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "parent ok\n", "")
