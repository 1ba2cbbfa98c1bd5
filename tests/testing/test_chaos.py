from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from ods_async.testing.chaos import Chaos


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_real_processes_survive_a_short_time_of_random_faults() -> None:
    """C20, C32, C33, C42, C45: the long one is ``python -m ods_async.testing.chaos``."""
    with tempfile.TemporaryDirectory(prefix="ods-c-", dir="/tmp") as folder:
        chaos = Chaos(Path(folder), seed=4, rate=10.0, pause=0.5, longest=2.0)
        chaos.run(10.0)
        told = chaos.tell()
        assert chaos.faults == []
    assert sum(chaos.mischief.done.values()) > 3, told
    assert chaos.witness.published > 0, told
