"""Programs that end with everything still open, and children that were forked with everything open (C40, C41)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from ods_async import OnlineDataEngineCfg
from ods_async.testing.broker import run_broker
from ods_async.testing.peers import RawWorker
from tests.cli.programs import environment

COMMON = """
import asyncio, os, sys
import ods_async as ods
ipc, tcp = sys.argv[1:]
near, far = ods.Client(ipc, data_path="shared_memory"), ods.Client(tcp, data_path="frames")
batches = [client.sample_batch(9, 4) for client in (near, far)]
piece = batches[0]["obs", "mark"][2:]
streams = [client.stream(4, 3, prefetch=3) for client in (near, far)]
kept = [next(stream) for stream in streams]
"""
# What a program may hold when it ends without closing anything.
GLOBALS = """
iterators = [iter(ods.OnlineDataset(end, 3, 4)) for end in (ipc, tcp)]
items = [next(iterator) for iterator in iterators]
subscriber = ods.EventSubscriber(ipc, since=0)
event = next(subscriber)
awaited = ods.AsyncClient(ipc)
async def draw():
    global more, stream
    more, stream = await awaited.sample_batch(4, 3), awaited.stream(4, 3, prefetch=2)
    await anext(stream)
asyncio.run(draw())
near.sample_batch(9, 4)
print((piece % 1000).diff(dim=1).eq(1).all().item())
"""
RAISES = """
with near, far:
    batches += [near.sample_batch(9, 4), far.sample_batch(9, 4)]
    raise ZeroDivisionError("the body's own")
"""
# An inherited interpreter is taken apart as a whole, once without and once after using what was inherited.
FORKS = """
for uses in (False, True):
    child = os.fork()
    if child == 0:
        if uses:
            assert all(client.sample_batch(3, 2).batch_size[0] == 3 for client in (near, far))
            assert [next(stream).batch_size[0] for stream in streams] == [4, 4]
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert [next(stream).batch_size[0] for stream in streams for _ in range(9)] == [4] * 18
    assert all(client.sample_batch(3, 2).batch_size[0] == 3 for client in (near, far))
print(True)
"""

Program = tuple[int, str, str]


@pytest.fixture(scope="module")
def ended(_nothing_left_by_the_run: None) -> Iterator[dict[str, Program]]:
    """All programs at once, since importing torch is most of what they do: exit code, output, errors."""
    cfg = OnlineDataEngineCfg(buffer_size=4, max_episode_steps=12, refill_policy="manual")
    with run_broker(cfg, ipc=True) as broker, RawWorker(broker.endpoint) as worker:
        worker.work_in_background()
        tcp, ipc = broker.endpoints
        begun = {
            name: subprocess.Popen(
                [sys.executable, "-W", "error", "-c", COMMON + body, ipc, tcp],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment(),
            )
            for name, body in {"globals": GLOBALS, "raises": RAISES, "forks": FORKS}.items()
        }
        found = {}
        try:
            for name, program in begun.items():
                out, errors = program.communicate(timeout=120.0)
                found[name] = (program.returncode, out, errors)
        finally:
            for program in begun.values():
                program.kill()
                program.wait()
        yield found


def test_c40_an_interpreter_that_ends_with_everything_open_makes_no_noise(ended: dict[str, Program]) -> None:
    """C40: batches, clients, streams, datasets and subscribers in globals, on both data paths."""
    assert ended["globals"] == (0, "True\n", "")


def test_c40_the_bodys_error_is_the_one_seen_while_batches_live(ended: dict[str, Program]) -> None:
    """C40: nothing else is printed."""
    code, _, errors = ended["raises"]
    assert code == 1
    assert errors.splitlines()[-1] == "ZeroDivisionError: the body's own"
    assert errors.count("Traceback") == errors.count("Error") == 1


def test_c41_forked_children_that_end_like_programs_leave_the_parents_streams_alone(ended: dict[str, Program]) -> None:
    """C41: their end must neither stop the parent's threads (descriptors are shared) nor hang or complain."""
    assert ended["forks"] == (0, "True\n", "")
