"""C32 with brokers as programs: what killed ones leave, and a /dev/shm that is too small or filled by somebody else."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ods_async import Client
from ods_async.testing import window_faults
from ods_async.testing.peers import RawWorker
from ods_async.transport.shm import FOLDER
from tests.cli.programs import line_of, settings, started
from tests.deploy.containers import ODS, Contained, contained, need_namespaces
from tests.e2e.test_recovery import segments, until

COUNTING = {"id": "ods_async/Counting-v0", "kwargs": {"min_length": 5, "max_length": 9}}


def write(folder: Path, **changes: Any) -> str:
    values: dict[str, Any] = {"buffer_size": 4, "max_episode_steps": 12, "gym_config": COUNTING, "num_workers": 1}
    return settings(folder, **(values | changes))


@contextlib.contextmanager
def with_a_segment(folder: Path, name: str) -> Iterator[Any]:
    """A broker of that name that has made its buffer; the segments that were there when it was up, before its own."""
    folder.mkdir(exist_ok=True)
    with started("broker", write(folder, endpoint=f"ipc://{folder / name}.sock", name=name), "--json") as program:
        told = line_of(program)
        before = {path.name for path in FOLDER.glob("ods-*")}
        with RawWorker(told["endpoints"][0]):
            until(lambda: bool(segments(told["pid"])))
            yield program, told["pid"], before


def test_c32_ten_killed_brokers_leave_one_buffer_at_most_and_live_ones_keep_theirs(ipc_folder: Path) -> None:
    """C32: under the same name and under others, beside a live broker and another user's leftover."""
    foreign = FOLDER / f"ods-{os.getuid() + 4711}-4194303-5-1-abcdef03"
    foreign.write_bytes(b"x")
    try:
        if os.getuid() == 0:
            os.chown(foreign, 4711, 4711)
        with with_a_segment(ipc_folder / "live", "live") as (_, living, _):
            kept, left = segments(living), ""
            for number in range(10):
                name = "same" if number < 5 else f"other{number}"
                with with_a_segment(ipc_folder / "killed", name) as (program, pid, before):
                    assert left not in before, "a broker's start removes what the one before it left"
                    (left,) = segments(pid)
                    program.send_signal(signal.SIGKILL)
                    program.wait(10.0)
                    assert (FOLDER / left).exists()
                assert segments(living) == kept
                assert foreign.exists()
            with started("broker", write(ipc_folder, endpoint=f"ipc://{ipc_folder / 'last.sock'}"), "--json") as last:
                line_of(last)
                assert not (FOLDER / left).exists()
    finally:
        foreign.unlink()
        shutil.rmtree(ipc_folder / "killed")  # addresses that somebody may come back to


@contextlib.contextmanager
def in_a_small_tmpfs(*command: str) -> Iterator[Contained]:
    """A program whose /dev/shm has 64 MB, as in a container."""
    need_namespaces()
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    with contained("sh", "-c", mount, "sh", *ODS, *command) as program:
        yield program


LARGE = 300_000  # steps a row: 182 MiB for six rows, of which little is used


def test_c32_a_small_tmpfs_is_found_at_start_and_said_with_the_remedy(ipc_folder: Path) -> None:
    """C32: ``on`` fails the start; ``auto`` warns and serves by frames. Never a bus error, and nothing stays in it."""
    path = write(ipc_folder, max_episode_steps=LARGE, shared_memory="on", endpoint=f"ipc://{ipc_folder / 'b.sock'}")
    with in_a_small_tmpfs("up", path) as program:
        assert program.end(60.0)[0] == 1
        error = next(line for line in program.said.splitlines() if line.startswith("ods-async: error:"))
        assert "182.0 MiB" in error
        assert "64.0 MiB" in error
        assert "shm_size" in error
    path = write(ipc_folder, max_episode_steps=LARGE, endpoint=f"ipc://{ipc_folder / 'b.sock'}")
    with in_a_small_tmpfs("up", path) as program:
        program.hear("ready on")
        assert program.said.count("shm_size") == 1
        with Client(f"ipc://{ipc_folder / 'b.sock'}") as client:
            assert [found for window in client.sample_batch(4, 5) if (found := window_faults(window))] == []
            assert client.data_path == "frames"
        assert program.inside(["ls", "-A", "/dev/shm"]).stdout == ""
        program.signal(signal.SIGTERM)
        assert program.end(20.0)[0] == 0, program.said


def test_c32_a_tmpfs_that_is_filled_while_it_runs_changes_nothing(ipc_folder: Path) -> None:
    """C32: the buffer's memory was taken whole at the start, so neither writing nor reading it can fail."""
    endpoint = f"ipc://{ipc_folder / 'b.sock'}"
    path = write(ipc_folder, max_episode_steps=20_000, refill_policy="continuous", endpoint=endpoint)
    with in_a_small_tmpfs("up", path) as program:
        program.hear("ready on")
        filled = program.inside(["dd", "if=/dev/zero", "of=/dev/shm/other", "bs=1M"])
        assert "No space left" in filled.stderr
        with Client(endpoint, data_path="frames", timeout=60.0) as client:
            # Every row is written again, also those that nobody had written before.
            for _ in range(3):
                client.wait_for_generation(client.get_stats()["requested_generation"])
            assert [found for window in client.sample_batch(64, 5) if (found := window_faults(window))] == []
        drawn = program.inside([*ODS, "sample", endpoint, "-b", "9", "-c", "4", "--data-path", "shared_memory"])
        assert drawn.returncode == 0, drawn.stderr
        program.signal(signal.SIGTERM)
        assert program.end(20.0)[0] == 0, program.said
