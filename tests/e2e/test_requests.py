"""Requests that are cancelled, time out, wait in vain or are wrong, against services with real processes."""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import ods_async as ods
from tests.cli.programs import line_of, run_json, settings, started
from tests.e2e.test_stopped_consumers import until

SEEDS = 40


@pytest.fixture(scope="module")
def engine(_nothing_left_by_the_run: None) -> Iterator[ods.OnlineDataEngine]:
    cfg = ods.OnlineDataEngineCfg(
        buffer_size=7,
        max_episode_steps=19,
        gym_config={
            "id": "ods_async/Counting-v0",
            "num_envs": 3,
            "kwargs": {"min_length": 6, "max_length": 17, "image_shape": [24, 31, 3]},
        },
        refill_policy="manual",
        num_workers=2,
        initialization_timeout=90.0,
        extra_endpoints=("tcp://127.0.0.1:0",),
    )
    with ods.OnlineDataEngine(cfg) as running:
        yield running


def shape(seed: int) -> tuple[int, int]:
    """Another one for every seed, so that an answer shows whose it is."""
    return 2 + seed % 11, 1 + seed % 5


@pytest.fixture(scope="module")
def answers(engine: ods.OnlineDataEngine) -> list[torch.Tensor]:
    """What each seed draws as long as the buffer is the same."""
    return [engine.sample_batch(*shape(seed), seed=seed)["obs", "state"].clone() for seed in range(SEEDS)]


WAYS = pytest.mark.parametrize("data_path", ["shared_memory", "frames"])


@WAYS
async def test_a_cancelled_request_leaves_its_client_usable_and_the_next_answer_is_its_own(
    data_path: str, engine: ods.OnlineDataEngine, answers: list[torch.Tensor]
) -> None:
    """At any moment: before it is sent, while it is answered, while the answer is copied; or timed out."""
    chance = random.Random(7)
    outcomes: dict[str, int] = {}
    async with ods.AsyncClient(engine.endpoints[data_path == "frames"], data_path=data_path) as client:
        for turn in range(250):
            seed, other = chance.randrange(SEEDS), chance.randrange(SEEDS)
            if turn % 5:
                asked = asyncio.ensure_future(client.sample_batch(*shape(other), seed=other))
                for _ in range(chance.choice([0, 1, 2, 3, 5, 9, 20])):
                    await asyncio.sleep(0)
                if turn % 3 == 0:
                    await asyncio.sleep(chance.random() * 0.001)
                asked.cancel()
            else:
                asked = asyncio.ensure_future(client.sample_batch(*shape(other), seed=other, timeout=0.0003))
            try:
                await asked
                outcome = "answered"
            except asyncio.CancelledError:
                outcome = "cancelled"
            except ods.RequestTimeoutError:
                outcome = "timed out"
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            batch = await client.sample_batch(*shape(seed), seed=seed)
            assert torch.equal(batch["obs", "state"], answers[seed]), f"turn {turn}: the answer is another's"
        assert outcomes.get("cancelled", 0) > 30, outcomes
        status = await client.get_status()
    assert status["malformed_messages"] == 0


@WAYS
def test_a_timed_out_request_leaves_the_blocking_client_usable_and_the_next_answer_is_its_own(
    data_path: str, engine: ods.OnlineDataEngine, answers: list[torch.Tensor]
) -> None:
    """Time-outs from far too short to nearly enough."""
    chance = random.Random(8)
    late = 0
    with ods.Client(engine.endpoints[data_path == "frames"], data_path=data_path) as client:
        for turn in range(250):
            seed, other = chance.randrange(SEEDS), chance.randrange(SEEDS)
            try:
                client.sample_batch(*shape(other), seed=other, timeout=chance.choice([1e-6, 1e-4, 3e-4, 8e-4]))
            except (ods.RequestTimeoutError, ods.BrokerUnreachableError):  # not even hello may have had time
                late += 1
            batch = client.sample_batch(*shape(seed), seed=seed)
            assert torch.equal(batch["obs", "state"], answers[seed]), f"turn {turn}: the answer is another's"
        assert late > 60
        assert client.get_status()["malformed_messages"] == 0


class Interrupt(Exception):
    """As Ctrl-C: raised by a signal handler."""


