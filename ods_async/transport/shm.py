"""The buffer's memory: a file in /dev/shm, mapped by its owner to write and by consumers to read.

The owner alone removes the file; a consumer proves that it sees the same memory by a random token in the header. A
file's name says whose it is (user, process, the process's start), so that the next start can remove what a killed owner
left, and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import stat
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

    def __init__(self, mapping: mmap.mmap, path: str | None) -> None:
        super().__init__(mapping, path, writable=True)
        self._pid = os.getpid()

    def close(self) -> None:
        """Unmap and remove the file. In a forked child only unmap: the file belongs to the parent."""
        if not self.closed and self.path is not None and self._pid == os.getpid():
            with contextlib.suppress(OSError):
                Path(self.path).unlink()
        super().close()


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
    name = f"ods-{os.getuid()}-{os.getpid()}-{start_time(os.getpid())}-{run_id & (2**64 - 1):x}-{os.urandom(6).hex()}"
    path = FOLDER / name
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise _no_room(path, nbytes, error) from error
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _no_room(path, nbytes, error) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    mapping[TOKEN_OFFSET : TOKEN_OFFSET + TOKEN_BYTES] = token
    return Segment(mapping, str(path))


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


def sweep_segments(folder: Path = FOLDER) -> list[str]:
    """Remove the segments of this user whose owner is dead; return their paths.

    A segment stays if its owner lives, belongs to another user, or if the name does not say whose it is.
    """
    removed: list[str] = []
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return removed
    for entry in entries:
        match = _NAME.fullmatch(entry.name)
        if match is None or int(match[1]) != os.getuid():
            continue
        with contextlib.suppress(OSError):
            status = entry.stat(follow_symlinks=False)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                continue
            if start_time(int(match[2])) != int(match[3]):
                os.unlink(entry.path)  # noqa: PTH108
                removed.append(entry.path)
    return removed


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
