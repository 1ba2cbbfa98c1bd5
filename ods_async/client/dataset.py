"""Fresh windows as a torch dataset."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import parent_process
from typing import Any, Final

import numpy as np
from tensordict import TensorDict
from torch.utils.data import IterableDataset

from ods_async.client.chunk_sizes import ChunkSizeSampler, bad_argument, checked_count
from ods_async.client.core import DEFAULT_TIMEOUT, ClientCore
from ods_async.client.link import checked_data_path
from ods_async.client.loader import end_with_training, for_home, pass_through, stack, suit_loader
from ods_async.client.streams import Epochs, Place, distributed_rank, here, stream_of
from ods_async.client.sync import Client
from ods_async.core.sample_rules import CONTEXT_MODES
from ods_async.core.windows import MODES
from ods_async.errors import ArgumentError, OdsError, RequestTimeoutError
from ods_async.transport.allocator import keep_big_blocks
from ods_async.transport.curve import CurveKeys
from ods_async.transport.endpoint import parse_address
from ods_async.wire.asking import checked_timeout

__all__ = ["DatasetIterator", "OnlineDataset"]

# A worker that waits for data looks up this often whether the training process still lives.
LOOK_UP_SECONDS: Final = 2.0


class OnlineDataset(IterableDataset[Any]):
    """Windows drawn from a broker, for a ``torch.utils.data.DataLoader`` or a plain loop.

    *Item mode* (no ``batch_size``) yields single windows, TensorDicts ``[chunk_size]``; the DataLoader makes batches of
    them. *Batch mode* yields whole batches, TensorDicts ``[batch_size, chunk_size]``, at a fraction of the cost; use it
    with ``DataLoader(dataset, batch_size=None)``. With ``history_length`` and ``prediction_horizon`` instead of
    ``chunk_size`` the windows are contexts, as those of :meth:`~ods_async.Client.sample_batch_with_context`.

    Nothing connects before the first item is asked for, and then the process that asks does so, by itself, for as long
    as it iterates: so a dataset can be forked, pickled and sent to workers, and a loop that is left early leaves
    nothing. What comes from workers is theirs alone; indices of language are resolved by any client of the same run.

    With ``seed`` every rank, worker and epoch has a stream of draws of its own, which repeats when all four are the
    same and the buffer has the same content. Each ``iter()`` begins the next epoch; :meth:`set_epoch` chooses it.
    Without a seed, draws are fresh chance.

    Args:
        source: the broker's address, a client (its connection details are used, not its connections), or an engine.
        chunk_size: steps of a window, or a sampler that chooses them draw by draw; None for contexts.
        batch_size: windows of a batch; None for item mode.
        transform: called with every TensorDict that is to be yielded; what it returns is yielded instead.
        sampling_mode: "episode", "segment", or "boundary" (chunks only).
        history_length: steps up to and with "now", for contexts.
        prediction_horizon: steps from "now" on, for contexts.
        generations: restricts contexts to these generations.
        seed: of all draws, at least 0; None for fresh chance.
        rank: this process's number among the trainers that share ``seed``; None takes it from torch.distributed where
            that is initialised, else 0.
        world_size: how many trainers there are; comes together with ``rank``.
        length: items (batches in batch mode) of one epoch, of all workers of this process together; None: no end.
        timeout: seconds to wait for any one draw; None for the client's own, or 60.
        data_path: "auto", "shared_memory" or "frames", as for :class:`~ods_async.Client`; None for the client's own.
        keys: CURVE keys, or the path of their folder or file; None for the client's own, if it has any.

    Raises:
        ArgumentError: an argument that cannot be, or two that exclude each other.
        EndpointError: an address that cannot be used.

    Iterating raises what sampling raises, in DataLoader workers too, with class, text and fields. The iterator can be
    asked again after an error.
    """

    def __init__(
        self,
        source: object,
        chunk_size: int | ChunkSizeSampler | None = None,
        batch_size: int | None = None,
        transform: Callable[[TensorDict], Any] | None = None,
        sampling_mode: str = "episode",
        *,
        history_length: int | None = None,
        prediction_horizon: int | None = None,
        generations: Sequence[int] | None = None,
        seed: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        length: int | None = None,
        timeout: float | None = None,
        data_path: str | None = None,
        keys: CurveKeys | str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        self._source = _checked_source(source)
        self._options: dict[str, Any] = {}
        if timeout is not None:
            self._options["timeout"] = checked_timeout(timeout, DEFAULT_TIMEOUT)
        if data_path is not None:
            self._options["data_path"] = checked_data_path(data_path)
        if keys is not None:
            self._options["keys"] = keys
        self.batch_size = None if batch_size is None else checked_count("batch_size", batch_size)
        if transform is not None and not callable(transform):
            raise bad_argument("transform", transform, "something to call with a TensorDict, or None")
        self.transform = transform
        self._set_windows(chunk_size, sampling_mode, history_length, prediction_horizon, generations)
        self.length = None if length is None else checked_count("length", length)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0):
            raise bad_argument("seed", seed, "an integer of at least 0, or None")
        self.seed = None if seed is None else int(seed)
        self._epochs = None if seed is None else Epochs()
        self._ranks = _checked_ranks(rank, world_size)

    def _set_windows(
        self,
        chunk_size: int | ChunkSizeSampler | None,
        sampling_mode: str,
        history_length: int | None,
        prediction_horizon: int | None,
        generations: Sequence[int] | None,
    ) -> None:
        self.context: tuple[int, int] | None = None
        if history_length is not None or prediction_horizon is not None:
            if chunk_size is not None:
                raise bad_argument("chunk_size", chunk_size, "left out where history_length= is given")
            self.context = (
                checked_count("history_length", history_length),
                checked_count("prediction_horizon", prediction_horizon),
            )
        elif generations is not None:
            raise bad_argument("generations", generations, "left out for chunks: it restricts contexts")
        elif not isinstance(chunk_size, ChunkSizeSampler):
            checked_count("chunk_size", chunk_size)
        modes = MODES if self.context is None else CONTEXT_MODES
        if sampling_mode not in modes:
            raise bad_argument("sampling_mode", sampling_mode, "one of " + ", ".join(map(repr, modes)))
        if sampling_mode == "boundary" and chunk_size == 1:
            raise bad_argument("chunk_size", chunk_size, "at least 2 for sampling_mode='boundary'")
        self.chunk_size = chunk_size
        self.sampling_mode = sampling_mode
        self.generations = None if generations is None else tuple(generations)

    def __iter__(self) -> DatasetIterator:
        """Begin the next epoch."""
        suit_loader(sys._getframe(1))
        place = here()
        if place.inside:
            keep_big_blocks()  # the process does nothing but this
            if (parent := parent_process()) is not None and parent.pid is not None:
                end_with_training(parent.pid)
        epoch = 0 if self._epochs is None else self._epochs.begin(place.worker)
        return DatasetIterator(self, place, stream_of(self.seed, self.rank, place.worker, epoch))

    def __len__(self) -> int:
        """Items (batches in batch mode) of one epoch.

        Raises:
            TypeError: there is no end to them.
        """
        if self.length is None:
            raise TypeError("this OnlineDataset has no end and so no length; give it length= for epochs of a length")
        return self.length

    def __bool__(self) -> bool:
        return True

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` begin ``epoch`` (from 0), also in workers that live on.

        Raises:
            ArgumentError: no integer of at least 0.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, (int, np.integer)) or not 0 <= epoch < 2**31:
            raise bad_argument("epoch", epoch, "an integer of at least 0")
        if self._epochs is not None:
            self._epochs.set(int(epoch))

    @property
    def rank(self) -> int:
        """This process's number among the trainers that share the seed."""
        ranks = self._ranks or distributed_rank()
        return 0 if ranks is None else ranks[0]

    @property
    def world_size(self) -> int:
        """How many trainers share the seed."""
        ranks = self._ranks or distributed_rank()
        return 1 if ranks is None else ranks[1]

    @staticmethod
    def collate_fn(batch: Sequence[TensorDict]) -> TensorDict:
        """For a DataLoader over item mode: stacks ``n`` windows to a TensorDict ``[n, chunk_size]``.

        Raises:
            ArgumentError: windows of different lengths, which a chunk-size sampler draws.
        """
        stacked: TensorDict = stack(batch)
        return stacked

    @staticmethod
    def passthrough_collate_fn(batch: Any) -> Any:
        """For ``DataLoader(dataset, batch_size=None)`` over batch mode: the batch as it is.

        Raises:
            ArgumentError: the DataLoader collects several batches at once.
        """
        return pass_through(batch)

    def make_client(self) -> Client:
        """A client of the dataset's source, not connected yet.

        Raises:
            StateError: the source is an engine that was not started.
        """
        return Client(**self._details())

    @property
    def timeout(self) -> float:
        """Seconds that any one draw may take."""
        return float(self._details().get("timeout", DEFAULT_TIMEOUT))

    def _details(self) -> dict[str, Any]:
        return _connection(self._source) | self._options

    def __getstate__(self) -> dict[str, Any]:
        # In a spawned worker there is no torch.distributed to ask, and no engine.
        return self.__dict__ | {"_source": _connection(self._source), "_ranks": self._ranks or distributed_rank()}

    def __repr__(self) -> str:
        windows = f"chunk_size={self.chunk_size!r}" if self.context is None else f"context={self.context}"
        return f"OnlineDataset({self._source!r}, {windows}, batch_size={self.batch_size})"


