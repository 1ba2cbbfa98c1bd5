"""C39 with a consumer that sees another /dev/shm than its broker: as in two containers with one host name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ods_async import Client, OnlineDataEngineCfg
from ods_async.testing.broker import run_broker
from ods_async.testing.peers import RawWorker
from ods_async.transport.shm import FOLDER
from tests.deploy.containers import PYTHON, contained, need_namespaces

# Draws with what lies at the broker's path in this /dev/shm: nothing, a foreign file of the same size, one that may not
# be read. Tells the data path, the warnings, whether all windows are right, and what happens if memory is demanded.
CONSUMER = """
import json, logging, os, sys
import ods_async as ods
endpoint, path, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
warned = []
class Kept(logging.Handler):
    def emit(self, record):
        warned.append(record.getMessage())
logging.getLogger("ods_async").addHandler(Kept(logging.WARNING))
def draw():
    warned.clear()
    with ods.Client(endpoint, timeout=60.0) as client:
        marks = [client.sample_batch(9, 4)["obs", "mark"] for _ in range(3)]
        right = all(bool((mark.diff(dim=1) == 1).all()) for mark in marks)
        used = client.data_path
    try:
        with ods.Client(endpoint, data_path="shared_memory", timeout=60.0) as client:
            client.sample_batch(9, 4)
        refused = ""
    except ods.SharedMemoryError as error:
        refused = str(error)
    return used, warned[:], right, refused
found = {"missing": draw()}
with open(path, "wb") as file:
    file.write(os.urandom(size))
found["foreign"] = draw()
try:
    os.chmod(path, 0)
    os.setgid(12345)
    os.setuid(12345)
    found["unreadable"] = draw()
except OSError:
    pass  # only root can become another user
print("found", json.dumps(found))
"""


def test_c39_memory_that_is_missing_foreign_or_unreadable_means_frames_and_one_warning() -> None:
    """C39: the data is right every time, and who demanded shared memory hears the remedy at once."""
    need_namespaces()
    cfg = OnlineDataEngineCfg(buffer_size=4, max_episode_steps=12, refill_policy="manual")
    with run_broker(cfg) as broker, RawWorker(broker.endpoint) as worker:
        worker.work_in_background()
        with Client(broker.endpoint, data_path="shared_memory", timeout=60.0) as client:
            client.sample_batch(3, 2)
        (segment,) = FOLDER.glob(f"ods-*-{broker.run_id:x}-*")
        mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
        size = str(segment.stat().st_size)
        command = ("sh", "-c", mount, "sh", PYTHON, "-c", CONSUMER, broker.endpoint, str(segment), size)
        with contained(*command) as program:
            assert program.end(120.0)[0] == 0, program.said
    line = next(line for line in program.said.splitlines() if line.startswith("found "))
    found: dict[str, Any] = json.loads(line.removeprefix("found "))
    assert {"missing", "foreign"} <= set(found)
    words = {"missing": "No such file", "foreign": "another broker", "unreadable": "ermission"}
    for case, (used, warned, right, refused) in found.items():
        assert (used, right) == ("frames", True), case
        first = [text for text in warned if "data_path='frames'" in text]
        assert len(first) == 1, (case, warned)
        assert words[case] in first[0]
        assert words[case] in refused
        assert "demanded" in refused


@pytest.mark.parametrize("data_path", ["auto", "shared_memory"])
def test_c39_the_same_memory_is_used_without_a_word(data_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    """C39: the other way round."""
    cfg = OnlineDataEngineCfg(buffer_size=4, max_episode_steps=12, refill_policy="manual")
    with run_broker(cfg) as broker, RawWorker(broker.endpoint) as worker:
        worker.work_in_background()
        with Client(broker.endpoint, data_path=data_path, timeout=60.0) as client:
            assert (client.sample_batch(9, 4)["obs", "mark"].diff(dim=1) == 1).all()
            assert client.data_path == "shared_memory"
    assert caplog.text == ""
