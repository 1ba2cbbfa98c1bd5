"""A stream of chance for every rank, DataLoader worker and epoch: none repeats another, each repeats itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

__all__ = ["Epochs", "Place", "distributed_rank", "here", "stream_of"]

_WORKERS: Final = 1024


@dataclass(frozen=True, slots=True)
class Place:
    """Which of how many DataLoader workers this is. ``inside`` is False where there are none: worker 0 of 1."""

    worker: int
    workers: int
    inside: bool

    def share(self, total: int) -> int:
        """How many of ``total`` things are for this worker to do."""
        each, over = divmod(total, self.workers)
        return each + (self.worker < over)


def here() -> Place:
    """The place of this process."""
    info = get_worker_info()
    return Place(0, 1, False) if info is None else Place(info.id, info.num_workers, True)


def distributed_rank() -> tuple[int, int] | None:
    """Rank and number of ranks as torch.distributed knows them, or None where it is not initialised."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return None


class Epochs:
    """Counts how often each worker has begun.

    The counters are memory that the processes of one DataLoader share, since a worker that lives for one epoch cannot
    know which one it is. Pickled by other means than starting a process, a copy goes on counting by itself.
    """

    def __init__(self) -> None:
        self._next = _shared(torch.zeros(_WORKERS, dtype=torch.int64))

    def begin(self, worker: int) -> int:
        """The number, from 0, of the epoch that this worker begins now."""
        at = worker % _WORKERS
        epoch = int(self._next[at])
        self._next[at] = epoch + 1
        return epoch

    def set(self, epoch: int) -> None:
        """Let all workers begin ``epoch`` next."""
        self._next.fill_(epoch)

    def __getstate__(self) -> dict[str, torch.Tensor]:
        return {"next": self._next}

    def __setstate__(self, state: dict[str, torch.Tensor]) -> None:
        self._next = _shared(state["next"])


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.share_memory_()  # type: ignore[no-untyped-call, no-any-return]


def stream_of(seed: int | None, rank: int, worker: int, epoch: int) -> np.random.Generator:
    """The source of chance of that worker in that epoch; fresh chance where there is no seed."""
    if seed is None:
        return np.random.default_rng()
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(rank, worker, epoch)))
