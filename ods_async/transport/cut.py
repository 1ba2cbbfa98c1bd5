"""The last thing a program does that is ended at once: no waiting, no lock, nothing left behind."""

from __future__ import annotations

from ods_async.transport.claims import release_claims
from ods_async.transport.shm import remove_own_segments

__all__ = ["remove_own_files"]


def remove_own_files() -> None:
    """Remove this process's socket files and segments. A signal handler may call it; the process must end then."""
    try:
        remove_own_segments()
    finally:
        release_claims()
