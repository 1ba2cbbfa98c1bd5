"""The segment: who owns it, who may see it, and what happens when its owner is killed (C32, C39, C40)."""

from __future__ import annotations

import gc
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ods_async.errors import SharedMemoryError
from ods_async.transport import shm
from ods_async.transport.shm import anonymous, attach_segment, create_segment, start_time, sweep_segments

TOKEN = bytes(range(32))
SIZE = 70_001

OWNER = """
import sys
from ods_async.transport.shm import create_segment
segment = create_segment(70_001, 7, bytes(range(32)))
segment.buffer[4096:4100] = b"data"
print(segment.path, flush=True)
sys.stdin.read()
segment.close()
"""


@contextmanager
def owner(program: str = OWNER) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            path = process.stdout.readline().strip()
            assert path
            yield process, path
        finally:
            process.kill()
            process.wait()
            sweep_segments()


def test_another_process_sees_what_the_owner_writes() -> None:
    with owner() as (process, path), attach_segment(path, SIZE, TOKEN) as seen:
        assert bytes(seen.buffer[4096:4100]) == b"data"
        assert seen.buffer.readonly
        assert len(seen.buffer) == SIZE
        assert stat.S_IMODE(Path(path).stat().st_mode) == 0o600
        process.communicate("")
        assert not Path(path).exists(), "the owner removes it"
        assert bytes(seen.buffer[4096:4100]) == b"data"


def test_a_reader_that_exits_does_not_remove_it() -> None:
    """Mapped directly: Python's own SharedMemory would unlink it at the reader's exit."""
    with create_segment(SIZE, 1, TOKEN) as segment:
        reader = (
            "import sys; from ods_async.transport.shm import attach_segment; "
            "attach_segment(sys.argv[1], 70_001, bytes(range(32)))"
        )
        subprocess.run([sys.executable, "-c", reader, segment.path or ""], check=True)
        assert Path(segment.path or "").exists()


def test_killed_owners_leave_at_most_one_segment() -> None:
    """C32: ten times SIGKILL; total use stays at one buffer."""
    paths = []
    for _ in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            paths.append(process.stdout.readline().strip())
            assert not any(Path(path).exists() for path in paths[:-1]), "the next start removes it"
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert Path(paths[-1]).exists()
    with create_segment(SIZE, 1, TOKEN):
        assert not any(Path(path).exists() for path in paths)


def test_live_owners_segments_are_never_removed() -> None:
    """C32: another live broker's, and one's own."""
    with owner() as (_, path), create_segment(SIZE, 1, TOKEN) as mine:
        assert sweep_segments() == []
        assert Path(path).exists()
        assert Path(mine.path or "").exists()


def test_a_live_owner_whose_process_number_means_nothing_here_keeps_its_segment() -> None:
    """C32, C39: a broker in another container that shares /dev/shm is alive under a number of its own."""
    program = OWNER.replace(
        "from ods_async.transport.shm import create_segment",
        "import os; from ods_async.transport import shm; from ods_async.transport.shm import create_segment\n"
        "real = os.getpid; os.getpid = lambda: 4_194_303; shm.start_time = lambda pid: 5",
    )
    with owner(program) as (process, path):
        assert start_time(4_194_303) == -1
        assert "-4194303-5-" in path
        assert sweep_segments() == []
        assert Path(path).exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert path in sweep_segments()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of other users")
def test_foreign_and_unrelated_files_are_left_alone() -> None:
    dead = f"ods-{os.getuid()}-4194303-5-1-abcdef"
    foreign, unrelated, link = shm.FOLDER / f"{dead}01", shm.FOLDER / "ods-notes", shm.FOLDER / f"{dead}02"
    named_foreign = shm.FOLDER / "ods-12345-4194303-5-1-abcdef03"
    target = shm.FOLDER / "odstarget"
    try:
        for path in (foreign, unrelated, named_foreign, target):
            path.write_bytes(b"x")
        os.chown(foreign, 12345, 12345)
        link.symlink_to(target)
        removed = set(sweep_segments())
        assert not removed & {str(path) for path in (foreign, unrelated, named_foreign, link, target)}
        assert all(path.exists() for path in (foreign, unrelated, named_foreign, target, link))
    finally:
        for path in (foreign, unrelated, named_foreign, link, target):
            path.unlink(missing_ok=True)


