"""The owner's token of a standing service, so that its user's commands on the same machine may steer it.

It lies in a file that only the user can read: beside the ipc socket or, for tcp, in the user's private folder under the
port's number. ``ODS_OWNER_TOKEN`` (hexadecimal) wins over the files, for other machines. A service keeps its files
locked while it lives, so that what a killed one left can be told apart, also from a container with pids of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from ods_async.errors import OwnerOnlyError
from ods_async.transport.endpoint import default_ipc, is_loopback, parse_endpoint

__all__ = ["ENVIRONMENT_NAME", "find_token", "published_token", "token_file", "withdraw_token"]

ENVIRONMENT_NAME = "ODS_OWNER_TOKEN"
_UNNAMED_BYTES = 6  # of the random part of a name that a file has until the token is in it


def token_file(endpoint: str) -> Path | None:
    """Where the token of the service at ``endpoint`` lies, or None for an address on another machine."""
    parsed = parse_endpoint(endpoint)
    if parsed.scheme == "ipc":
        return Path(f"{parsed.path}.owner")
    if not is_loopback(parsed):
        return None
    return Path(default_ipc("default").path).parent / f"tcp-{parsed.port}.owner"


@contextlib.contextmanager
def published_token(endpoints: Iterable[str], token: bytes) -> Iterator[None]:
    """Keep the token in the files of ``endpoints`` for the time of the block."""
    addresses = tuple(endpoints)
    _sweep()
    with contextlib.ExitStack() as locks:
        locks.callback(withdraw_token, addresses, token)
        for endpoint in addresses:
            path = _own_file(endpoint)
            if path is not None:
                locks.callback(os.close, _write_locked(path, token))
        yield


def withdraw_token(endpoints: Iterable[str], token: bytes) -> None:
    """Remove the files of ``endpoints`` that hold ``token``; those of a successor stay. Never raises."""
    for endpoint in endpoints:
        with contextlib.suppress(OSError, IndexError, ValueError):
            path = _own_file(endpoint)
            if path is not None and path.read_text().split()[0] == token.hex():
                path.unlink()


def _own_file(endpoint: str) -> Path | None:
    parsed = parse_endpoint(endpoint)
    return token_file(endpoint if parsed.scheme == "ipc" else f"tcp://127.0.0.1:{parsed.port}")


def _write_locked(path: Path, token: bytes) -> int:
    """Put the token at ``path``, locked from before it has that name, and return the descriptor that holds the lock."""
    for left in path.parent.glob(f"{path.name}.{'[0-9a-f]' * 2 * _UNNAMED_BYTES}"):
        _remove_dead(left)
    unnamed = path.with_name(f"{path.name}.{secrets.token_hex(_UNNAMED_BYTES)}")
    descriptor = os.open(unnamed, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, f"{token.hex()}\n".encode())
        unnamed.replace(path)
    except BaseException:
        unnamed.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    return descriptor


def find_token(endpoint: str, operation: str) -> bytes:
    """The token for the service at ``endpoint``.

    Raises:
        OwnerOnlyError: there is none to be found, or it is not private; says where it was looked for.
    """
    given = os.environ.get(ENVIRONMENT_NAME)
    if given is not None:
        try:
            return bytes.fromhex(given.strip())
        except ValueError:
            raise _refused(operation, f"{ENVIRONMENT_NAME} is not hexadecimal") from None
    path = token_file(endpoint)
    if path is None:
        raise _refused(operation, f"{endpoint} is another machine and {ENVIRONMENT_NAME} is not set")
    try:
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise _refused(operation, f"{path} is not a private file of this user")
        return bytes.fromhex(path.read_text().split()[0])
    except OSError:
        raise _refused(operation, f"{ENVIRONMENT_NAME} is not set and {path} is not there") from None
    except (ValueError, IndexError):
        raise _refused(operation, f"{path} does not hold a token") from None


def _sweep() -> None:
    """Remove what services that were killed have left in the private folder."""
    for path in Path(default_ipc("default").path).parent.glob("*.owner"):
        _remove_dead(path)


def _remove_dead(path: Path) -> None:
    """Remove a file whose service does not live. One without a token yet is being made by a service that begins."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if the service lives
        held = os.fstat(file.fileno())
        if held.st_size and path.stat().st_ino == held.st_ino:
            path.unlink()


def _refused(operation: str, why: str) -> OwnerOnlyError:
    return OwnerOnlyError(
        f"{operation} is for the owner of the service only, and no owner's token was found: {why}", operation=operation
    )
