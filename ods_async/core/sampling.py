"""Drawing: from a consumer's request to plans under lease, booked against the budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ods_async.core.budget import Receipt
from ods_async.core.parking import Parked
from ods_async.core.requests import Plan, Plans, Release, Sample
from ods_async.core.run import Run
from ods_async.core.sample_rules import check_plan_bytes, check_request, most_plans
from ods_async.core.states import OnlineDataEngineState as State
from ods_async.core.stimuli import GatherFrame, Peer
from ods_async.core.window_plan import WindowPlan
from ods_async.core.windows import plan_contexts, plan_windows
from ods_async.errors import (
    ClosedError,
    DataUnavailableError,
    LimitExceededError,
    OdsError,
    RequestTimeoutError,
)

__all__ = ["SamplingDesk"]

NEVER = float("inf")
AMPLE_BATCHES = 64


class _Unheard(NamedTuple):
    """What a session got with an answer that it may still say it never heard, until its deadline."""

    request_id: int
    leases: tuple[int, ...]
    receipt: Receipt | None
    until: float


class _Sent(NamedTuple):
    """A frame that left, of which its session may still say that it was delivered to nobody, until its deadline."""

    session: bytes
    receipt: Receipt
    until: float


class SamplingDesk:
    """Answers :class:`~ods_async.core.requests.Sample` and takes leases back."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._booked: dict[int, Receipt] = {}  # lease -> receipt of the budget
        self._spares: dict[int, int] = {}  # lease of a spare plan -> its windows, which count once they were used
        self._frames: dict[int, tuple[bytes, int]] = {}  # lease of a frame being gathered -> its session and request
        self._fates: dict[int, bool] = {}  # frames still being gathered: whether their asker has heard all it will
        self._unheard: dict[bytes, _Unheard] = {}  # session -> what its newest answer gave it
        self._sent: dict[int, _Sent] = {}  # lease of a frame that left, in order of deadline
        self.sampled_windows = 0
        self.sampled_batches = 0

    # --- requests ---------------------------------------------------------------------------------------------------

    def ask(self, peer: Peer, request_id: int, sample: Sample, timeout: float) -> None:
        """Answer now, or park until the first generation is there (or the insert ratio allows it).

        Raises:
            OdsError: the answer, where it is an error.
        """
        run = self._run
        self.release(Release(sample.release, sample.undelivered), peer.identity)
        if run.failure is not None:
            raise run.failure.copy()
        if not run.alive:
            raise ClosedError("the service has stopped; start a new run to sample from", what="service")
        check_request(sample, run.settings.max_episode_steps, run.settings.include_provenance, run.settings.limits)
        if run.state is State.STARTING or self._run.refill.sampling_pause:
            self._park(peer, request_id, sample, timeout)
        else:
            self._answer(peer, request_id, sample)

    def wake(self) -> None:
        """Episodes arrived or the state changed: answer what can be answered now."""
        run = self._run
        if run.state is not State.READY or not len(run.parking):
            return
        for parked in run.parking.take(lambda entry: isinstance(entry.request, Sample)):
            assert isinstance(parked.request, Sample)
            if self._run.refill.sampling_pause:
                run.parking.park(
                    Parked(parked.peer, parked.request_id, parked.request, parked.arrived, parked.deadline)
                )
                continue
            try:
                self._answer(parked.peer, parked.request_id, parked.request)
            except OdsError as error:
                run.refuse(parked.peer, parked.request_id, error)

    def missed(self, parked: Parked) -> RequestTimeoutError:
        """The error for a sample that waited in vain: what is missing, in words."""
        assert isinstance(parked.request, Sample)
        sample = parked.request
        held = self._run.refill.sampling_pause if self._run.state is State.READY else ""
        missing = held or f"0 of {sample.batch_size} windows of {sample.length} steps: {self._run.holdings()}"
        return RequestTimeoutError(
            f"no batch within {parked.timeout:g} s: {missing}",
            operation="sample_batch_with_context" if sample.history else "sample_batch",
            timeout=parked.timeout,
            missing=missing,
        )

    # --- leases -----------------------------------------------------------------------------------------------------

    def release(self, notice: Release, session: bytes) -> None:
        """Take leases back; what was never delivered returns to the budget."""
        self._spent([lease.lease_id for lease in self._run.store.release_all(notice.leases, session)])
        for lease_id in notice.leases:
            self._taken_back(lease_id, session)
        for lease_id in notice.undelivered:
            if self._run.store.release(lease_id, session) is not None:
                self._give_back(lease_id)
            sent = self._taken_back(lease_id, session)
            if sent is not None:
                self._run.budget.refund(sent.receipt)

    def _taken_back(self, lease_id: int, session: bytes) -> _Sent | None:
        sent = self._sent.get(lease_id)
        return self._sent.pop(lease_id) if sent is not None and sent.session == session else None

    def heard(self, session: bytes) -> None:
        """The session asks something new, so it has got, or given up before, what it was answered last."""
        self._unheard.pop(session, None)
        self._decide(session, heard=True)

    def cancelled(self, session: bytes, request_id: int = 0) -> None:
        """The session gave ``request_id`` up (0: its last request) before the answer came: nobody ever has that batch.

        Who gives up another request, one that never arrived here, has been given the answer before that.
        """
        unheard = self._unheard.pop(session, None)
        # Of a batch that is still being copied, nobody will hear either.
        self._decide(session, heard=False, request_id=request_id)
        if unheard is not None and request_id in (0, unheard.request_id):
            self.release(Release((), unheard.leases), session)
            if unheard.receipt is not None:
                self._run.budget.refund(unheard.receipt)

    def _decide(self, session: bytes, *, heard: bool, request_id: int = 0) -> None:
        for lease_id, (asker, asked) in self._frames.items():
            if asker == session:
                self._fates.setdefault(lease_id, heard or request_id not in (0, asked))

    def lost(self, answer: object, session: bytes) -> None:
        """An answer could not be sent: nobody has it, so its leases end and the budget gets its windows back."""
        if isinstance(answer, Plans):
            self.release(Release((), tuple(plan.lease_id for plan in answer.plans)), session)

    def gathered(self, lease_id: int, error: str) -> None:
        """A frame left (or did not, for the reason in ``error``)."""
        session, request_id = self._frames.pop(lease_id, (None, 0))
        if session is not None:
            lease = (lease_id,)
            heard = self._fates.pop(lease_id, None)
            undelivered = error != "" or heard is False
            receipt = self._booked.get(lease_id)
            self.release(Release((), lease) if undelivered else Release(lease, ()), session)
            until = self._run.now.seconds + self._run.settings.lease_seconds
            if not undelivered and heard is None:
                self._unheard[session] = _Unheard(request_id, (), receipt, until)
            if not undelivered and receipt is not None:
                self._sent[lease_id] = _Sent(session, receipt, until)

    def expire(self) -> None:
        """End leases whose deadline passed. They may have been delivered: the budget keeps them as spent."""
        self._spent([lease.lease_id for lease in self._run.store.expire(self._run.now.seconds)])
        now = self._run.now.seconds
        for session in [session for session, unheard in self._unheard.items() if unheard.until <= now]:
            del self._unheard[session]
        while self._sent and (first := next(iter(self._sent))) and self._sent[first].until <= now:
            del self._sent[first]

    # --- inside -----------------------------------------------------------------------------------------------------

    def _park(self, peer: Peer, request_id: int, sample: Sample, timeout: float) -> None:
        now = self._run.now.seconds
        self._run.park(Parked(peer, request_id, sample, now, now + timeout))

    def _answer(self, peer: Peer, request_id: int, sample: Sample) -> None:
        run = self._run
        if sample.frame:
            self._check_frame_size(sample)
        else:
            check_plan_bytes(sample, run.settings.limits)
        open_leases = len(run.store.leases_of(peer.identity))
        if open_leases + sample.count > run.settings.limits.leases_per_session:
            limit = run.settings.limits.leases_per_session
            raise LimitExceededError(
                f"this connection holds {open_leases} leases and asks for {sample.count} more; release what is copied",
                what="leases_per_session",
                size=open_leases + sample.count,
                limit=limit,
            )
        plans = self._plans(sample, peer.identity, self._room_for_spares(sample, open_leases))
        language = run.language.sizes
        if sample.frame:
            self._frames[plans[0].lease_id] = peer.identity, request_id
            run.do(GatherFrame(peer, request_id, plans[0], language))
        else:
            leases = tuple(plan.lease_id for plan in plans)
            until = run.now.seconds + run.settings.lease_seconds
            self._unheard[peer.identity] = _Unheard(request_id, leases, None, until)
            run.answer(peer, request_id, Plans(tuple(plans), language, run.edition))

    def _room_for_spares(self, sample: Sample, open_leases: int) -> int:
        """How many spare plans may be added where it makes no difference when a window is drawn, else 0."""
        limits = self._run.settings.limits
        if not sample.spare or sample.frame or sample.seed is not None or self._run.refill.counts_draws:
            return 0
        most = min(most_plans(sample, limits), limits.leases_per_session - open_leases)
        return max(0, min(sample.spare, most - sample.count))

    def _plans(self, sample: Sample, session: bytes, room: int) -> list[Plan]:
        together = self._planned_together(sample, room)
        if together is not None:
            return self._leased(sample, together, session)
        plans: list[Plan] = []
        for turn in range(sample.count):
            seed = None if sample.seed is None else [sample.seed, turn]
            rng = self._run.rng if seed is None else np.random.Generator(np.random.PCG64(seed))
            try:
                plans += self._leased(sample, self._planned(sample, sample.batch_size, rng), session)
            except DataUnavailableError:
                if not plans:
                    raise
                break
        return plans

    def _planned_together(self, sample: Sample, room: int) -> WindowPlan | None:
        """The windows of several batches in one go, which costs little more than one; None: plan them one by one.

        A window is drawn without regard to which batch it is for. Spare plans are left out where budgets are scarce:
        they would keep windows from others who ask meanwhile.
        """
        count, n = sample.count, sample.batch_size
        if sample.seed is not None or count + room == 1:
            return None
        try:
            windows = self._planned(sample, n * (count + room), self._run.rng)
        except OdsError:  # there may be enough for fewer, and if not, the error is about those
            return None
        if room and not self._run.budget.ample(windows.rows, AMPLE_BATCHES * n):
            return windows.part(0, n * count)
        return windows

    def _planned(self, sample: Sample, n: int, rng: np.random.Generator) -> WindowPlan:
        run = self._run
        remaining = run.budget.remaining_by_row
        if not sample.history:
            return plan_windows(run.index, n, sample.length, sample.mode, rng, remaining)
        return plan_contexts(
            run.index,
            n,
            sample.history,
            sample.horizon,
            sample.mode,
            rng,
            generations=sample.generations,
            remaining=remaining,
        )

    def _leased(self, sample: Sample, windows: WindowPlan, session: bytes) -> list[Plan]:
        """One plan for each batch of the windows; those beyond what was asked for are spare."""
        run, n = self._run, sample.batch_size
        count = len(windows) // n
        # Booking may refuse; a lease made before would have no owner then.
        receipts = [run.budget.book(windows.rows[turn * n : turn * n + n]) for turn in range(count)]
        deadline = NEVER if sample.frame else run.now.seconds + run.settings.lease_seconds
        lease_ids = run.store.lease_each(windows.rows, count, session, deadline)
        if run.budget.enabled:
            self._booked.update(
                (lease, receipt) for lease, receipt in zip(lease_ids, receipts, strict=True) if receipt is not None
            )
        asked = min(count, sample.count)
        self._count(asked, asked * n)
        self._spares.update((lease_id, n) for lease_id in lease_ids[asked:])
        return windows.to_messages(lease_ids, run.store.stamps_of(windows.rows))

    def _count(self, batches: int, windows: int) -> None:
        self.sampled_windows += windows
        self.sampled_batches += batches
        self._run.refill.drawn(windows)

    def _spent(self, lease_ids: Sequence[int]) -> None:
        spare = [windows for lease_id in lease_ids if (windows := self._spares.pop(lease_id, None)) is not None]
        if spare:
            self._count(len(spare), sum(spare))
        for lease_id in lease_ids:
            self._booked.pop(lease_id, None)

    def _give_back(self, lease_id: int) -> None:
        self._spares.pop(lease_id, None)
        receipt = self._booked.pop(lease_id, None)
        if receipt is not None:
            self._run.budget.refund(receipt)

    def _check_frame_size(self, sample: Sample) -> None:
        run = self._run
        assert run.schema is not None
        nbytes = (run.schema.step_nbytes + 1) * sample.batch_size * sample.length
        limit = run.settings.limits.batch_bytes
        if nbytes > limit:
            raise LimitExceededError(
                f"a batch of {sample.batch_size} windows of {sample.length} steps is {nbytes} bytes as one frame; the "
                f"broker sends at most {limit}: ask for a smaller batch, or use shared memory on the broker's host",
                what="batch_bytes",
                size=nbytes,
                limit=limit,
            )
