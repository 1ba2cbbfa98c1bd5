"""The plain line to a broker."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from ods_async.config import OnlineDataEngineCfg
from ods_async.core.requests import Done, GetStatus, ServiceStatus, Stats, WaitReady
from ods_async.errors import (
    BrokerUnreachableError,
    ClosedError,
    EndpointError,
    ProtocolError,
    RequestTimeoutError,
)
from ods_async.supervise.line import Line
from ods_async.testing.broker import run_broker

CFG = OnlineDataEngineCfg(buffer_size=3, max_episode_steps=7)


def test_it_asks_and_is_answered_over_any_scheme() -> None:
    with run_broker(CFG, ipc=True) as broker:
        for endpoint in broker.endpoints:
            with Line(endpoint, role="observer", name="test") as line:
                assert line.connect().run_id == broker.run_id
                assert line.ask(GetStatus(), ServiceStatus, 5.0).state == "STARTING"


def test_a_time_out_leaves_it_usable() -> None:
    with run_broker(CFG) as broker, Line(broker.endpoint, role="observer", name="test") as line:
        with pytest.raises(RequestTimeoutError, match="0 of 3 episodes"):
            line.ask(WaitReady(), Done, 0.2)
        assert line.ask(GetStatus(), ServiceStatus, 5.0).slots == 3


def test_an_answer_of_another_kind_is_a_protocol_error() -> None:
    with run_broker(CFG) as broker, Line(broker.endpoint, role="observer", name="test") as line:
        with pytest.raises(ProtocolError, match="expected Stats, got ServiceStatus"):
            line.ask(GetStatus(), Stats, 5.0)
        assert line.ask(GetStatus(), ServiceStatus, 5.0).slots == 3


def test_c21_nobody_there_is_said_in_time(tmp_path: Path) -> None:
    """C21: with the address, within the time-out; also where something else listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        for endpoint in (f"ipc://{tmp_path / 'x'}", f"tcp://127.0.0.1:{mute.getsockname()[1]}"):
            before = time.monotonic()
            with (
                Line(endpoint, role="observer", name="test", connect_timeout=0.3) as line,
                pytest.raises(BrokerUnreachableError, match=endpoint),
            ):
                line.ask(GetStatus(), ServiceStatus, 10.0)
            assert time.monotonic() - before < 3.0


def test_a_broker_that_goes_away_is_noticed_and_its_successor_found(tmp_path: Path) -> None:
    with run_broker(CFG) as broker:
        port = int(broker.endpoint.rpartition(":")[2])
        line = Line(broker.endpoint, role="observer", name="test", connect_timeout=5.0)
        line.connect()
        stopper = threading.Timer(0.2, broker.stop)
        stopper.start()
        with pytest.raises((BrokerUnreachableError, ClosedError)):
            line.ask(WaitReady(), Done, 20.0)
        stopper.join()
    with run_broker(CFG, port) as successor, line:
        assert line.ask(GetStatus(), ServiceStatus, 5.0).run_id == successor.run_id


def test_an_address_that_is_none_is_refused() -> None:
    """C44."""
    with pytest.raises(EndpointError):
        Line("tcp:/nowhere", role="observer", name="test")