def test_too_little_room_is_found_at_once_with_sizes_and_remedy() -> None:
    """C32: never a bus error, and nothing is left."""
    status = os.statvfs(shm.FOLDER)
    needed = status.f_blocks * status.f_frsize + 4096
    before = set(shm.FOLDER.iterdir())
    with pytest.raises(SharedMemoryError, match="shm_size") as caught:
        create_segment(needed, 1, TOKEN)
    assert f"{needed:,} bytes" in str(caught.value)
    assert caught.value.needed_bytes == needed
    assert 0 < caught.value.free_bytes <= needed
    mine = f"ods-{os.getuid()}-{os.getpid()}-"
    assert not [path for path in set(shm.FOLDER.iterdir()) - before if path.name.startswith(mine)]


def test_no_shared_memory_at_all_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shm, "FOLDER", tmp_path / "none")
    with pytest.raises(SharedMemoryError, match="shared_memory='off'"):
        create_segment(SIZE, 1, TOKEN)


@pytest.mark.parametrize("case", ["missing", "foreign token", "other size", "elsewhere", "symlink", "climbing"])
def test_memory_that_is_not_the_brokers_is_refused(case: str, tmp_path: Path) -> None:
    """C39: identity is proven by content, not by name."""
    with create_segment(SIZE, 1, TOKEN) as segment:
        path, size, token = segment.path or "", SIZE, TOKEN
        if case == "missing":
            path = path[:-1] + ("0" if path[-1] != "0" else "1")
        elif case == "foreign token":
            token = bytes(32)
        elif case == "other size":
            size = SIZE + 1
        elif case == "elsewhere":
            copy = tmp_path / Path(path).name
            copy.write_bytes(bytes(segment.buffer))
            path = str(copy)
        elif case == "symlink":
            link = Path(path[:-1] + ("0" if path[-1] != "0" else "1"))
            link.symlink_to(path)
            path = str(link)
        else:
            path = f"/dev/shm/../shm/{Path(path).name}"
        with pytest.raises(SharedMemoryError, match="frames") as caught:
            attach_segment(path, size, token)
        assert caught.value.path == path
        if case == "symlink":
            link.unlink()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_unreadable_memory_is_refused() -> None:
    """C39: another user without permission."""
    with create_segment(SIZE, 1, TOKEN) as segment:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.setgid(12345)
                os.setuid(12345)
                attach_segment(segment.path or "", SIZE, TOKEN)
            except SharedMemoryError as error:
                code = 0 if "ermission" in str(error) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_closing_with_live_views_is_silent_and_they_stay_readable() -> None:
    """C40."""
    segment = create_segment(SIZE, 1, TOKEN)
    seen = attach_segment(segment.path or "", SIZE, TOKEN)
    written = np.frombuffer(segment.buffer, np.uint8)
    written[5000:5003] = (1, 2, 3)
    read = np.frombuffer(seen.buffer, np.uint8)[5000:5003]
    seen.close()
    seen.close()
    segment.close()
    segment.close()
    gc.collect()
    assert read.tolist() == [1, 2, 3]
    assert written[5001] == 2
    for closed in (seen, segment):
        assert closed.closed
        with pytest.raises(SharedMemoryError, match="closed"):
            _ = closed.buffer


def test_the_original_error_is_the_one_seen() -> None:
    """C40: an error inside the block while arrays look into the memory."""

    def fail() -> None:
        with create_segment(SIZE, 1, TOKEN) as segment:
            view = np.frombuffer(segment.buffer, np.uint8)
            raise KeyError(f"mine {view[0]}")

    with pytest.raises(KeyError, match="mine"):
        fail()


def test_views_alive_at_the_interpreters_end_make_no_noise() -> None:
    """C40."""
    program = (
        "import numpy as np; from ods_async.transport.shm import create_segment, attach_segment\n"
        "s = create_segment(70_001, 1, bytes(32)); a = attach_segment(s.path, 70_001, bytes(32))\n"
        "w = np.frombuffer(s.buffer, 'u1'); r = np.frombuffer(a.buffer, 'u1'); a.close(); s.close()\n"
    )
    run = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_a_forked_child_neither_removes_nor_holds_the_parents_segment() -> None:
    """C41."""
    segment = create_segment(SIZE, 1, TOKEN)
    pid = os.fork()
    if pid == 0:
        segment.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert Path(segment.path or "").exists()
    assert sweep_segments() == []
    segment.close()
    assert not Path(segment.path or "").exists()


def test_private_memory_has_the_same_form() -> None:
    with anonymous(SIZE, TOKEN) as memory:
        assert memory.path is None
        assert len(memory.buffer) == SIZE
        assert bytes(memory.buffer[16:48]) == TOKEN
        memory.buffer[4096] = 9


def test_a_token_has_its_size() -> None:
    for make in (lambda token: create_segment(SIZE, 1, token), lambda token: anonymous(SIZE, token)):
        with pytest.raises(ValueError, match="32 bytes"):
            make(b"short")
