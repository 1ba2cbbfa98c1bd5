"""The buffer's memory: a file in /dev/shm, mapped by its owner to write and by consumers to read.

The owner alone removes the file; a consumer proves that it sees the same memory by a random token in the header. The
owner keeps its file locked as long as it lives (process numbers mean nothing to another container that shares
/dev/shm), so that the next start can remove what a killed owner left, and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
import weakref
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from ods_async.errors import SharedMemoryError

__all__ = [
    "FOLDER",
    "TOKEN_BYTES",
    "TOKEN_OFFSET",
    "Attached",
    "Segment",
    "anonymous",
    "attach_segment",
    "create_segment",
    "remove_own_segments",
    "sweep_segments",
]

FOLDER: Final = Path("/dev/shm")
TOKEN_OFFSET: Final = 16
TOKEN_BYTES: Final = 32
_NAME: Final = re.compile(r"ods-(\d+)-(\d+)-(\d+)-[0-9a-f]+-[0-9a-f]+")


class _Map:
    """A mapping that is closed when asked, or, while views of it live, when the last of them is gone."""

    def __init__(self, mapping: mmap.mmap, path: str | None, *, writable: bool) -> None:
        self._mapping: mmap.mmap | None = mapping
        self._view: memoryview | None = memoryview(mapping) if writable else memoryview(mapping).toreadonly()
        self.path = path
        self.nbytes = len(mapping)

    @property
    def buffer(self) -> memoryview:
        """The whole memory as bytes.

        Raises:
            SharedMemoryError: it was closed.
        """
        if self._view is None:
            raise SharedMemoryError(f"the memory {self.path or '(private)'} is closed", path=self.path)
        return self._view

    @property
    def closed(self) -> bool:
        """True after :meth:`close`."""
        return self._view is None

    def close(self) -> None:
        """Let go of the memory. Arrays that still look into it stay valid; the last of them unmaps it. Never raises."""
        view, self._view = self._view, None
        mapping, self._mapping = self._mapping, None
        if view is not None:
            with contextlib.suppress(BufferError):
                view.release()
        if mapping is not None:
            with contextlib.suppress(BufferError):  # views are alive: the mapping goes with the last of them
                mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Segment(_Map):
    """Memory that this process owns. ``path`` is None if it is private (:func:`anonymous`)."""

    def __init__(self, mapping: mmap.mmap, path: str | None, lock: int = -1) -> None:
        super().__init__(mapping, path, writable=True)
        self._pid = os.getpid()
        self._lock = lock
        _OWNED.add(self)

    def close(self) -> None:
        """Unmap and remove the file. In a forked child only unmap: the file belongs to the parent."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            if self.path is not None and self._pid == os.getpid():
                with contextlib.suppress(OSError):
                    Path(self.path).unlink()
            os.close(lock)
        super().close()


_OWNED: weakref.WeakSet[Segment] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # An inherited descriptor would keep the file locked beyond its owner's death.
    for segment in list(_OWNED):
        if segment._lock >= 0:
            os.close(segment._lock)
            segment._lock = -1


os.register_at_fork(after_in_child=_after_fork_in_child)


class Attached(_Map):
    """Somebody else's memory, read-only."""

    def __init__(self, mapping: mmap.mmap, path: str) -> None:
        super().__init__(mapping, path, writable=False)


def create_segment(nbytes: int, run_id: int, token: bytes) -> Segment:
    """Make a segment of ``nbytes`` zeroed bytes with ``token`` at byte 16, all of its memory taken at once.

    What dead owners of the same user left is removed first.

    Args:
        nbytes: size, header included.
        run_id: becomes part of the file's name.
        token: 32 random bytes by which a consumer recognises it.

    Raises:
        SharedMemoryError: there is not enough room, or no shared memory at all; with the sizes and the remedy.
    """
    _check_token(token)
    sweep_segments()
    path, descriptor = _own_file(nbytes, run_id)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except BaseException as error:
        path.unlink(missing_ok=True)
        os.close(descriptor)
        if isinstance(error, OSError):
            raise _no_room(path, nbytes, error) from error
        raise
    mapping[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES] = token
    return Segment(mapping, str(path), descriptor)


def _own_file(nbytes: int, run_id: int) -> tuple[Path, int]:
    pid = os.getpid()
    while True:
        path = FOLDER / f"ods-{os.getuid()}-{pid}-{start_time(pid)}-{run_id & (2**64 - 1):x}-{os.urandom(6).hex()}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _no_room(path, nbytes, error) from error
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # a sweep in another container got between: it saw a new file that nobody had locked yet


