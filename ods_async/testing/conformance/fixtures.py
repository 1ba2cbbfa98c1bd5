"""The suite's services (one per configuration, shared by all tests of a folder) and the ways into them.

For a ``conftest.py``: ``from ods_async.testing.conformance.fixtures import *``. Needs ``pytest``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ods_async.testing.conformance.checks import varied
from ods_async.testing.conformance.environments import MODULE, SPACES_ID
from ods_async.testing.conformance.ways import ENGINE_WAYS, WAYS, LoopThread, Service, Way

__all__ = [
    "budgeted",
    "budgeted_service",
    "continuous",
    "continuous_service",
    "engine_way",
    "logged",
    "logged_service",
    "loop",
    "plain",
    "plain_service",
    "spaced",
    "spaced_service",
    "threshold",
    "threshold_service",
    "way_in",
]

Services = Iterator[Service]


@pytest.fixture(scope="package")
def loop() -> Iterator[LoopThread]:
    """Where the asyncio ways run."""
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(params=WAYS)
def way_in(request: pytest.FixtureRequest) -> str:
    """The name of a way in."""
    return str(request.param)


@pytest.fixture(params=ENGINE_WAYS)
def engine_way(request: pytest.FixtureRequest) -> str:
    """The name of an owner's way in."""
    return str(request.param)


@pytest.fixture(scope="package")
def plain_service(loop: LoopThread) -> Services:
    """Rollouts of two episodes, provenance, refills by hand; every fifth attempt fails."""
    with Service(varied(buffer_size=6, num_envs=2, env={"fail_every": 5}), loop) as service:
        yield service


@pytest.fixture
def plain(plain_service: Service, way_in: str) -> Iterator[Way]:
    """A way into that service."""
    with plain_service.open(way_in) as way:
        yield way


@pytest.fixture(scope="package")
def budgeted_service(loop: LoopThread) -> Services:
    """Every episode may be delivered 7 windows."""
    cfg = varied(buffer_size=5, episode_sample_budget=7, episode_sample_hard_limit=9)
    with Service(cfg, loop) as service:
        yield service


@pytest.fixture
def budgeted(budgeted_service: Service, way_in: str) -> Iterator[Way]:
    """A way into that service, with nothing spent yet."""
    owner = budgeted_service.owner_of(way_in)
    owner.wait_for_generation(owner.request_refill())
    with budgeted_service.open(way_in) as way:
        yield way


@pytest.fixture(scope="package")
def logged_service(loop: LoopThread) -> Services:
    """The owner's log holds 12 records: a generation's 8, and half of the next."""
    with Service(varied(buffer_size=4, lifecycle_event_capacity=12), loop) as service:
        yield service


@pytest.fixture
def logged(logged_service: Service, way_in: str) -> Iterator[Way]:
    """A way into that service, its log drained and nothing outstanding, before and after."""
    owner = logged_service.owner_of(way_in)
    settle = _settler(owner)
    settle()
    with logged_service.open(way_in) as way:
        yield way
    settle()


def _settler(owner: Way) -> Callable[[], None]:
    def settle() -> None:
        owner.drain_lifecycle_events()
        owner.wait_for_generation(owner.get_stats()["requested_generation"])
        owner.drain_lifecycle_events()

    return settle


@pytest.fixture(scope="package")
def threshold_service(loop: LoopThread) -> Services:
    """A refill after every 4 * 5 windows."""
    with Service(varied(refill_policy="sample_threshold", refill_threshold=5), loop) as service:
        yield service


@pytest.fixture
def threshold(threshold_service: Service, way_in: str) -> Iterator[Way]:
    """A way into that service, no refill outstanding."""
    owner = threshold_service.owner_of(way_in)
    owner.wait_for_generation(owner.get_stats()["requested_generation"])
    with threshold_service.open(way_in) as way:
        yield way


@pytest.fixture(scope="package")
def continuous_service(loop: LoopThread) -> Services:
    """Rollouts all the time, 3 windows to each episode."""
    with Service(varied(refill_policy="continuous", samples_per_insert=3.0), loop) as service:
        yield service


@pytest.fixture
def continuous(continuous_service: Service, way_in: str) -> Iterator[Way]:
    """A way into that service."""
    with continuous_service.open(way_in) as way:
        yield way


@pytest.fixture(scope="package")
def spaced_service(loop: LoopThread) -> Services:
    """Spaces of every kind that can be stored, segments that are never accepted, and no provenance."""
    gym = {"id": SPACES_ID, "imports": [MODULE]}
    cfg = varied(buffer_size=2, max_episode_steps=9, gym_config=gym, include_provenance=False)
    with Service(cfg, loop) as service:
        yield service


@pytest.fixture
def spaced(spaced_service: Service, way_in: str) -> Iterator[Way]:
    """A way into that service."""
    with spaced_service.open(way_in) as way:
        yield way
