"""Every dtype, every layout and every space, from a worker through a broker into batches (C27, C29)."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from ods_async import Client, OnlineDataEngineCfg, Worker
from ods_async.core.requests import GetStatus
from ods_async.core.schema import FieldSpec
from ods_async.errors import SchemaMismatchError
from ods_async.testing.broker import run_broker
from ods_async.testing.conformance.environments import MODULE, SPACES_ID, samples_of
from ods_async.testing.peers import RawConsumer, RawWorker, marked_episode
from ods_async.wire.plain import SCALARS
from tests.e2e.programs import until

PATHS = ("shared_memory", "frames")
STEPS = 5


def config(env: str, num_envs: int = 1, **gym_config: Any) -> OnlineDataEngineCfg:
    made = {"id": env, "num_envs": num_envs, **gym_config}
    return OnlineDataEngineCfg(buffer_size=num_envs, max_episode_steps=STEPS, refill_policy="manual", gym_config=made)


def special(name: str) -> Any:
    """``[STEPS, 2, 3]`` of that dtype, with whatever it has at its edges."""
    dtype = np.dtype(name)
    if dtype.kind == "b":
        edges: Any = [True, False]
    elif dtype.kind in "iu":
        edges = [np.iinfo(dtype).min, np.iinfo(dtype).max, 1]
    else:
        info = np.finfo(dtype)
        edges = [np.nan, np.inf, -np.inf, -0.0, info.max, info.smallest_subnormal, info.eps]
        if dtype.kind == "c":
            edges = [complex(a, b) for a, b in zip(edges, reversed(edges), strict=True)]
    return np.resize(np.array(edges, dtype), (STEPS, 2, 3))


def test_c27_every_dtype_comes_back_with_the_same_shape_and_bytes() -> None:
    """C27: special values included, over both data paths, and no larger on the way than it is."""
    fields = tuple(FieldSpec(("obs", name), name, (2, 3)) for name in SCALARS)
    episode = marked_episode(1, STEPS, fields)
    wanted = {name: special(name) for name in SCALARS}
    arrays = {**episode.arrays, **{("obs", name): value for name, value in wanted.items()}}
    cfg = OnlineDataEngineCfg(buffer_size=1, max_episode_steps=STEPS, refill_policy="manual")
    with run_broker(cfg) as broker, RawWorker(broker.endpoint, fields=fields) as worker:
        ticket = worker.next_ticket(30.0)
        assert ticket is not None
        worker.hand_in(ticket.ticket_id, dataclasses.replace(episode, arrays=arrays))
        for path in PATHS:
            with Client(broker.endpoint, data_path=path) as client:
                client.wait_ready()
                batch = client.sample_batch(2, STEPS)
            for name, value in wanted.items():
                found = batch["obs", name].numpy()
                assert (found.dtype, found.shape) == (value.dtype, (2, STEPS, 2, 3))
                assert found[0].tobytes() == found[1].tobytes() == value.tobytes(), name
                assert batch["obs", name].is_contiguous()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float128", "object", ">f4", "<M8[s]"])
def test_c27_a_dtype_that_not_everyone_has_is_refused_with_the_fields_name(dtype: str) -> None:
    """C27: a worker that announces it is turned away, and the broker serves on."""
    cfg = OnlineDataEngineCfg(buffer_size=1, max_episode_steps=STEPS, refill_policy="manual")
    fields = (FieldSpec(("obs", "odd"), dtype, (2,)),)
    with run_broker(cfg) as broker, RawConsumer(broker.endpoint) as consumer:
        with RawWorker(broker.endpoint, "odd", fields=fields, hello=False) as odd:
            odd.hello()
            until(lambda: status(consumer).malformed_messages or "obs/odd" in status(consumer).last_failure)
        with RawWorker(broker.endpoint) as worker, Client(broker.endpoint) as client:
            worker.work(1, length=2)
            client.wait_ready()
            assert client.sample_batch(2, 2)["obs", "state"].shape == (2, 2, 3)


def status(consumer: RawConsumer) -> Any:
    return consumer.ask(GetStatus())


LAYOUTS = {
    "channels first": ((3, 4, 6), lambda a: np.moveaxis(a.reshape(4, 6, 3), 2, 0)),
    "every second": ((36,), lambda a: a[::2]),
    "upside down": ((9, 8), lambda a: a.reshape(9, 8)[::-1]),
    "expanded": ((5, 72), lambda a: np.broadcast_to(a, (5, 72))),
    "big-endian": ((72,), lambda a: a.astype(">f4")),
    "read-only": ((72,), lambda a: np.frombuffer(a.tobytes(), np.float32)),
    "tensor": ((8, 9), lambda a: torch.from_numpy(a.copy()).reshape(9, 8).T),
    "expanded tensor": ((2, 72), lambda a: torch.from_numpy(a.copy()).expand(2, 72)),
}


class Layouts(gym.Env[Any, Any]):
    """Shows the same numbers in memory of every layout; or one value that is ``odd``."""

    def __init__(self, odd: str | None = None) -> None:
        self.odd = odd
        shapes = {name: shape for name, (shape, _) in LAYOUTS.items()} if odd is None else {"odd": (4,)}
        self.observation_space = spaces.Dict(
            {name: spaces.Box(-1e6, 1e6, shape, np.float32) for name, shape in shapes.items()}
        )
        self.action_space = spaces.Box(-1, 1, (2, 3), np.float32)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.shown(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.shown(), np.float64(0.5), False, False, {}

    def shown(self) -> Any:
        if self.odd is not None:
            return {"odd": ODD[self.odd]() if self.steps == 1 else np.zeros(4, np.float32)}
        return {name: made(numbers(self.steps)) for name, (_, made) in LAYOUTS.items()}

    def create_demo_action_list(self) -> list[Any]:
        return [torch.arange(6.0).reshape(3, 2).T / 8 for _ in range(STEPS - 1)]


def numbers(step: int) -> Any:
    return np.arange(72, dtype=np.float32) + 100 * step


ODD = {
    "bfloat16": lambda: torch.zeros(4, dtype=torch.bfloat16),
    "float8_e4m3fn": lambda: torch.zeros(4).to(torch.float8_e4m3fn),
    "float8_e5m2": lambda: torch.zeros(4).to(torch.float8_e5m2),
    "requires grad": lambda: torch.zeros(4, requires_grad=True),
    "conjugate": lambda: torch.zeros(4, dtype=torch.complex64).conj(),
    "complex": lambda: np.zeros(4, np.complex64),
    "float64": lambda: np.full(4, 1 / 3),
    "ragged": lambda: [[1.0], [1.0, 2.0]],
    "sparse": lambda: torch.zeros(4).to_sparse(),
    "nothing": lambda: None,
}


@pytest.fixture(autouse=True)
def _registered() -> Any:
    gym.register("ods_tests/Layouts-v0", entry_point=Layouts)
    yield
    del gym.registry["ods_tests/Layouts-v0"]


async def test_c27_memory_of_every_layout_is_recorded_value_by_value() -> None:
    """C27: transposed, strided, flipped, expanded, foreign byte order, tensors; actions too."""
    cfg = config("ods_tests/Layouts-v0")
    with run_broker(cfg) as broker:
        async with Worker(cfg, broker.endpoint, max_rollouts=1) as worker:
            await worker.wait(60.0)
        for path in PATHS:
            with Client(broker.endpoint, data_path=path) as client:
                client.wait_ready()
                batch = client.sample_batch(2, STEPS - 1)
            for name, (shape, made) in LAYOUTS.items():
                found = batch["obs", name]
                assert (found.dtype, found.shape) == (torch.float32, (2, STEPS - 1, *shape))
                wanted = np.stack([np.asarray(made(numbers(step)), np.float32) for step in range(STEPS - 1)])
                assert (found.numpy() == wanted).all(), name
            assert torch.equal(batch["actions"][1, 2], torch.arange(6.0).reshape(3, 2).T / 8)


@pytest.mark.parametrize("odd", ODD)
async def test_c27_a_value_that_is_no_array_of_its_field_is_refused_with_the_fields_name(odd: str) -> None:
    """C27: bfloat16, float8, gradients, conjugates: by the worker, told to everyone; nothing is stored."""
    cfg = config("ods_tests/Layouts-v0", kwargs={"odd": odd})
    with run_broker(cfg) as broker, Client(broker.endpoint) as client:
        with pytest.raises(SchemaMismatchError, match=r"obs/odd: expected float32 \[4\].*found") as caught:
            async with Worker(cfg, broker.endpoint, max_rollouts=1) as worker:
                await worker.wait(60.0)
        assert caught.value.field == "obs/odd"
        await asyncio.to_thread(until, lambda: "obs/odd: expected float32 [4]" in client.get_status()["last_failure"])
        assert client.get_stats()["successful_episodes"] == 0


@pytest.mark.parametrize(("vectorization", "num_envs"), [("loop", 1), ("loop", 2), ("sync", 2), ("async", 2)])
async def test_c29_spaces_that_can_be_stored_round_trip_single_and_as_a_vector(
    vectorization: str, num_envs: int
) -> None:
    """C29: Dict, Tuple, Discrete, MultiBinary, MultiDiscrete, nested, each with its documented path, dtype, shape."""
    cfg = config(SPACES_ID, num_envs, imports=[MODULE], vectorization=vectorization)
    with run_broker(cfg) as broker:
        async with Worker(cfg, broker.endpoint, policy=plan, max_rollouts=1) as worker:
            await worker.wait(90.0)
        with Client(broker.endpoint) as client:
            client.wait_ready()
            batch = client.sample_batch(20, STEPS)
    assert len(batch["obs", "seed"].unique()) == num_envs
    for window in batch[:4]:
        for step, sample in enumerate(samples_of(int(window["obs", "seed"][0]), STEPS)):
            shown = window[step]["obs"]
            assert torch.equal(shown["switches"], torch.from_numpy(sample["switches"]))
            assert torch.equal(shown["choices"], torch.from_numpy(sample["choices"]))
            assert (shown["choice"].dtype, shown["choice"].shape) == (torch.int64, ())
            assert (int(shown["choice"]), int(shown["pair", "0"])) == (sample["choice"], sample["pair"][0])
            assert torch.equal(shown["pair", "1", "in"], torch.from_numpy(sample["pair"][1]["in"]))
            assert torch.equal(shown["a", "b"], torch.from_numpy(sample["a"]["b"]))
            assert int(shown["a.b"]) == sample["a.b"]


def plan(view: Any) -> Any:
    return [{"arm": [0.5, 0.25, -0.5], "grip": step % 2} for step in range(STEPS)]


@pytest.mark.parametrize(("vectorization", "num_envs"), [("loop", 1), ("loop", 2), ("sync", 2), ("async", 2)])
@pytest.mark.parametrize("refuse", ["text", "sequence", "graph", "oneof"])
async def test_c29_a_space_that_cannot_be_stored_is_refused_by_path_before_anything_is_simulated(
    refuse: str, vectorization: str, num_envs: int
) -> None:
    """C29: Text, Sequence, Graph, OneOf; the broker and everyone who looks is told, too."""
    gym_config = {"imports": [MODULE], "vectorization": vectorization, "kwargs": {"refuse": refuse}}
    cfg = config(SPACES_ID, num_envs, **gym_config)
    worker = None
    with run_broker(cfg) as broker, Client(broker.endpoint) as client:
        with pytest.raises(SchemaMismatchError, match=rf"obs/outer/deep/1: the space (?i:{refuse})") as caught:
            async with Worker(cfg, broker.endpoint, policy=plan) as worker:
                await worker.wait(60.0)
        assert caught.value.field == "obs/outer/deep/1"
        assert worker is not None
        assert worker.rollouts == 0
        await asyncio.to_thread(until, lambda: "obs/outer/deep/1" in client.get_status()["last_failure"])
        assert "failed in make" in client.get_status()["last_failure"]
