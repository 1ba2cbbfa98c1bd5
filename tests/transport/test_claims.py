"""Listening on an ipc path: one live broker an endpoint, a dead one's file replaced."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ods_async.errors import EndpointError
from ods_async.transport.claims import claim_ipc, sweep_private
from ods_async.transport.endpoint import parse_endpoint
from ods_async.transport.sockets import Hub, open_channel

LISTENER = """
import sys
from ods_async.transport.sockets import *
hub = Hub()
router = open_channel(hub, "router", bind=[sys.argv[1]])
print("listening", flush=True)
while True:
    if router.wait(0.1):
        peer, body = split_envelope(router.receive())
        router.send(join_envelope(peer, [b"from " + sys.argv[2].encode()]))
"""


@contextmanager
def listener(endpoint: str, name: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", LISTENER, endpoint, name], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            yield process
        finally:
            process.kill()


def ask(hub: Hub, endpoint: str) -> bytes:
    with open_channel(hub, "req", connect=[endpoint]) as client:
        assert client.wait(5, write=True)
        assert client.send([b"who are you?"])
        assert client.wait(5)
        frames = client.receive()
        assert frames is not None
        return bytes(frames[0])


def test_a_second_broker_on_a_live_endpoint_is_refused_and_the_first_goes_on(ipc_folder: Path) -> None:
    endpoint = f"ipc://{ipc_folder}/b.sock"
    with Hub() as hub, listener(endpoint, "first") as first:
        with pytest.raises(EndpointError, match=f"another broker \\(process {first.pid}\\)"):
            open_channel(hub, "router", bind=[endpoint])
        assert ask(hub, endpoint) == b"from first"
        first.kill()
        first.wait()
        (ipc_folder / "b.sock.lock").unlink()
        (ipc_folder / "b.sock").unlink()


def test_in_one_process_too(ipc_folder: Path) -> None:
    endpoint = f"ipc://{ipc_folder}/b.sock"
    with Hub() as hub:
        with open_channel(hub, "router", bind=[endpoint]), pytest.raises(EndpointError, match="another broker"):
            open_channel(hub, "router", bind=[endpoint])
        assert list(ipc_folder.iterdir()) == []


def test_what_a_killed_broker_left_is_replaced(ipc_folder: Path) -> None:
    endpoint = f"ipc://{ipc_folder}/b.sock"
    with Hub() as hub:
        with listener(endpoint, "first") as first:
            first.send_signal(signal.SIGKILL)
            first.wait()
        assert (ipc_folder / "b.sock").exists(), "a killed process removes nothing"
        with listener(endpoint, "second") as second:
            assert ask(hub, endpoint) == b"from second"
            second.kill()
            second.wait()
        with open_channel(hub, "router", bind=[endpoint]):
            pass
    assert list(ipc_folder.iterdir()) == []


def test_what_engines_killed_with_their_brokers_left_is_swept_and_nothing_else(ipc_folder: Path) -> None:
    """C32: private names of the dead; not those of the living, nor names that somebody may come back to."""
    dead, living, named = (ipc_folder / f"{name}.sock" for name in ("e-00112233aabb", "e-445566778899", "standing"))
    with (
        Hub() as hub,
        listener(f"ipc://{dead}", "dead") as first,
        listener(f"ipc://{named}", "named") as second,
        open_channel(hub, "router", bind=[f"ipc://{living}"]),
    ):
        kept = {path.name for path in ipc_folder.iterdir()} - {dead.name, f"{dead.name}.lock"}
        assert sweep_private(ipc_folder) == []
        for process in (first, second):
            process.kill()
            process.wait()
        assert sweep_private(ipc_folder) == [str(dead)]
        assert {path.name for path in ipc_folder.iterdir()} == kept
        assert sweep_private(ipc_folder / "missing") == []
        named.unlink()
        (ipc_folder / "standing.sock.lock").unlink()


def test_a_successor_in_quick_succession_keeps_its_file(ipc_folder: Path) -> None:
    """zmq removes a closed socket's file in its own time: it must not be the next one's."""
    endpoint = f"ipc://{ipc_folder}/b.sock"
    with Hub() as hub:
        for _ in range(100):
            open_channel(hub, "router", bind=[endpoint]).close()
            with open_channel(hub, "pull", bind=[endpoint]), open_channel(hub, "push", connect=[endpoint]) as push:
                assert push.wait(5, write=True)
                assert (ipc_folder / "b.sock").exists()
    assert list(ipc_folder.iterdir()) == []


def test_the_socket_is_for_its_user_only(ipc_folder: Path) -> None:
    with Hub() as hub, open_channel(hub, "router", bind=[f"ipc://{ipc_folder}/b.sock"]):
        assert stat.S_IMODE((ipc_folder / "b.sock").stat().st_mode) == 0o600
        assert stat.S_IMODE((ipc_folder / "b.sock.lock").stat().st_mode) == 0o600


def test_nobody_else_can_reach_it_before_its_rights_are_set(ipc_folder: Path) -> None:
    """Between its binding and its chmod a socket has the rights that the umask leaves: here, all of them."""
    before = os.umask(0)
    try:
        claim = claim_ipc(parse_endpoint(f"ipc://{ipc_folder}/b.sock"))
        passage = Path(claim.passage)
        assert stat.S_IMODE(passage.parent.stat().st_mode) == 0o700
        assert passage.parent.parent == ipc_folder
        assert len(claim.passage) <= len(f"{ipc_folder}/.123456")
        claim.release()
        assert list(ipc_folder.iterdir()) == []
        with Hub() as hub, open_channel(hub, "router", bind=[f"ipc://{ipc_folder}/b.sock"]):
            assert sorted(path.name for path in ipc_folder.iterdir()) == ["b.sock", "b.sock.lock"]
            assert stat.S_IMODE((ipc_folder / "b.sock").stat().st_mode) == 0o600
    finally:
        os.umask(before)


def test_something_that_is_no_socket_is_left_alone(ipc_folder: Path) -> None:
    (ipc_folder / "b.sock").write_text("precious")
    with Hub() as hub, pytest.raises(EndpointError, match="not a socket"):
        open_channel(hub, "router", bind=[f"ipc://{ipc_folder}/b.sock"])
    assert (ipc_folder / "b.sock").read_text() == "precious"
    assert [path.name for path in ipc_folder.iterdir()] == ["b.sock"]


def test_a_missing_folder_is_named(ipc_folder: Path) -> None:
    with Hub() as hub, pytest.raises(EndpointError, match=f"{ipc_folder}/none"):
        open_channel(hub, "router", bind=[f"ipc://{ipc_folder}/none/b.sock"])


def test_a_forked_child_does_not_keep_a_dead_owners_claim(ipc_folder: Path) -> None:
    """A DataLoader's workers may outlive the process that made the broker."""
    program = LISTENER.replace(
        'print("listening", flush=True)',
        """
import os
if os.fork() == 0:
    print("listening", flush=True)
    os.close(1)
    os.read(0, 1)
    os._exit(0)
""",
    )
    endpoint = f"ipc://{ipc_folder}/b.sock"
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", program, endpoint, "x"], stdin=read, stdout=subprocess.PIPE, text=True
    ) as process:
        os.close(read)
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        process.kill()
        process.wait()
        with Hub() as hub, open_channel(hub, "router", bind=[endpoint]):
            os.close(write)
