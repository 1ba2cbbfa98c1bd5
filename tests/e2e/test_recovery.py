"""Item by item: restarts, joining and leaving, a broker that comes back, a second one on its endpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ods_async import (
    BrokerUnreachableError,
    Client,
    EventSubscriber,
    OnlineDataEngine,
    OnlineDataEngineCfg,
    OnlineDataWorkerError,
    RequestTimeoutError,
    RunChangedError,
    Worker,
)
from ods_async.core.events import StateChanged, TicketReissued
from ods_async.observe.sequence import EventsLost
from ods_async.supervise.supervisor import Supervisor
from ods_async.testing import window_faults
from ods_async.testing.broker import run_broker
from ods_async.testing.peers import RawWorker
from ods_async.transport.shm import FOLDER
from tests.cli.programs import ends, line_of, run, settings, started

SECONDS = 60.0


def values(**changes: Any) -> dict[str, Any]:
    env = changes.pop("env", {})
    made: dict[str, Any] = {
        "buffer_size": 4,
        "max_episode_steps": 12,
        "refill_policy": "manual",
        "gym_config": {"id": "ods_async/Counting-v0", "kwargs": {"min_length": 5, "max_length": 9, **env}},
        "num_workers": 1,
    }
    return made | changes


def until(condition: Callable[[], bool], within: float = SECONDS) -> None:
    deadline, tick = time.monotonic() + within, threading.Event()
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        tick.wait(0.02)


def segments(pid: int) -> list[str]:
    return [path.name for path in FOLDER.glob("ods-*") if path.name.split("-")[2] == str(pid)]


# --- workers --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_restarts_wait_twice_as_long_each_time_and_end_at_their_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """B12, C34: one start and three restarts, 0.1, 0.2 and 0.4 seconds after the exits; then the failure is told."""
    starts: list[float] = []
    exits: list[float] = []
    fill, ended = Supervisor._fill, Supervisor._ended

    def noted_fill(self: Supervisor, post: Any) -> None:
        starts.append(time.monotonic())
        fill(self, post)

    def noted_end(self: Supervisor, child: Any) -> None:
        if child.name.startswith("worker"):
            exits.append(time.monotonic())
        ended(self, child)

    monkeypatch.setattr(Supervisor, "_fill", noted_fill)
    monkeypatch.setattr(Supervisor, "_ended", noted_end)
    env = {"fail_phase": "reset", "fail_kind": "exit"}
    engine = OnlineDataEngine(OnlineDataEngineCfg(**values(env=env, max_worker_restarts=3)))
    with pytest.raises(OnlineDataWorkerError, match="exit code 3"):
        engine.start()
    with contextlib.suppress(OnlineDataWorkerError):
        engine.stop()
    assert len(starts) == 4
    pauses = [start - end for start, end in zip(starts[1:], exits, strict=False)]
    assert all(pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.4), strict=True)), pauses


def test_a_worker_that_dies_while_the_broker_is_stopped_is_started_again() -> None:
    """B12: that its exit could not be told at once changes nothing."""
    cfg = OnlineDataEngineCfg(**values(max_worker_restarts=1, heartbeat_timeout=20.0))
    with OnlineDataEngine(cfg) as engine:
        pids = engine.pids
        os.kill(pids["broker"], signal.SIGSTOP)
        try:
            os.kill(pids["worker-0"], signal.SIGKILL)
            until(lambda: engine.pids.get("worker-0", pids["worker-0"]) != pids["worker-0"])
        finally:
            os.kill(pids["broker"], signal.SIGCONT)
        engine.wait_for_generation(engine.request_refill(), timeout=SECONDS)
        assert engine.get_status()["workers"][0]["restarts"] == 1


async def test_workers_join_and_leave_and_whoever_waits_is_served_when_there_are_some() -> None:
    """C35: a service without workers says what it waits for, and one that lost them takes others."""
    cfg = OnlineDataEngineCfg(**values(refill_policy="continuous"))
    with run_broker(cfg, ipc=True) as broker, Client(broker.endpoint, timeout=SECONDS) as client:
        with pytest.raises(RequestTimeoutError, match="no worker"):
            client.wait_ready(timeout=0.2)
        async with Worker(cfg, broker.endpoint, worker_id="first"):
            client.wait_ready()
        # What a worker says last goes another way than what is asked here.
        until(lambda: {worker["state"] for worker in client.get_status()["workers"]} == {"gone"})
        before = client.get_stats()["completed_generation"]
        async with (
            Worker(cfg, broker.endpoint, worker_id="second") as second,
            Worker(cfg, broker.endpoint, worker_id="third") as third,
        ):
            client.wait_for_generation(before + 1)
            until(lambda: min(second.rollouts, third.rollouts) > 0)
        batch = client.sample_batch(8, 4)
        assert [found for window in batch if (found := window_faults(window))] == []


async def test_tickets_taken_by_somebody_who_never_begins_are_made_by_another() -> None:
    """B12: each comes back when its time to start is over, and the event says so."""
    cfg = OnlineDataEngineCfg(**values(ticket_start_timeout=0.3))
    with run_broker(cfg, ipc=True) as broker, Client(broker.endpoint, timeout=SECONDS) as client:
        with RawWorker(broker.endpoint, "thief", hello=False) as thief:
            async with Worker(cfg, broker.endpoint, worker_id="honest"):
                client.wait_ready()
            stolen = 0
            while thief.tickets.receive() is not None:
                stolen += 1
            assert stolen > 0
        reasons = [e.reason for e in client.events(0, follow=False) if isinstance(e, TicketReissued)]
        assert client.get_stats()["successful_episodes"] == 4
        assert any("not started within 0.3 s" in reason for reason in reasons)


# --- brokers --------------------------------------------------------------------------------------------------------


class Service:
    """A broker as a program that can be killed and started again at the same addresses."""

    def __init__(self, stack: contextlib.ExitStack, folder: Path, port: int = 0) -> None:
        self._stack, self._folder = stack, folder
        self.ipc = f"ipc://{folder / 'b.sock'}"
        self.port = port
        self.start()

    def config(self) -> str:
        made = values(
            endpoint=self.ipc,
            extra_endpoints=[f"tcp://127.0.0.1:{self.port}"],
            refill_policy="continuous",
            include_provenance=True,
            heartbeat_interval=0.2,
        )
        return settings(self._folder, **made)

    def start(self) -> None:
        self.program = self._stack.enter_context(started("broker", self.config(), "--json"))
        told = line_of(self.program)
        self.tcp = next(end for end in told["endpoints"] if end.startswith("tcp"))
        self.port = int(self.tcp.rpartition(":")[2])
        self.run_id, self.pid = told["run_id"], told["pid"]

    def kill(self) -> None:
        self.program.kill()
        self.program.wait(10.0)


@pytest.fixture
def folders(ipc_folder: Path) -> tuple[Path, Path]:
    one, two = ipc_folder / "1", ipc_folder / "2"
    one.mkdir()
    two.mkdir()
    return one, two


@pytest.mark.slow
def test_a_killed_broker_is_started_again_and_everybody_finds_it(folders: tuple[Path, Path]) -> None:
    """C20, C32, C42: clients say once that the run has changed, the worker works on, the subscriber tells the loss.

    What the dead broker left is removed by its successor; what a living one has stays.
    """
    with contextlib.ExitStack() as stack:
        service = Service(stack, folders[0])
        other = Service(stack, folders[1])
        for end in (service, other):
            stack.enter_context(started("worker", end.config(), "--connect", end.ipc, "--patience", "60"))
        shared = stack.enter_context(Client(service.ipc, data_path="shared_memory", timeout=SECONDS))
        frames = stack.enter_context(Client(service.tcp, data_path="frames", timeout=SECONDS))
        neighbour = stack.enter_context(Client(other.ipc, data_path="shared_memory", timeout=SECONDS))
        for client in (shared, frames, neighbour):
            client.wait_ready()
            assert faults(client.sample_batch(6, 4)) == []
        told: list[Any] = []
        subscriber = stack.enter_context(EventSubscriber(service.tcp, 0, reconnect_timeout=SECONDS))
        listener = threading.Thread(target=lambda: listen(subscriber, told), daemon=True)
        listener.start()
        until(lambda: bool(told))
        old, old_pid, marks = service.run_id, service.pid, prints(shared)
        assert segments(old_pid)
        kept = segments(other.pid)
        assert kept

        waiting: list[Exception] = []
        waiter = threading.Thread(target=lambda: waiting.append(error_of(lambda: wait_long(service.ipc))))
        waiter.start()
        until(lambda: shared.get_stats()["extra"]["parked_requests"] > 0)
        service.kill()
        waiter.join(10.0)
        assert [type(error) for error in waiting] == [BrokerUnreachableError], "who waits is told within seconds"
        service.start()
        assert service.run_id != old
        until(lambda: segments(old_pid) == [] and bool(segments(service.pid)))
        assert segments(other.pid) == kept

        for client in (shared, frames):
            with pytest.raises(RunChangedError) as caught:
                client.wait_ready()
            assert (caught.value.old_run_id, caught.value.new_run_id) == (old, service.run_id)
            client.wait_ready()
            batch = client.sample_batch(6, 4)
            assert faults(batch) == []
            assert set(batch["ods_run_id"].flatten().tolist()) == {service.run_id}
        assert marks.isdisjoint(prints(shared)), "an unseeded worker makes other episodes for another run"
        assert faults(neighbour.sample_batch(6, 4)) == []
        until(lambda: any(isinstance(e, EventsLost) for e in told) and bool(told) and told[-1].run_id == service.run_id)
        for end in (service, other):
            assert run("stop", end.ipc).returncode == 0
            assert ends(end.program, 10.0)[0] == 0
        listener.join(10.0)
        assert not listener.is_alive()
        assert "STOPPED" in [event.state for event in told if isinstance(event, StateChanged)]
    for folder in folders:
        assert [path.name for path in folder.iterdir()] == ["settings.json"]
    assert segments(service.pid) == segments(other.pid) == []


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
def test_a_second_broker_on_a_live_endpoint_is_refused_and_the_first_serves_on(scheme: str, folders: Any) -> None:
    """C32, C44: within seconds, not with code 0, and naming the endpoint."""
    with contextlib.ExitStack() as stack:
        service = Service(stack, folders[0])
        endpoint = service.ipc if scheme == "ipc" else service.tcp
        path = settings(folders[1], **values(endpoint=endpoint))
        done = run("broker", path, seconds=30.0)
        assert done.returncode == 1
        assert endpoint in done.stderr
        assert ("another broker" if scheme == "ipc" else "in use") in done.stderr
        assert len(done.stderr.splitlines()) == 1
        with Client(endpoint, timeout=10.0) as client:
            assert client.get_status()["run_id"] == service.run_id
        assert run("stop", service.ipc).returncode == 0
        assert ends(service.program, 10.0)[0] == 0


def faults(batch: Any) -> list[str]:
    return [found for window in batch if (found := window_faults(window))]


def prints(client: Client) -> set[int]:
    return set(client.sample_batch(64, 2)["obs", "fingerprint"].flatten().tolist())


def wait_long(endpoint: str) -> None:
    with Client(endpoint, timeout=SECONDS) as client:
        generation = client.get_stats()["requested_generation"]
        while True:
            client.wait_for_generation(generation)
            generation += 1


def listen(subscriber: EventSubscriber, told: list[Any]) -> None:
    told.extend(subscriber)


def error_of(call: Callable[[], object]) -> Exception:
    try:
        call()
    except Exception as error:
        return error
    return AssertionError("no error")


def test_an_owner_that_is_stopped_holds_nobody_up(ipc_folder: Path) -> None:
    """C33: consumers and workers go on without it; what it missed it learns when it runs again."""
    path = settings(ipc_folder, **values(endpoint=f"ipc://{ipc_folder / 'o.sock'}", refill_policy="continuous"))
    with started("up", path, "--json") as program:
        while "pids" not in (told := line_of(program)):
            pass
        with Client(told["endpoints"][0], timeout=SECONDS) as client:
            client.wait_ready()
            program.send_signal(signal.SIGSTOP)
            try:
                generation = client.get_stats()["requested_generation"]
                client.wait_for_generation(generation)
                assert faults(client.sample_batch(8, 4)) == []
            finally:
                program.send_signal(signal.SIGCONT)
            assert client.get_status()["state"] == "READY"
        program.send_signal(signal.SIGTERM)
        assert ends(program, 15.0)[0] == 0
