"""What both engines have in common."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch

from ods_async.client.core import ClientCore
from ods_async.client.shapes import budget_dict, record_list, stats_dict
from ods_async.config import OnlineDataEngineCfg
from ods_async.core.states import OnlineDataEngineState
from ods_async.observe.subscriber import EventSubscriber
from ods_async.supervise.owner import Owner

__all__ = ["ALL_RECORDS", "GENERATION_SECONDS", "EngineBase", "note_cleanup", "teach"]

GENERATION_SECONDS = 300.0
ALL_RECORDS = 2**62  # in one drain: records between two would be lost with the second


class EngineBase:
    """What both engines have: settings, states, and what they know without asking."""

    def __init__(self, cfg: OnlineDataEngineCfg) -> None:
        self._owner = Owner(cfg)
        # Runs at the interpreter's exit too, and never waits: the processes see their pipe end and leave by themselves.
        self._finalizer = weakref.finalize(self, self._owner.let_go)

    @property
    def cfg(self) -> OnlineDataEngineCfg:
        """The settings."""
        return self._owner.cfg

    @property
    def state(self) -> OnlineDataEngineState:
        """``CREATED → STARTING → READY → STOPPED``, or ``FAILED`` (B6)."""
        return self._owner.state

    @property
    def is_init(self) -> bool:
        """Whether there is data to sample, that is, the state is READY."""
        return self._owner.state is OnlineDataEngineState.READY

    @property
    def run_id(self) -> int:
        """The run's number, 1 to 2**63-1, new for every engine."""
        return self._owner.run_id

    @property
    def endpoint(self) -> str:
        """Where consumers in other processes connect, a tcp port of 0 filled in.

        Raises:
            StateError: the engine was not started, so that nobody listens yet.
        """
        if not self._owner.supervisor.listening:
            raise self._owner.wrong_state("endpoint", OnlineDataEngineState.READY)
        return self._owner.supervisor.endpoint

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All addresses that answer; before the start, those asked for."""
        return self._owner.supervisor.endpoints

    @property
    def buffer_size(self) -> int:
        """Episodes that the buffer holds."""
        return self._owner.cfg.buffer_size

    @property
    def device(self) -> torch.device:
        """Where the buffer is: always the CPU (B5)."""
        return torch.device("cpu")

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the broker and the local workers that run at the moment, by name."""
        return self._owner.supervisor.pids

    def events(self, since: int | None = 0, **options: Any) -> EventSubscriber:
        """The run's numbered events, to iterate over (B41); from the first one on unless ``since`` says otherwise."""
        return EventSubscriber(self._owner.supervisor.local_endpoint, since=since, **options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run_id={self.run_id}, state={self.state.value}, endpoints={self.endpoints})"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} owns processes and cannot be pickled; give the other process engine.endpoint and "
            "let it make a Client"
        )

    def _final_stats(self) -> dict[str, Any] | None:
        return None if self._owner.last_stats is None else stats_dict(self._owner.last_stats)

    def _final_budget(self) -> dict[str, Any] | None:
        if self._owner.failure is not None:
            raise self._owner.blame(self._owner.failure, 0.0)
        return None if self._owner.last_budget is None else budget_dict(self._owner.last_budget)

    def _left_records(self, client: ClientCore | None) -> list[dict[str, Any]]:
        """Records that no drain returned before the end, in the shape of ``Client.drain_lifecycle_events``.

        Args:
            client: the engine's own, which may hold records of a drain that was given up.
        """
        pending = self._owner.take_undrained()
        return record_list(pending) if client is None else client.left_records(pending)


def teach(client: ClientCore, owner: Owner) -> None:
    """Give the client every text of the run: it will be asked for them when the broker is gone."""
    with contextlib.suppress(Exception):
        while owner.words:
            client.learn(owner.words.pop(0))


def note_cleanup(error: BaseException, cleanup: Exception) -> None:
    """Attach a failure of the cleanup to the error that is on its way (B9), unless it is the same one."""
    if str(cleanup) != str(error):
        error.add_note(f"ending the engine failed as well: {type(cleanup).__name__}: {cleanup}")