def anonymous(nbytes: int, token: bytes) -> Segment:
    """Private memory of the same form, for when shared memory is off: nobody can attach it.

    Raises:
        SharedMemoryError: the kernel will not give that much.
    """
    _check_token(token)
    try:
        mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise SharedMemoryError(
            f"cannot take {_size(nbytes)} of memory for the buffer: {error.strerror}; lower buffer_size or "
            "max_episode_steps",
            path=None,
            needed_bytes=nbytes,
            free_bytes=None,
        ) from error
    mapping[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES] = token
    return Segment(mapping, None)


def attach_segment(path: str, nbytes: int, token: bytes) -> Attached:
    """Map a broker's segment to read, if it is really that one.

    Args:
        path: as the broker told it; anything but a segment's file in /dev/shm is refused.
        nbytes: its size as told; the file must have exactly that.
        token: 32 bytes that must lie at byte 16.

    Raises:
        SharedMemoryError: it is not there, not readable, or another one. The data must then come through the socket.
    """
    _check_token(token)
    found = Path(path)
    if found.parent != FOLDER or not _NAME.fullmatch(found.name):
        raise _not_it(path, nbytes, f"it is not the path of a segment in {FOLDER}")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise _not_it(path, nbytes, f"{error.strerror}") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes or nbytes < TOKEN_OFFSET + TOKEN_BYTES:
            raise _not_it(path, nbytes, f"it has {status.st_size} bytes, not {nbytes}")
        if os.pread(descriptor, TOKEN_BYTES, TOKEN_OFFSET) != token:
            raise _not_it(path, nbytes, "it holds another token: it belongs to another broker")
        return Attached(mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ), path)
    except OSError as error:
        if isinstance(error, SharedMemoryError):
            raise
        raise _not_it(path, nbytes, f"{error.strerror}") from error
    finally:
        os.close(descriptor)


def sweep_segments() -> list[str]:
    """Remove the segments of this user whose owner is dead; return their paths.

    A segment stays if its owner lives (here or in another container), if it belongs to another user, or if its name is
    not a segment's.
    """
    removed: list[str] = []
    try:
        with os.scandir(FOLDER) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return removed
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) != os.getuid() or start_time(int(match[2])) == int(match[3]):
            continue
        with contextlib.suppress(OSError):
            if _remove_if_dead(FOLDER / name):
                removed.append(str(FOLDER / name))
    return removed


def remove_own_segments() -> None:
    """Remove the files of this process's segments, for when it is about to be cut short; the memory stays mapped."""
    for segment in tuple(_OWNED):
        if segment.path is not None and segment._pid == os.getpid():
            with contextlib.suppress(OSError):
                Path(segment.path).unlink()


def _remove_if_dead(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the owner lives
        path.unlink()
        return True
    finally:
        os.close(descriptor)


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot, or -1 if there is none (a zombie is none)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return -1
    fields = text.rpartition(")")[2].split()  # the name before it may hold blanks and parentheses
    return -1 if fields[0] in ("Z", "X") else int(fields[19])


def _check_token(token: bytes) -> None:
    if len(token) != TOKEN_BYTES:
        raise ValueError(f"a token has {TOKEN_BYTES} bytes, not {len(token)}")


def _no_room(path: Path, nbytes: int, error: OSError) -> SharedMemoryError:
    free: int | None = None
    with contextlib.suppress(OSError):
        status = os.statvfs(FOLDER)
        free = status.f_bavail * status.f_frsize
    if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
        text = (
            f"the buffer needs {_size(nbytes)} of shared memory and {FOLDER} has {_size(free or 0)} free; raise its "
            "size (containers: --shm-size or shm_size), lower buffer_size or max_episode_steps, or set "
            "shared_memory='off'"
        )
    else:
        text = f"cannot make a segment in {FOLDER}: {error.strerror}; set shared_memory='off' to go without"
    return SharedMemoryError(text, path=str(path), needed_bytes=nbytes, free_bytes=free)


def _not_it(path: str, nbytes: int, why: str) -> SharedMemoryError:
    return SharedMemoryError(
        f"the broker's shared memory {path!r} cannot be used from here: {why}; run on the broker's host (containers: "
        "share /dev/shm, as the same user), or let the data come through the socket (data_path='frames')",
        path=path,
        needed_bytes=nbytes,
        free_bytes=None,
    )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB ({nbytes:,} bytes)"
