"""The broker: sockets, memory and threads around :class:`~ods_async.core.broker_state.BrokerState`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import numpy as np

from ods_async.broker.doors import Doors, check_binds, doors_hub
from ods_async.broker.effects import EffectRunner
from ods_async.broker.ingest import Reports
from ods_async.broker.serve import Requests
from ods_async.broker.settings import settings_of
from ods_async.config import OnlineDataEngineCfg
from ods_async.core.broker_state import BrokerState
from ods_async.core.requests import Cancel, Release, Stop
from ods_async.core.states import OnlineDataEngineState
from ods_async.core.stimuli import (
    AskedFor,
    ConnectionRefused,
    EndService,
    Instant,
    RefuseRequest,
    Stimulus,
    Tick,
)
from ods_async.errors import ClosedError, OdsError, StateError
from ods_async.transport.curve import CurveServer
from ods_async.transport.endpoint import default_ipc
from ods_async.transport.gate import Refusal
from ods_async.transport.shm import sweep_segments
from ods_async.transport.sockets import Frame, Hub

__all__ = ["Broker"]

_log = logging.getLogger(__name__)

OWNER_TOKEN_BYTES = 32
SHORTEST_TICK_SECONDS = 0.001
LONGEST_TICK_SECONDS = 1.0
TICK_AFTER_FAULT_SECONDS = 0.1
FAREWELL_SECONDS = 0.2
LINGER_SECONDS = 0.5
STOP_MARGIN_SECONDS = 2.0


class Broker:
    """One run of the broker, as an async context manager: entering binds the sockets, leaving ends the run.

    Args:
        cfg: the settings. Workers are not started here; they connect.
        endpoints: where to answer; None: ``cfg.endpoint`` (or the default ipc address of ``cfg.name``) and
            ``cfg.extra_endpoints``. tcp ports may be 0.
        owner_token: what the owner's requests must carry; None: a random one.
        run_id: number of the run, 1 to 2**63-1; None: a random one.
        supervised: names of workers whose processes the owner watches and reports.

    Raises:
        EndpointError: on entering: an endpoint that cannot be bound, or that is open to the network unprotected.
        ConfigError: on entering: keys or an allow-list that cannot be used.
    """

    def __init__(
        self,
        cfg: OnlineDataEngineCfg,
        *,
        endpoints: Sequence[str] | None = None,
        owner_token: bytes | None = None,
        run_id: int | None = None,
        supervised: Sequence[str] = (),
    ) -> None:
        self._cfg = cfg
        self._asked_endpoints = None if endpoints is None else tuple(endpoints)
        self.owner_token: bytes = secrets.token_bytes(OWNER_TOKEN_BYTES) if owner_token is None else owner_token
        self.run_id: int = 1 + secrets.randbelow(2**63 - 1) if run_id is None else run_id
        self._settings = settings_of(cfg, supervised)
        self._state: BrokerState | None = None
        self._hub: Hub | None = None
        self._doors: Doors | None = None
        self._effects: EffectRunner | None = None
        self._reports: Reports | None = None
        self._stimuli: deque[Stimulus] = deque()
        self._handling = False
        self._crowded = False
        self._timer: asyncio.TimerHandle | None = None
        self._tick_at = 0.0
        self._housekeeping: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._end: EndService | None = None
        self._closed = asyncio.Event()

    # --- looking ----------------------------------------------------------------------------------------------------

    @property
    def endpoint(self) -> str:
        """The first address that answers, port filled in."""
        return self.endpoints[0]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """All addresses that answer, in the order asked for, ports filled in."""
        if self._doors is None:
            raise StateError(
                "endpoints are known once the broker is entered (async with Broker(...))",
                operation="endpoints",
                required="STARTING",
                current=self.state.value,
            )
        return self._doors.endpoints

    @property
    def state(self) -> OnlineDataEngineState:
        """The service's state (B6); it stays readable after the end."""
        return OnlineDataEngineState.CREATED if self._state is None else self._state.state

    @property
    def counts(self) -> dict[str, int]:
        """What went wrong outside of the rules: dropped answers, faults of this program (see ``EffectRunner``)."""
        return {} if self._effects is None else dict(self._effects.counts)

    # --- lifecycle --------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind the sockets and serve. Entering the context does it.

        Raises:
            EndpointError: an endpoint that cannot be used.
            ConfigError: keys or an allow-list that cannot be used.
            StateError: it was started before.
        """
        if self._state is not None:
            raise StateError(
                f"a broker is started once and this one is {self.state.value}; make a new one",
                operation="start",
                required="CREATED",
                current=self.state.value,
            )
        endpoints = self._asked_endpoints
        if endpoints is None:
            first = self._cfg.endpoint if self._cfg.endpoint is not None else str(default_ipc(self._cfg.name))
            endpoints = (first, *self._cfg.extra_endpoints)
        keys = None
        if self._cfg.server_keys is not None:
            keys = CurveServer.load(self._cfg.server_keys, self._cfg.allowed_clients)
        check_binds(endpoints, insecure=self._cfg.allow_insecure_bind, keys=keys is not None)
        limits = self._settings.limits
        sweep_segments()
        self._hub = doors_hub()
        try:
            self._doors = Doors(self._hub, endpoints, limits, keys=keys, on_refused=self._on_refused)
        except BaseException:
            self._hub.close()
            raise
        self._state = BrokerState(
            self._settings,
            run_id=self.run_id,
            owner_token=self.owner_token,
            rng=np.random.default_rng(self._cfg.seed),
            now=_now(),
        )
        self._effects = EffectRunner(
            self._doors,
            self._feed,
            self._on_end,
            limits,
            shared_memory=self._cfg.shared_memory,
            run_id=self.run_id,
        )
        requests = Requests(self._feed, self._effects, limits)
        self._reports = Reports(self._feed, self._effects.in_the_back, self._doors.pause_rollouts, limits)
        self._doors.open(
            _guarded(requests.on_message, self._effects, "taking a request"),
            _guarded(self._reports.on_message, self._effects, "taking a report"),
            self._effects.push_tickets,
        )
        self._housekeeping = asyncio.get_running_loop().create_task(self._keep_house())
        self._feed(Tick())

    async def stop(self, grace: float | None = None) -> EndService:
        """End the run in good order: workers are told, whoever waits is answered. Again: waits for the same end.

        Args:
            grace: seconds that workers have to end; None: ``cfg.shutdown_timeout``.

        Returns:
            How it ended.
        """
        if self._state is None or self._effects is None:
            self._end = self._end or EndService(False, "never started")
            self._closed.set()
            return self._end
        seconds = self._cfg.shutdown_timeout if grace is None else grace
        if self._end is None:
            try:
                async with asyncio.timeout(seconds + STOP_MARGIN_SECONDS):
                    # The first one ends the run, the second one the time for late-comers to hear of it.
                    for _ in range(2):
                        with contextlib.suppress(OdsError):
                            await self._effects.ask(Stop(self.owner_token, seconds), seconds + STOP_MARGIN_SECONDS)
                    await self._closed.wait()
            except TimeoutError:
                self._on_end(EndService(True, f"the broker did not end within {seconds:g} s and was cut short"))
        return await self.wait_closed()

    async def wait_closed(self) -> EndService:
        """Wait until the run is over and sockets, threads and memory are given back; returns how it ended."""
        await self._closed.wait()
        assert self._end is not None
        return self._end

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await self.stop()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"while ending the broker: {type(failure).__name__}: {failure}")

    # --- one stimulus at a time -------------------------------------------------------------------------------------

    def _feed(self, stimulus: Stimulus) -> None:
        self._stimuli.append(stimulus)
        if self._handling:
            return
        self._handling = True
        try:
            while self._stimuli:
                self._handle(self._stimuli.popleft())
        finally:
            self._handling = False
        self._hold_back()

    def _hold_back(self) -> None:
        # Rollouts that arrive faster than they are written pile up in this process otherwise, a whole generation's.
        # While a write is under way only: with nothing to wait for, workers' heartbeats must be heard.
        assert self._state is not None
        assert self._doors is not None
        crowded = self._state.production.crowded and self._end is None
        if crowded != self._crowded:
            self._crowded = crowded
            self._doors.pause_rollouts(crowded)

    def _handle(self, stimulus: Stimulus) -> None:
        assert self._state is not None
        assert self._effects is not None
        if self._end is not None:
            self._too_late(stimulus)
            return
        now = _now()
        earliest = SHORTEST_TICK_SECONDS
        try:
            effects = self._state.handle(stimulus, now)
        except Exception as error:
            earliest = TICK_AFTER_FAULT_SECONDS
            self._effects.fault(f"handling {type(stimulus).__name__}", error)
            if isinstance(stimulus, AskedFor) and not isinstance(stimulus.request, Release | Cancel):
                name = type(stimulus.request).__name__
                text = (
                    f"the broker failed to answer {name}, which is a defect of its own: {type(error).__name__}: {error}"
                )
                effects = [RefuseRequest(stimulus.peer, stimulus.request_id, OdsError(text))]
            else:
                effects = []
        for effect in effects:
            try:
                self._effects.carry_out(effect)
            except Exception as error:
                self._effects.fault(f"carrying out {type(effect).__name__}", error)
        self._arm(self._state.next_deadline(now), earliest)

    def _too_late(self, stimulus: Stimulus) -> None:
        if isinstance(stimulus, AskedFor) and not isinstance(stimulus.request, Release | Cancel):
            assert self._effects is not None
            error = ClosedError("the service has ended", what="service")
            self._effects.refuse(stimulus.peer, stimulus.request_id, error)

    def _arm(self, seconds: float | None, earliest: float) -> None:
        # A timer that fires early costs one empty tick; setting it anew for every request would cost more.
        loop = asyncio.get_running_loop()
        delay = LONGEST_TICK_SECONDS if seconds is None else min(max(seconds, earliest), LONGEST_TICK_SECONDS)
        at = loop.time() + delay
        if self._timer is not None:
            if self._tick_at <= at:
                return
            self._timer.cancel()
        self._tick_at = at
        self._timer = loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._end is None:
            self._feed(Tick())

    async def _keep_house(self) -> None:
        assert self._doors is not None
        assert self._effects is not None
        while self._end is None:
            await asyncio.sleep(self._settings.heartbeat_interval)
            try:
                for failed in self._doors.failed_handshakes():
                    self._feed(failed)
                self._effects.push_tickets()
            except Exception as error:
                self._effects.fault("keeping house", error)

    def _on_refused(self, refusal: Refusal) -> None:
        self._feed(ConnectionRefused(refusal.socket, refusal.reason, refusal.address, refusal.key))

    # --- the end ----------------------------------------------------------------------------------------------------

    def _on_end(self, end: EndService) -> None:
        if self._end is None:
            self._end = end
            self._ending = asyncio.get_running_loop().create_task(self._give_back())

    async def _give_back(self) -> None:
        assert self._doors is not None
        assert self._effects is not None
        assert self._hub is not None
        try:
            if self._timer is not None:
                self._timer.cancel()
            if self._housekeeping is not None:
                self._housekeeping.cancel()
                await asyncio.gather(self._housekeeping, return_exceptions=True)
            if self._reports is not None:
                await self._reports.close()
            await self._effects.close()
            if self._doors.visited:
                # A client's socket drops what it has not read yet when the connection ends: let them read.
                await asyncio.sleep(FAREWELL_SECONDS)
            self._doors.close(LINGER_SECONDS)
            await asyncio.to_thread(self._hub.close, LINGER_SECONDS)
        except Exception as error:
            self._effects.fault("closing", error)
        finally:
            self._closed.set()


def _guarded(
    handler: Callable[[list[Frame]], None], effects: EffectRunner, doing: str
) -> Callable[[list[Frame]], None]:
    def guarded(frames: list[Frame]) -> None:
        try:
            handler(frames)
        except Exception as error:
            effects.fault(doing, error)

    return guarded


def _now() -> Instant:
    return Instant(time.monotonic_ns(), time.time_ns())
