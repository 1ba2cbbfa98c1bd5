"""What importing the package costs and needs, in fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ods_async.supervise.children import import_path

# The optional dependencies of pyproject.toml, and what they bring, by the names they are imported under.
EXTRAS = (
    "yaml",
    "aiohttp",
    "prometheus_client",
    "metaworld",
    "mujoco",
    "hypothesis",
    "importlinter",
    "mypy",
    "psutil",
    "pytest",
    "ruff",
    "scipy",
)
# A module of this name is run by every interpreter, so that broker and worker processes do without extras as well.
WITHOUT_EXTRAS = f"""
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {EXTRAS!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
TORCH = "import torch, tensordict"
PACKAGE = "import ods_async"
TRAINER = "from ods_async import AsyncClient, AsyncOnlineDataEngine, Client, OnlineDataEngine, OnlineDataset"
EVERYTHING = "import ods_async as ods; [getattr(ods, name) for name in ods.__all__]"


def run(code: str, *first: Path) -> str:
    path = os.pathsep.join([*map(str, first), import_path()])
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def seconds(code: str) -> float:
    """Of the processor: other programs share the machine, and waiting for them is not the package's."""
    return float(run(f"import time; before = time.process_time()\n{code}\nprint(time.process_time() - before)"))


@pytest.mark.parametrize("code", [PACKAGE, TRAINER], ids=["the package", "what a trainer uses"])
def test_importing_takes_no_longer_than_torch_and_tensordict_and_a_third_of_a_second(code: str) -> None:
    """The quickest of a few turns of each."""
    ours, theirs = [], []
    for _ in range(4):
        theirs.append(seconds(TORCH))
        ours.append(seconds(code))
        if min(ours) <= min(theirs) + 0.3:
            return
    assert min(ours) <= min(theirs) + 0.3, f"{ours} for {code!r}, {theirs} for {TORCH!r}"


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A folder that makes every interpreter do without extras, once it comes first in PYTHONPATH."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_EXTRAS)
    return tmp_path


def test_no_public_name_and_no_first_try_needs_an_extra(bare: Path) -> None:
    """All names, the counting environment, an engine with its processes, a batch, its words."""
    code = f"""
import importlib.util, sys
{EVERYTHING}
import ods_async.cli.main
cfg = ods.OnlineDataEngineCfg(
    buffer_size=2, max_episode_steps=9, gym_config={{"id": "ods_async/Counting-v0", "kwargs": {{"max_length": 7}}}}
)
with ods.OnlineDataEngine(cfg) as engine:
    batch = engine.sample_batch(3, 2)
    print(engine.resolve_language(batch)["task"][0][0])
print([name for name in {EXTRAS!r} if importlib.util.find_spec(name)])
"""
    assert run(code, bare).splitlines() == ["count to the end", "[]"]


def test_what_needs_an_extra_says_which(bare: Path) -> None:
    """A YAML file without the reader for it; Meta-World's experts without Meta-World."""
    (bare / "settings.yaml").write_text("buffer_size: 3")
    code = f"""
import ods_async as ods
try:
    ods.OnlineDataEngineCfg.from_file({str(bare / "settings.yaml")!r})
except Exception as error:
    print(str(error).replace(chr(10), " "), *getattr(error, "__notes__", ()))
gym = {{"id": "Meta-World/MT1", "kwargs": {{"env_name": "reach-v3"}}, "policy": "ods_async.worker.metaworld:expert"}}
try:
    ods.OnlineDataEngine(ods.OnlineDataEngineCfg(gym_config=gym)).start()
except Exception as error:
    print(str(error).replace(chr(10), " "), *getattr(error, "__notes__", ()))
"""
    yaml, metaworld = run(code, bare).splitlines()[:2]
    assert "ods-async[yaml]" in yaml
    assert "ods-async[metaworld]" in metaworld


def test_services_start_without_torch() -> None:
    """Broker and worker processes, and whoever only watches, never wait for torch."""
    code = """
import sys
import ods_async as ods
[ods.Broker, ods.Worker, ods.EventSubscriber, ods.OnlineDataEngineCfg]
import ods_async.cli.main, ods_async.supervise.child, ods_async.testing
print("torch" in sys.modules, "tensordict" in sys.modules)
"""
    assert run(code).split() == ["False", "False"]