def check_interruption(client: ods.Client) -> None:
    """A wait that a signal's handler ends leaves the client usable, and nothing waiting in the broker."""

    def interrupt(*_: Any) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    alarm = threading.Timer(0.4, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
    try:
        alarm.start()
        with pytest.raises(Interrupt):
            client.sample_batch(6, 4, timeout=60.0)
    finally:
        alarm.join()
        signal.signal(signal.SIGUSR1, before)
    until(lambda: client.get_stats()["extra"]["parked_requests"] == 0)
    with pytest.raises(ods.RequestTimeoutError, match="0 of 5 episodes"):
        client.sample_batch(6, 4, timeout=0.2)


def test_an_empty_buffer_raises_at_the_deadline_and_says_what_is_missing(tmp_path: Path) -> None:
    """C35: no worker; a worker that is starting; one that failed: each time in words, and not a moment early."""
    gym = {"id": "ods_async/Counting-v0", "kwargs": {"max_length": 9, "step_delay": 30.0}}
    common: dict[str, Any] = {"buffer_size": 5, "max_episode_steps": 12, "gym_config": gym}
    path = settings(tmp_path, endpoint="tcp://127.0.0.1:0", extra_endpoints=[f"ipc://{tmp_path / 'b.sock'}"], **common)

    def in_vain(endpoint: str, *words: str) -> None:
        async def awaiting() -> None:
            async with ods.AsyncClient(endpoint) as client:
                await client.sample_batch(6, 4, timeout=0.6)

        def blocking() -> None:
            with ods.Client(endpoint) as client:
                client.sample_batch_with_context(6, 4, 2, timeout=0.6)

        for ask in (blocking, lambda: asyncio.run(awaiting())):
            before = time.monotonic()
            with pytest.raises(ods.RequestTimeoutError) as caught:
                ask()
            took = time.monotonic() - before
            assert 0.6 <= took < 1.6, f"{took:.2f} s"
            assert caught.value.timeout == pytest.approx(0.6, abs=0.2)
            for word in ("0 of 5 episodes", *words):
                assert word in str(caught.value)
                assert word in caught.value.missing

    with started("broker", path, "--json") as broker:
        tcp, ipc = line_of(broker)["endpoints"]
        in_vain(tcp, "no worker has connected")
        with started("worker", path, "--connect", ipc) as worker:
            with ods.Client(ipc) as client:
                until(lambda: [w["state"] for w in client.get_status()["workers"]] == ["busy"])
            in_vain(ipc, "1 ready", "0 of 6 windows")
            with ods.Client(tcp) as client:
                check_interruption(client)
            worker.kill()
            worker.wait()
        bad = {"id": "ods_async/Counting-v0", "kwargs": {"no_such_argument": 1}}
        failing = settings(tmp_path, **(common | {"gym_config": bad}))
        with started("worker", failing, "--connect", tcp) as worker:
            assert worker.wait(60.0) == 1
        in_vain(tcp, "last failure", "no_such_argument")
        assert run_json("stop", ipc)


ARGUMENTS: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("sample_batch", (0, 3), {}, "batch_size"),
    ("sample_batch", (True, 3), {}, "batch_size"),
    ("sample_batch", (2.0, 3), {}, "batch_size"),
    ("sample_batch", (2, -1), {}, "chunk_size"),
    ("sample_batch", (2, 20), {}, "19"),
    ("sample_batch", (2, 3, "episodes"), {}, "'episode'"),
    ("sample_batch", (2, 1, "boundary"), {}, "2"),
    ("sample_batch", (2, 3), {"seed": -1}, "seed"),
    ("sample_batch", (2, 3), {"timeout": float("nan")}, "timeout"),
    ("sample_batch", (2, 3), {"timeout": 0}, "timeout"),
    ("sample_batch", (2**40, 3), {}, "batch_size"),
    ("sample_batch_with_context", (2, 0, 3), {}, "history_length"),
    ("sample_batch_with_context", (2, 3, 0), {}, "prediction_horizon"),
    ("sample_batch_with_context", (2, 3, 3), {"sampling_mode": "boundary"}, "boundary"),
    ("sample_batch_with_context", (2, 3, 3), {"generations": (1,)}, "include_provenance"),
    ("sample_batch_with_context", (2, 3, 3), {"generations": ()}, "generations"),
    ("wait_for_generation", (9,), {}, "never requested"),
]


