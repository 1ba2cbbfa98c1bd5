"""C44 and C45: every way to write an address serves a whole service, and the defaults are not open to others."""

from __future__ import annotations

import ipaddress
import os
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from ods_async import AsyncClient, Broker, OnlineDataEngineCfg, Worker
from ods_async.testing import window_faults
from tests.cli.programs import line_of, settings, started
from tests.e2e.test_recovery import SECONDS, values


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def is_named(name: str) -> bool:
    try:
        socket.getaddrinfo(name, 1)
    except OSError:
        return False
    return True


HOST = socket.gethostname()
NAMED = pytest.mark.skipif(not is_named(HOST), reason="this machine does not know its own name")
IPV6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")


@pytest.mark.parametrize(
    ("bound", "dialled"),
    [
        ("localhost", "localhost"),
        ("localhost", "127.0.0.1"),
        pytest.param(HOST, HOST, marks=NAMED),  # as a container's service name: it is in its own hosts file
        ("*", "127.0.0.1"),
        ("0.0.0.0", "localhost"),
        ("0.0.0.0", None),
        pytest.param("[::]", None, marks=IPV6),
        pytest.param("[::1]", "[::1]", marks=IPV6),
        pytest.param("[::]", "[::1]", marks=IPV6),
    ],
)
async def test_c44_what_is_bound_and_announced_can_be_dialled(bound: str, dialled: str | None) -> None:
    """C44: port 0, and all four sockets: a worker needs each of them. None: dialled as the broker tells it."""
    cfg = OnlineDataEngineCfg(**values(endpoint=f"tcp://{bound}:0", allow_insecure_bind=True))
    async with Broker(cfg) as broker:
        port = broker.endpoint.rpartition(":")[2]
        assert int(port) > 0
        endpoint = broker.endpoint if dialled is None else f"tcp://{dialled}:{port}"
        async with Worker(cfg, endpoint), AsyncClient(endpoint, timeout=SECONDS) as client:
            await client.wait_ready()
            batch = await client.sample_batch(8, 3)
            assert [found for window in batch if (found := window_faults(window))] == []


def listening(pid: int) -> set[str]:
    """The addresses where a process listens on tcp."""
    found = psutil.Process(pid).net_connections("tcp")
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("changes", [{}, {"extra_endpoints": ["tcp://localhost:0"]}], ids=["defaults", "a port"])
def test_c45_defaults_listen_on_no_address_that_others_reach(changes: dict[str, Any], tmp_path: Path) -> None:
    """C45: no tcp at all, or loopback only; C44: a folder for temporary files with a long name changes nothing."""
    long = tmp_path / ("t" * 120)
    long.mkdir()
    name = f"t{os.getpid()}"
    path = settings(tmp_path, **values(name=name, **changes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(long))
        with started("broker", path, "--json") as broker:
            told = line_of(broker)
            endpoint = told["endpoints"][0]
            assert endpoint.startswith("ipc://")
            assert len(endpoint) < 90
            assert Path(endpoint.removeprefix("ipc://")).parent.stat().st_mode & 0o077 == 0
            found = listening(told["pid"])
            assert all(ipaddress.ip_address(address).is_loopback for address in found)
            assert bool(found) is bool(changes)