class DatasetIterator(Iterator[Any]):
    """One epoch, or the share of it that falls to one worker. Connects at the first item.

    Dropping the iterator, and its end, close the connection.
    """

    def __init__(self, dataset: OnlineDataset, place: Place, rng: np.random.Generator) -> None:
        self._dataset = dataset
        self._place = place
        self._rng = rng
        self._left = None if dataset.length is None else place.share(dataset.length)
        self._client: Client | None = None
        self._closed = False

    def __next__(self) -> Any:
        if self._closed or self._left == 0:
            self.close()
            raise StopIteration
        try:
            item = self._draw()
            transform = self._dataset.transform
            made = item if transform is None else transform(item)
        except OdsError as error:
            if not self._place.inside:
                raise
            raise for_home(error) from error.__cause__
        if self._left is not None:
            self._left -= 1
        return made

    def close(self) -> None:
        """Close the connection; there are no more items. Again: no effect."""
        self._closed = True
        if self._client is not None:
            self._client.close()

    def _draw(self) -> TensorDict:
        if self._client is None:
            self._client = self._dataset.make_client()
            weakref.finalize(self, self._client.close)
        dataset, rng = self._dataset, self._rng
        steps = dataset.chunk_size
        if isinstance(steps, ChunkSizeSampler):
            steps = checked_count("chunk_size", steps.draw(rng))
        seed = None if dataset.seed is None else int(rng.integers(2**63))
        batch = self._patiently(self._client, steps, seed)
        if dataset.batch_size is not None:
            return batch
        item: TensorDict = batch[0]
        return item

    def _patiently(self, client: Client, steps: int | None, seed: int | None) -> TensorDict:
        """Draw within the time-out; a worker waits in small pieces, so as not to outlive the training process."""
        if not self._place.inside:
            return self._sample(client, steps, seed, None)
        timeout = self._dataset.timeout
        until = time.monotonic() + timeout
        while True:
            left = until - time.monotonic()
            try:
                return self._sample(client, steps, seed, min(max(left, 0.001), LOOK_UP_SECONDS))
            except RequestTimeoutError as error:
                if left <= LOOK_UP_SECONDS:
                    missing = error.fields.get("missing", "")
                    raise RequestTimeoutError(
                        f"no batch within {timeout:g} s: {missing}",
                        operation=error.fields.get("operation", "sample_batch"),
                        timeout=timeout,
                        missing=missing,
                    ) from None
            if (parent := parent_process()) is not None and not parent.is_alive():
                raise SystemExit(1)  # an error would be kept for a process that is gone; torch looks every 5 s only

    def _sample(self, client: Client, steps: int | None, seed: int | None, timeout: float | None) -> TensorDict:
        dataset = self._dataset
        windows = 1 if dataset.batch_size is None else dataset.batch_size
        if dataset.context is None:
            assert steps is not None
            return client.sample_batch(windows, steps, dataset.sampling_mode, seed=seed, timeout=timeout)
        return client.sample_batch_with_context(
            windows,
            *dataset.context,
            sampling_mode=dataset.sampling_mode,
            generations=dataset.generations,
            seed=seed,
            timeout=timeout,
        )


