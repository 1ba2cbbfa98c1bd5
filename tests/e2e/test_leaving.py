"""Programs end: without a broker, with one, by every kind of end, and leave nothing that goes on (C21)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap

import pytest

from ods_async import Client, OnlineDataEngineCfg
from ods_async.supervise.children import import_path
from ods_async.testing.broker import run_broker
from ods_async.testing.peers import RawWorker
from tests.e2e.programs import ROOT, until

NOWHERE = "tcp://127.0.0.1:9"
AWAY = f"'{NOWHERE}', connect_timeout=0.5"

# name -> (script, exit code, what is said)
WITHOUT: dict[str, tuple[str, int, str]] = {
    "an error nobody catches": (f"Client({AWAY}).sample_batch(2, 3)", 1, NOWHERE),
    "an error that is caught, and no close": (
        f"""
        client = Client({AWAY})
        try:
            client.sample_batch(2, 3)
        except Unreachable as error:
            print(error, file=sys.stderr)
        """,
        0,
        NOWHERE,
    ),
    "sys.exit": (
        f"""
        client = Client({AWAY})
        try:
            client.get_stats()
        except Unreachable:
            sys.exit(3)
        """,
        3,
        "",
    ),
    "an exception of its own": (f"client = Client({AWAY})\nraise KeyError('mine')", 1, "KeyError: 'mine'"),
    "close twice": (f"client = Client({AWAY})\nclient.close()\nclient.close()", 0, ""),
    "the error of a with block": (f"with Client({AWAY}) as client: raise KeyError('not reached')", 1, NOWHERE),
    "asyncio, no close": (
        f"""
        async def main():
            global client
            client = AsyncClient({AWAY})
            await client.sample_batch(2, 3)
        asyncio.run(main())
        """,
        1,
        NOWHERE,
    ),
    "asyncio, closed by another task": (
        f"""
        async def main():
            client = AsyncClient('{NOWHERE}', connect_timeout=300.0)
            task = asyncio.ensure_future(client.sample_batch(2, 3, timeout=300.0))
            await asyncio.sleep(0)
            await client.close()
            await client.close()
            try:
                await task
            except ods.ClosedError as error:
                print('closed', file=sys.stderr)
        asyncio.run(main())
        """,
        0,
        "closed",
    ),
    "a stream": (f"stream = Client({AWAY}).stream(2, 3, prefetch=2)\nnext(stream)", 1, NOWHERE),
    "events": (f"list(EventSubscriber('{NOWHERE}', since=0, reconnect_timeout=0.5))", 1, NOWHERE),
    "a dataset": (f"next(iter(OnlineDataset(Client({AWAY}), 3)))", 1, NOWHERE),
    "a loader": (f"next(iter(DataLoader(OnlineDataset(Client({AWAY}), 3, 2), batch_size=None)))", 1, NOWHERE),
    "a loader with workers": (
        f"next(iter(DataLoader(OnlineDataset(Client({AWAY}), 3, 2), batch_size=None, num_workers=2)))",
        1,
        NOWHERE,
    ),
    "Ctrl-C": (
        f"""
        print('waiting', file=sys.stderr, flush=True)
        Client('{NOWHERE}', connect_timeout=300.0).sample_batch(2, 3, timeout=300.0)
        """,
        -2,
        "KeyboardInterrupt",
    ),
    "Ctrl-C in asyncio": (
        f"""
        async def main():
            print('waiting', file=sys.stderr, flush=True)
            await AsyncClient('{NOWHERE}', connect_timeout=300.0).sample_batch(2, 3, timeout=300.0)
        asyncio.run(main())
        """,
        -2,
        "KeyboardInterrupt",
    ),
    "an engine that was never started": (
        "engine = ods.OnlineDataEngine(ods.OnlineDataEngineCfg(gym_config={'id': 'ods_async/Counting-v0'}))",
        0,
        "",
    ),
}

WITH: dict[str, tuple[str, int, str]] = {
    "no close": ("client = Client(BROKER)\nclient.sample_batch(2, 3)", 0, ""),
    "no close, frames": ("client = Client(BROKER, data_path='frames')\nclient.sample_batch(2, 3)", 0, ""),
    "a stream under way": ("stream = Client(BROKER).stream(2, 3, prefetch=3)\nnext(stream)", 0, ""),
    "an error in a with block": (
        "with Client(BROKER) as c:\n    c.sample_batch(2, 3)\n    1 / 0",
        1,
        "ZeroDivisionError",
    ),
    "sys.exit in a stream": ("for batch in Client(BROKER).stream(2, 3, prefetch=2): sys.exit(4)", 4, ""),
    "asyncio, no close": (
        """
        async def main():
            global client, stream
            client = AsyncClient(BROKER)
            stream = client.stream(2, 3, prefetch=2)
            await anext(stream)
        asyncio.run(main())
        """,
        0,
        "",
    ),
    "events under way": ("events = iter(EventSubscriber(BROKER, since=0))\nnext(events)", 0, ""),
    "Ctrl-C while waiting": (
        """
        client = Client(BROKER)
        client.connect()
        print('waiting', file=sys.stderr, flush=True)
        client.wait_for_generation(2, timeout=300.0)
        """,
        -2,
        "KeyboardInterrupt",
    ),
    "a loader left early": (
        """
        batches = DataLoader(OnlineDataset(BROKER, 3, 2), batch_size=None, num_workers=2, persistent_workers=True)
        for batch in batches:
            break
        """,
        0,
        "",
    ),
    "close by another task": (
        """
        async def main():
            client = AsyncClient(BROKER)
            await client.connect()
            task = asyncio.ensure_future(client.wait_for_generation(2, timeout=300.0))
            await client.get_stats()
            await client.close()
            try:
                await task
            except ods.ClosedError:
                print('closed', file=sys.stderr)
        asyncio.run(main())
        """,
        0,
        "closed",
    ),
}


def outcomes(scripts: dict[str, tuple[str, int, str]], broker: str = "") -> dict[str, tuple[int, float, str]]:
    told = [[name, f"BROKER = {broker!r}\n{textwrap.dedent(script)}"] for name, (script, *_) in scripts.items()]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.e2e.leaving"],
        input=json.dumps(told),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": import_path()},
        timeout=240.0,
        check=True,
    )
    return {name: (code, seconds, said) for name, (code, seconds, said) in json.loads(done.stdout).items()}


def check(scripts: dict[str, tuple[str, int, str]], found: dict[str, tuple[int, float, str]]) -> None:
    wrong = {
        name: found[name]
        for name, (_, code, words) in scripts.items()
        if found[name][0] != code
        or words not in found[name][2]
        or found[name][1] > 15.0
        or (not words and found[name][2])
    }
    assert wrong == {}


@pytest.mark.slow
def test_c21_every_program_ends_in_time_without_a_broker_and_beside_one_whatever_it_left_open() -> None:
    """C21: by an error, by its last line, by Ctrl-C; closed once, twice, by another task, or never.

    Without a broker the endpoint is named; a broker that was there is as it was, and serves the next one.
    """
    cfg = OnlineDataEngineCfg(buffer_size=2, max_episode_steps=9, refill_policy="manual")
    scripts = WITHOUT | {f"beside a broker: {name}": script for name, script in WITH.items()}
    with run_broker(cfg) as broker, RawWorker(broker.endpoint) as worker:
        worker.work(2, length=6)
        check(scripts, outcomes(scripts, broker.endpoint))
        with Client(broker.endpoint) as client:
            until(lambda: client.get_status()["open_leases"] == 0)
            until(lambda: client.get_stats()["extra"]["parked_requests"] == 0)
            assert client.sample_batch(2, 3).batch_size == (2, 3)
