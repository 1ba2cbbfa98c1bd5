"""What importing the package costs and needs, in fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ods_async.supervise.children import import_path

# Every distribution of the optional dependencies in pyproject.toml, by the names they are imported under.
EXTRAS = ("yaml", "metaworld", "mujoco", "hypothesis", "importlinter", "mypy", "psutil", "pytest", "ruff", "scipy")
BLOCK = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {EXTRAS!r}:
            raise ImportError(f"{{name}} is an extra")
sys.meta_path.insert(0, Blocked())
"""
TORCH = "import torch, tensordict"
PACKAGE = "import ods_async"
EVERYTHING = "import ods_async as ods; [getattr(ods, name) for name in ods.__all__]"


def run(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": import_path()}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def seconds(code: str) -> float:
    return float(run(f"import time; before = time.perf_counter()\n{code}\nprint(time.perf_counter() - before)"))


@pytest.mark.parametrize("code", [PACKAGE, EVERYTHING], ids=["the package", "every public name"])
def test_importing_takes_no_longer_than_torch_and_tensordict_and_a_third_of_a_second(code: str) -> None:
    """The quickest of a few turns of each, one after the other: other programs share the machine."""
    ours, theirs = [], []
    for _ in range(4):
        theirs.append(seconds(TORCH))
        ours.append(seconds(code))
        if min(ours) <= min(theirs) + 0.3:
            return
    assert min(ours) <= min(theirs) + 0.3, f"{ours} for {code!r}, {theirs} for {TORCH!r}"


def test_no_public_name_and_no_first_try_needs_an_extra() -> None:
    """All names, the counting environment, an engine with its processes, a batch, its words."""
    code = f"""
{BLOCK}
{EVERYTHING}
import ods_async.cli.main
cfg = ods.OnlineDataEngineCfg(
    buffer_size=2, max_episode_steps=9, gym_config={{"id": "ods_async/Counting-v0", "kwargs": {{"max_length": 7}}}}
)
with ods.OnlineDataEngine(cfg) as engine:
    batch = engine.sample_batch(3, 2)
    print(engine.resolve_language(batch)["task"][0][0])
print([name for name in sys.modules if name.partition(".")[0] in {EXTRAS!r}])
"""
    assert run(code).splitlines() == ["count to the end", "[]"]


def test_what_needs_an_extra_says_which() -> None:
    """A YAML file without the reader for it."""
    code = f"""
{BLOCK}
import pathlib, tempfile, ods_async as ods
with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, "settings.yaml")
    path.write_text("buffer_size: 3")
    try:
        ods.OnlineDataEngineCfg.from_file(path)
    except Exception as error:
        print(type(error).__name__, error)
"""
    said = run(code)
    assert "ods-async[yaml]" in said or "pip install pyyaml" in said.lower(), said


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
