"""The public names: what they are, that each is there, and what importing them costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ods_async
from ods_async import errors

CLASSES_AND_FUNCTIONS = {
    "AsyncClient",
    "AsyncOnlineDataEngine",
    "Broker",
    "ChunkSizeSampler",
    "Client",
    "CurveKeys",
    "DemoEpisodeResult",
    "DemoSegment",
    "EventSubscriber",
    "EventsLost",
    "GMMChunkSampler",
    "OnlineDataEngine",
    "OnlineDataEngineCfg",
    "OnlineDataEngineState",
    "OnlineDataset",
    "SharedLanguageRegistry",
    "UniformChunkSampler",
    "Worker",
    "execute_demo_episode",
    "keep_big_blocks",
    "register_error",
}


def loaded(code: str) -> set[str]:
    """The modules that ``code`` has loaded, in a fresh interpreter."""
    script = f"{code}\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_public_names_are_pinned() -> None:
    public_errors = {name for name in errors.__all__ if name[0].isupper()}
    assert set(ods_async.__all__) == CLASSES_AND_FUNCTIONS | public_errors | {"__version__"}
    assert sorted(set(ods_async.__all__)) == sorted(ods_async.__all__)


@pytest.mark.parametrize("name", ods_async.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(ods_async, name) is not None
    assert name in dir(ods_async)


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Engine'"):
        _ = ods_async.Engine


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(ods_async.__file__).read_text())
    guarded = next(node for node in tree.body if isinstance(node, ast.If))
    imported = {alias.name for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == set(ods_async.__all__) - {"__version__"}


def test_importing_the_package_loads_none_of_the_heavy_ones() -> None:
    heavy = {"torch", "tensordict", "numpy", "zmq", "gymnasium", "msgpack", "asyncio"}
    assert not heavy & loaded("import ods_async")


@pytest.mark.parametrize(
    "code",
    [
        "import ods_async.broker.service, ods_async.supervise.child",
        "import ods_async.worker.runtime, ods_async.worker.demonstration, ods_async.worker.environments",
        "import ods_async.supervise.owner, ods_async.cli.main, ods_async.cli.up, ods_async.cli.ask",
        "import ods_async.cli.events, ods_async.cli.services",
        "import ods_async; ods_async.OnlineDataEngineCfg, ods_async.EventSubscriber, ods_async.Broker",
    ],
)
def test_services_and_watchers_never_load_torch(code: str) -> None:
    assert not {"torch", "tensordict"} & loaded(code)
