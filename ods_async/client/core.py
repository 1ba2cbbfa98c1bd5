"""What the blocking and the asyncio client share: their arguments, their requests, and the shapes of their answers."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from tensordict import TensorDict

from ods_async.client.arguments import at_least_one, bad_argument, mode_text, whole
from ods_async.client.exchange import Exchange, Known
from ods_async.client.link import DataPath, Link, checked_data_path, open_link
from ods_async.client.shapes import record_list
from ods_async.core.language import KINDS
from ods_async.core.requests import (
    BufferDescription,
    LanguageEntries,
    Sample,
    ServiceStatus,
    Welcome,
)
from ods_async.core.states import OnlineDataEngineState
from ods_async.errors import ArgumentError, ClosedError, StateError
from ods_async.transport.curve import CurveKeys, as_keys
from ods_async.transport.endpoint import parse_address
from ods_async.transport.pool import BufferPool
from ods_async.transport.sockets import ChannelOptions, Hub
from ods_async.wire.asking import checked_timeout

__all__ = ["DEFAULT_TIMEOUT", "ClientCore", "StreamPlan"]

DEFAULT_TIMEOUT: Final = 60.0
IDLE_BYTES: Final = 512 * 1024 * 1024

_COUNTER = itertools.count(1)


@dataclass(frozen=True, slots=True)
class StreamPlan:
    """What a stream draws, over and over: the request, the seeds, and where batches land."""

    wanted: Sample
    seed: int | None
    landing: object
    timeout: float


class ClientCore:
    """The part of a client that neither blocks nor awaits.

    Batches of 8 MB and more are copied out of shared memory by as many threads as torch may use
    (``torch.set_num_threads``), at most four.

    Args:
        endpoint: the broker's address, ``tcp://host:port`` or ``ipc:///path``.
        owner: the owner's token, for the owner's verbs; None for a plain consumer.
        data_path: "auto" (shared memory where it is proven to be the same, else frames), "shared_memory" (or fail), or
            "frames".
        timeout: seconds for every call that is not given its own.
        connect_timeout: seconds within which a broker must answer at all.
        keys: this client's CURVE keys for a tcp endpoint, or the path of their folder or file; not used on ipc.
        name: how the broker calls this client when it speaks to people.

    Raises:
        EndpointError: the address cannot be used.
        ConfigError: keys that cannot be read, with the file and what is wrong with it.
        ArgumentError: another argument is wrong.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        owner: bytes | None = None,
        data_path: str = "auto",
        timeout: float = DEFAULT_TIMEOUT,
        connect_timeout: float = 5.0,
        keys: CurveKeys | str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> None:
        self._endpoint = str(parse_address(endpoint))
        self._data_path: DataPath = checked_data_path(data_path)
        self._timeout = checked_timeout(timeout, DEFAULT_TIMEOUT)
        self._connect_timeout = checked_timeout(connect_timeout, 5.0)
        self._keys = as_keys(keys, self._endpoint)
        self._given_name = name
        self._owner = owner
        self._closed = False
        self._begin()

    def _begin(self) -> None:
        """Everything that belongs to this process and must be made anew in a child."""
        self._pid = os.getpid()
        self._hub = Hub()
        self._pool = BufferPool(IDLE_BYTES)
        self._heard: dict[int, str] = {}
        self._exchange: Exchange[TensorDict] = Exchange(
            endpoint=self._endpoint,
            role="consumer" if self._owner is None else "owner",
            name=self._given_name or f"{socket.gethostname()}:{os.getpid()}:{next(_COUNTER)}",
            owner=self._owner,
            connect_timeout=self._connect_timeout,
            make_memory=self._make_memory,
            guard=threading.Lock(),
        )

    def _make_memory(self, welcome: Welcome, description: BufferDescription) -> Link:
        return open_link(description, self._endpoint, self._data_path, self._pool)

    def _let_go(self) -> None:
        """Close the segment, and give memory back that waits for a batch that will not come."""
        known = self._exchange.known
        if known is not None and known.memory is not None:
            known.memory.close()
        self._pool.close()

    def _check_open(self) -> None:
        """In the process that uses it, and not closed.

        Raises:
            ClosedError: it was closed.
        """
        if self._closed:
            raise ClosedError(f"this client of {self._endpoint} is closed; make a new one to go on", what="client")
        if self._pid != os.getpid():
            # A forked child: the parent's sockets are dead to it, and it is no owner.
            self._owner = None
            self._begin()
            self._forget_parent()

    def _forget_parent(self) -> None:
        """Drop what the parent process had open, without closing it."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        # Connections are made where they are used; the owner's token stays with the owner.
        return {
            "endpoint": self._endpoint,
            "data_path": self._data_path,
            "timeout": self._timeout,
            "connect_timeout": self._connect_timeout,
            "keys": self._keys,
            "name": self._given_name,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._endpoint!r}, data_path={self._data_path!r})"

    # --- what is known without asking -------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The broker's address."""
        return self._endpoint

    @property
    def run_id(self) -> int:
        """The run this client speaks with.

        Raises:
            StateError: not connected yet.
        """
        return self._known("run_id").welcome.run_id

    @property
    def buffer_size(self) -> int:
        """Slots of the buffer.

        Raises:
            StateError: not connected yet.
        """
        return int(str(self._known("buffer_size").welcome.settings["buffer_size"]))

    @property
    def settings(self) -> dict[str, object]:
        """What the broker tells about its configuration: a copy.

        Raises:
            StateError: not connected yet.
        """
        return dict(self._known("settings").welcome.settings)

    @property
    def state(self) -> OnlineDataEngineState:
        """The service's state when it was last told (on connecting, and by :meth:`get_status`).

        Raises:
            StateError: not connected yet.
        """
        known = self._known("state")
        return OnlineDataEngineState(self._heard.get(known.welcome.run_id, known.welcome.state))

    @property
    def data_path(self) -> str | None:
        """How batches come: "shared_memory", "frames", or None while that is not decided."""
        known = self._exchange.known
        if known is None or known.memory is None:
            return None
        return "shared_memory" if known.memory.shared else "frames"

    @property
    def redrawn(self) -> int:
        """How many batches were drawn again because a row changed while it was copied."""
        return self._exchange.redrawn

    def left_records(self, pending: list[dict[str, object]]) -> list[dict[str, Any]]:
        """For the engine: the lifecycle records of a run that is over which no drain returned; each is returned once.

        Args:
            pending: what the broker still held at the end, as it sent them.
        """
        return record_list(self._exchange.left_over(pending))

    def _known(self, operation: str) -> Known[TensorDict]:
        known = self._exchange.known
        if known is None:
            raise StateError(
                f"{operation} is known after connecting, and this client of {self._endpoint} has not spoken with the "
                "broker yet; call connect() first",
                operation=operation,
                required="connected",
                current="not connected",
            )
        return known

    def _note_state(self, status: ServiceStatus) -> ServiceStatus:
        self._heard = {status.run_id: status.state}
        return status

    def _owned(self, operation: str) -> bytes:
        self._check_open()
        return self._exchange.owned(operation)

    # --- requests ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _seed(generator: torch.Generator | None, seed: int | None) -> int | None:
        """The seed of one draw; a generator moves on by one draw, and no global generator is touched."""
        if generator is None:
            return None if seed is None else whole("seed", seed)
        if seed is not None:
            raise bad_argument("seed", seed, "left out where generator= is given")
        if not isinstance(generator, torch.Generator):
            raise bad_argument("generator", generator, "a torch.Generator")
        drawn = torch.randint(0, 2**63 - 1, (1,), generator=generator, device=generator.device)
        return int(drawn.item())

    @staticmethod
    def _number(argument: str, value: object) -> int:
        return whole(argument, value)

    def _chunks(
        self, batch_size: int, chunk_size: int, sampling_mode: str, generator: torch.Generator | None, seed: int | None
    ) -> Sample:
        return Sample(
            batch_size=whole("batch_size", batch_size),
            length=whole("chunk_size", chunk_size),
            mode=mode_text("sampling_mode", sampling_mode),
            seed=self._seed(generator, seed),
        )

    def _contexts(
        self,
        batch_size: int,
        history_length: int,
        prediction_horizon: int,
        sampling_mode: str,
        generations: Sequence[int] | None,
        generator: torch.Generator | None,
        seed: int | None,
    ) -> Sample:
        history = at_least_one("history_length", history_length)
        horizon = at_least_one("prediction_horizon", prediction_horizon)
        chosen: tuple[int, ...] = ()
        if generations is not None:
            if isinstance(generations, (str, bytes)) or not isinstance(generations, Sequence) or not generations:
                raise bad_argument("generations", generations, "a sequence of at least one generation number, or None")
            chosen = tuple(whole("generations", generation) for generation in generations)
        return Sample(
            batch_size=whole("batch_size", batch_size),
            length=history + horizon - 1,
            mode=mode_text("sampling_mode", sampling_mode),
            history=history,
            horizon=horizon,
            generations=chosen,
            seed=self._seed(generator, seed),
        )

    # --- language ---------------------------------------------------------------------------------------------------

    @staticmethod
    def _language_needed(batch: TensorDict) -> dict[str, int]:
        """Per kind, how many dictionary entries the batch's indices need.

        Raises:
            ArgumentError: the batch has no language indices.
        """
        needed: dict[str, int] = {}
        for kind in KINDS:
            indices = batch.get(f"{kind}_index", None)
            if not isinstance(indices, torch.Tensor):
                raise ArgumentError(
                    f"the batch has no {kind}_index; language is resolved from task_index and subtask_index",
                    argument="batch",
                    value=f"without {kind}_index",
                    rule="a batch with task_index and subtask_index",
                )
            integers = not indices.is_floating_point() and not indices.is_complex() and indices.numel() > 0
            needed[kind] = int(indices.max()) + 1 if integers else 0
        return needed

    def _resolve(self, batch: TensorDict) -> dict[str, Any]:
        """The texts, once they are known."""
        language = self._known("resolve_language").language
        return {kind: language.resolve(batch.get(f"{kind}_index").cpu(), kind=kind) for kind in KINDS}

    def learn(self, entries: LanguageEntries) -> None:
        """Take in dictionary entries of this run that were fetched elsewhere, so that they can be resolved here.

        Raises:
            StateError: not connected yet.
        """
        language = self._known("learn").language
        language.follow(entries.kind, entries.since, entries.entries)

    def _words_missing(self, needed: dict[str, int]) -> bool:
        known = self._exchange.known
        return known is None or any(known.words(kind) < size for kind, size in needed.items())

    def _options(self) -> ChannelOptions:
        return ChannelOptions(heartbeat_ms=1000, heartbeat_timeout_ms=4000, curve=self._keys)