def _checked_source(source: object) -> object:
    if isinstance(source, str):
        return str(parse_address(source))
    if (
        isinstance(source, ClientCore)
        or hasattr(type(source), "endpoint")
        or "endpoint" in getattr(source, "__dict__", ())
    ):
        return source
    raise bad_argument("source", source, "a broker's address, a client or an engine")


def _connection(source: object) -> dict[str, Any]:
    """What a client needs to reach the source from any process."""
    if isinstance(source, dict):  # an unpickled dataset has nothing else
        return source
    if isinstance(source, str):
        return {"endpoint": source}
    if isinstance(source, ClientCore):
        return source.__getstate__()
    return {"endpoint": source.endpoint}  # type: ignore[attr-defined]


def _checked_ranks(rank: object, world_size: object) -> tuple[int, int] | None:
    if rank is None and world_size is None:
        return None
    if rank is None or world_size is None:
        raise ArgumentError(
            "rank and world_size come together; leave both out to take them from torch.distributed",
            argument="rank" if rank is None else "world_size",
            value="None",
            rule="given together with the other",
        )
    ranks = checked_count("world_size", world_size)
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or not 0 <= rank < ranks:
        raise bad_argument("rank", rank, f"an integer from 0 to {ranks - 1}")
    return int(rank), ranks
