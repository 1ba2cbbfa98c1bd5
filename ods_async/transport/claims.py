"""The right to listen on an ipc path: one live process has it, and a dead one's is taken over.

zmq would take a live broker's path away without a word, and remove the file some time after a socket was closed, when
it may be somebody else's. So a locked file lies beside each path, and zmq only ever sees a *passage*: a name of its own
that is moved to the real path once the socket listens.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Final

from ods_async.errors import EndpointError, EndpointInUseError
from ods_async.transport.endpoint import Endpoint

__all__ = ["IpcClaim", "claim_ipc", "release_claims", "sweep_ipc", "sweep_private"]

# An engine's own address: nobody else ever asks for the same one again, so that nobody would replace its files either.
_PRIVATE: Final = re.compile(r".+-[0-9a-f]{12}\.sock(\.[a-z]+)?\.lock")


class IpcClaim:
    """A claim that holds until :meth:`release`, or until its process dies (the kernel unlocks the file then).

    Attributes:
        path: where clients find the socket.
        passage: where to bind it first: in a folder that is open to this user only, whatever the umask, since between
            its binding and its chmod a socket has the rights that the umask leaves.
    """

    def __init__(self, path: str, descriptor: int) -> None:
        self.path = path
        self._folder = _private_folder(Path(path).parent)
        self.passage = str(self._folder / "s")
        self._descriptor = descriptor
        self._pid = os.getpid()
        self._published = False
        _CLAIMS.add(self)

    def publish(self) -> None:
        """Move the bound socket to its real path, for this user only; a dead owner's file there is replaced."""
        os.chmod(self.passage, 0o600)  # noqa: PTH101
        os.replace(self.passage, self.path)  # noqa: PTH105
        self._published = True
        self._folder.rmdir()

    def release(self) -> None:
        """Give the path up and remove its files. Again, or in a forked child: no effect on the owner's."""
        if self._descriptor < 0:
            return
        descriptor, self._descriptor = self._descriptor, -1
        _CLAIMS.discard(self)
        if self._pid == os.getpid():
            for path in (self.path, _lock_path(self.path)) if self._published else (_lock_path(self.path),):
                with contextlib.suppress(OSError):
                    Path(path).unlink()
            if not self._published:
                with contextlib.suppress(OSError):
                    Path(self.passage).unlink(missing_ok=True)
                    self._folder.rmdir()
        os.close(descriptor)


_CLAIMS: set[IpcClaim] = set()


def release_claims() -> None:
    """Release every claim of this process, for when it is about to be cut short."""
    for claim in tuple(_CLAIMS):
        claim.release()


def sweep_ipc(endpoint: Endpoint) -> bool:
    """Remove the files that a dead broker left at ``endpoint``; a live one's stay. Whether the path is free now."""
    try:
        claim = claim_ipc(endpoint)
    except EndpointError:
        return False
    with contextlib.suppress(OSError):
        Path(claim.path).unlink()
    claim.release()
    return True


def _after_fork_in_child() -> None:
    # An inherited descriptor would hold the lock beyond its owner's death.
    for claim in _CLAIMS:
        os.close(claim._descriptor)
        claim._descriptor = -1
    _CLAIMS.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _private_folder(parent: Path) -> Path:
    # As short as can be: a path that is just short enough for a socket must stay so.
    while True:
        folder = parent / f".{secrets.token_urlsafe(3)}"
        try:
            folder.mkdir(0o700)
        except FileExistsError:
            continue
        return folder


def _lock_path(path: str) -> str:
    return f"{path}.lock"


def claim_ipc(endpoint: Endpoint) -> IpcClaim:
    """Claim an ipc path before binding it.

    Raises:
        EndpointError: a live process has it, the folder is missing, or something else than a socket lies there.
    """
    path, lock = endpoint.path, _lock_path(endpoint.path)
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise _refused(
                endpoint,
                f"cannot listen on {endpoint}: {(error.strerror or '').lower()}; the folder {Path(path).parent} must "
                "exist and be yours to write in",
                "an existing folder to write in",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(descriptor)
            raise EndpointInUseError(
                f"another broker (process {owner}) is listening on {endpoint}; stop it or choose another endpoint",
                argument="endpoint",
                value=str(endpoint),
                rule="one broker an endpoint",
            ) from None
        # The file may have been removed by its last owner between open and lock: then the lock is on nothing.
        with contextlib.suppress(OSError):
            here, there = os.fstat(descriptor), os.stat(lock)  # noqa: PTH116
            if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
                break
        os.close(descriptor)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    claim = IpcClaim(path, descriptor)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            claim.release()
            raise _refused(
                endpoint,
                f"cannot listen on {endpoint}: something that is not a socket lies at that path; remove it or choose "
                "another endpoint",
                "a path that is free or holds a dead broker's socket",
            )
    return claim


def sweep_private(folder: str | Path) -> list[str]:
    """Remove the sockets of engines that were killed together with their broker, and nothing else.

    Only names that an engine made up for itself count, and only where no live process holds the lock.

    Returns:
        The paths of the sockets removed.
    """
    removed = []
    for lock in Path(folder).glob("*.lock"):
        if not _PRIVATE.fullmatch(lock.name):
            continue
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A lock without a number is one that is being taken at this moment.
            if os.pread(descriptor, 1, 0):
                path = lock.with_suffix("")
                for file in (path, lock):
                    file.unlink(missing_ok=True)
                removed.append(str(path))
        except OSError:
            pass
        finally:
            os.close(descriptor)
    return removed


def _refused(endpoint: Endpoint, message: str, rule: str) -> EndpointError:
    return EndpointError(message, argument="endpoint", value=str(endpoint), rule=rule)