@WAYS
@pytest.mark.parametrize(("verb", "args", "kwargs", "word"), ARGUMENTS)
def test_b23_a_wrong_argument_is_a_value_error_that_names_it_and_costs_nothing(
    verb: str, args: tuple[Any, ...], kwargs: dict[str, Any], word: str, data_path: str, engine: ods.OnlineDataEngine
) -> None:
    with ods.Client(engine.endpoints[data_path == "frames"], data_path=data_path) as client:
        before = client.get_stats()["sampled_chunks"]
        with pytest.raises(ValueError, match=word) as caught:
            getattr(client, verb)(*args, **kwargs)
        assert isinstance(caught.value, ods.OdsError)
        assert client.get_stats()["sampled_chunks"] == before
        assert client.sample_batch(2, 3).batch_size == (2, 3)


def test_b23_no_eligible_window_says_mode_length_and_what_there_is(engine: ods.OnlineDataEngine) -> None:
    """Longer than every episode, but not than the row."""
    for endpoint in engine.endpoints:
        with ods.Client(endpoint) as client, pytest.raises(ods.DataUnavailableError) as caught:
            client.sample_batch(2, 18, "segment")
        assert (caught.value.mode, caught.value.length) == ("segment", 18)
        assert "segment" in str(caught.value)
        assert "18" in str(caught.value)
        assert caught.value.holds


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"buffer_size": 0}, "buffer_size=0: must be a positive integer"),
    ({"buffer_size": True}, "buffer_size=True"),
    ({"max_episode_steps": 2.0}, "max_episode_steps=2.0"),
    ({"shutdown_timeout": float("inf")}, "shutdown_timeout=inf"),
    ({"initialization_timeout": float("nan")}, "initialization_timeout=nan"),
    ({"gym_config": {"id": "x", "num_envs": 17}}, "must not exceed buffer_size=16"),
    ({"gym_config": {"id": "x", "num_env": 2}}, "num_envs"),
    ({"refill_policy": "sometimes"}, "refill_policy='sometimes'"),
    ({"buffer_device": "cuda"}, "device="),
    ({"episode_sample_budget": 4}, "episode_sample_hard_limit"),
    ({}, "must name the environment"),
    ({"gym_config": {"id": "x"}, "endpoint": "tcp:/localhost:5555"}, "endpoint='tcp:/localhost:5555'"),
    ({"gym_config": {"id": "x"}, "endpoint": "tcp://127.0.0.1:70000"}, "70000"),
    ({"gym_config": {"id": "x"}, "endpoint": f"ipc:///tmp/{'n' * 120}.sock"}, "107"),
]


@pytest.mark.parametrize(("values", "words"), SETTINGS)
def test_b1_c44_a_wrong_setting_is_refused_before_anything_exists(values: dict[str, Any], words: str) -> None:
    """B1: with field, value and rule."""
    before = set(psutil.Process().children(recursive=True))
    with pytest.raises(ValueError) as caught:
        ods.OnlineDataEngine(ods.OnlineDataEngineCfg(**values))
    assert words in str(caught.value)
    assert isinstance(caught.value, ods.ConfigError | ods.EndpointError)
    assert set(psutil.Process().children(recursive=True)) == before


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [("tcp://127.0.0.1", "port"), ("http://localhost:80", "tcp://"), ("tcp://127.0.0.1:0", "port"), ("", "tcp://")],
)
def test_c44_a_wrong_address_says_what_a_right_one_looks_like(endpoint: str, words: str) -> None:
    for make in (ods.Client, ods.AsyncClient):
        with pytest.raises(ods.EndpointError, match=words):
            make(endpoint)


def test_c21_nobody_there_is_said_within_the_time_out_with_the_address() -> None:
    """API.md: an endpoint that does not answer is said to be unreachable, with the address tried."""
    for endpoint in ("tcp://127.0.0.1:9", "ipc:///tmp/ods-nobody.sock"):
        client = ods.Client(endpoint, connect_timeout=0.4)
        before = time.monotonic()
        with pytest.raises(ods.BrokerUnreachableError, match=endpoint.partition("://")[2]):
            client.sample_batch(1, 1, timeout=9.0)
        assert 0.3 < time.monotonic() - before < 2.0
        client.close()
