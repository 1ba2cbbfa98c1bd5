"""What a client says to a broker, verb by verb, as conversations. Pure: no socket, no clock, no thread.

A conversation is a generator. It yields what must be done next (:class:`Ask` a question, :class:`Do` a piece of work)
and is sent the outcome, or has the error thrown into it. The blocking and the asyncio client drive the very same
conversations; the tests drive them without a port.

A conversation runs in a :class:`~ods_async.client.session.Session`: one socket of the client, which the broker knows by
its identity. Leases belong to the session that got them, so it is the session that remembers which to hand back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, Generic, Protocol, TypeVar

from ods_async.client.session import MOST_SPARES, Session
from ods_async.core.language import KINDS, LanguageRegistry
from ods_async.core.requests import (
    Answer,
    Batch,
    BufferDescription,
    Connect,
    Describe,
    Drain,
    GetLanguage,
    LanguageEntries,
    Plan,
    Plans,
    Records,
    Request,
    Sample,
    Welcome,
)
from ods_async.errors import (
    ArgumentError,
    BrokerUnreachableError,
    OdsError,
    OwnerOnlyError,
    ProtocolError,
    RequestTimeoutError,
    RunChangedError,
    SessionLostError,
)
from ods_async.wire.asking import Answered
from ods_async.wire.messages import PROTOCOL

__all__ = ["LARGE_BYTES", "Ask", "Do", "Exchange", "Known", "Memory", "Step", "Talk"]

A = TypeVar("A")
B = TypeVar("B")
B_co = TypeVar("B_co", covariant=True)


LARGE_BYTES: Final = 1_000_000  # copying more than this takes long: it is done in a thread beside an asyncio loop
GATHERED_TOGETHER: Final = 8  # batches: without the interpreter, so that who takes them need not wait for it meanwhile
FEW_SPARES: Final = 3  # of larger batches: copying takes longer than asking, and their rows are held meanwhile


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the broker. ``limit`` bounds the wait further than the call's own deadline, in seconds.

    ``meanwhile`` is work that the answer will need: whoever carries the conversation out may do it while the answer is
    on its way, or leave it.
    """

    request: Request
    limit: float | None = None
    meanwhile: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Do:
    """Do a piece of work that touches about ``nbytes`` bytes, and send back what it returns."""

    work: Callable[[], object]
    nbytes: int = 0


Step = Ask | Do
Talk = Generator[Step, Any, A]


class Memory(Protocol[B_co]):
    """How batches of some type come into being: out of shared memory, or over a received frame."""

    @property
    def shared(self) -> bool:
        """Whether plans can be carried out here; else the bytes themselves must be asked for."""

    @property
    def edition(self) -> int | None:
        """The number of what can be drawn from the buffer now; None where that cannot be seen."""

    def nbytes(self, batch_size: int, length: int, history: int) -> int:
        """Bytes of such a batch."""

    def prepare(self, batch_size: int, length: int, history: int, landing: object) -> object:
        """Memory for one such batch and all that can be made of it before its plan is known."""

    def gather(self, plans: Sequence[Plan], landing: object, prepared: Sequence[object] = ()) -> Sequence[B_co | None]:
        """The batches of ``plans``, alike in size, in what was prepared first; None where a row changed meanwhile."""

    def wrap(self, answer: Batch, payload: bytes | memoryview, landing: object) -> B_co:
        """The batch in ``payload``."""

    def close(self) -> None:
        """Let go of the memory; batches stay valid."""


@dataclass(slots=True)
class Known(Generic[B]):
    """What is known about one run of the broker; all sessions of a client share it."""

    welcome: Welcome
    memory: Memory[B] | None = None
    language: LanguageRegistry = field(default_factory=LanguageRegistry)
    drained: int = 0  # lifecycle records numbered below this were received

    def words(self, kind: str) -> int:
        """How many entries of that kind are known."""
        return self.language.sizes[KINDS.index(kind)]


class Exchange(Generic[B]):
    """The conversations of one client.

    Args:
        endpoint: what was dialled, for the broker and for messages.
        role: "consumer" or "owner".
        name: how the broker calls this client when it speaks to people.
        owner: the owner's token, or None for a plain consumer.
        connect_timeout: seconds within which a broker must answer the first words.
        make_memory: opens the buffer that the broker describes (may take a while and may fail).
        guard: a lock, where several threads drive conversations of this exchange.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        role: str,
        name: str,
        owner: bytes | None,
        connect_timeout: float,
        make_memory: Callable[[Welcome, BufferDescription], Memory[B]],
        guard: AbstractContextManager[object] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.owner = owner
        self.known: Known[B] | None = None
        self.redrawn = 0
        self._role = role
        self._name = name
        self._connect_timeout = connect_timeout
        self._make_memory = make_memory
        self._guard = nullcontext() if guard is None else guard
        self._records: list[dict[str, object]] = []  # received, and not handed to the caller yet

    # --- getting acquainted -----------------------------------------------------------------------------------------

    def greet(self, session: Session) -> Talk[Known[B]]:
        """Say hello, once per session, and learn about the run.

        Raises:
            BrokerUnreachableError: nobody answers.
            RunChangedError: another run answers than the one known so far; the next call speaks with the new one.
            ProtocolError: the broker speaks another version.
        """
        if session.greeted and self.known is not None:
            return self.known
        hello = Connect(via=self.endpoint, role=self._role, name=self._name, protocol=PROTOCOL)
        try:
            answered = yield Ask(hello, self._connect_timeout)
        except BrokerUnreachableError:
            raise
        except RequestTimeoutError as error:
            if self.known is not None and error.timeout < self._connect_timeout:
                raise  # the caller's own time was up; a broker that was heard before may well be there
            raise BrokerUnreachableError(
                f"no broker answers at {self.endpoint} within {error.timeout:.3g} s; is it running, and is the "
                "address right?",
                endpoint=self.endpoint,
                timeout=error.timeout,
            ) from None
        welcome = _expect(answered.answer, Welcome)
        if welcome.protocol != PROTOCOL:
            raise ProtocolError(
                f"the broker at {self.endpoint} ({welcome.server}) speaks protocol {welcome.protocol}, this client "
                f"protocol {PROTOCOL}; install the same version on both sides",
                reason="protocol version",
            )
        session.greeted = True
        known = self.known
        if known is None:
            known = self.known = Known(welcome)
        elif known.welcome.run_id != welcome.run_id:
            old = known.welcome.run_id
            if known.memory is not None:
                known.memory.close()
            self.known = Known(welcome)
            raise RunChangedError(
                f"the broker at {self.endpoint} was restarted: run {old} ended and run {welcome.run_id} answers; "
                "the next call draws from the new run",
                endpoint=self.endpoint,
                old_run_id=old,
                new_run_id=welcome.run_id,
            )
        else:
            known.welcome = welcome
        return known

    def ready(self, session: Session) -> Talk[tuple[Known[B], Memory[B]]]:
        """Be acquainted and know the buffer; waits until the first worker has said what it records."""
        known = yield from self.greet(session)
        memory = known.memory
        if memory is None:
            answered = yield from self._ask(session, Describe())
            description = _expect(answered.answer, BufferDescription)
            made = yield Do(lambda: self._make_memory(known.welcome, description))
            memory = known.memory = made
        return known, memory

    def _ask(self, session: Session, request: Request, meanwhile: Callable[[], None] | None = None) -> Talk[Answered]:
        """Ask; where the broker has forgotten this connection, say hello and ask again."""
        answered: Answered
        try:
            answered = yield Ask(request, None, meanwhile)
        except SessionLostError:
            session.greeted = False
            session.forget_spares()
            yield from self.greet(session)
            answered = yield Ask(request)
        return answered

    # --- verbs ------------------------------------------------------------------------------------------------------

    def plain(self, session: Session, request: Request, expected: type[A]) -> Talk[A]:
        """Ask one question and return its answer, which must be of class ``expected``."""
        yield from self.greet(session)
        answered = yield from self._ask(session, request)
        return _expect(answered.answer, expected)

    def drain(self, session: Session, limit: int) -> Talk[list[dict[str, object]]]:
        """The next lifecycle records, oldest first, at most ``limit``; each is returned by exactly one call.

        The broker lets go of what was received only when it is told so by the next question, hence the last one, which
        brings nothing. Whatever goes wrong on the way, records that came are kept for the next call.

        Raises:
            OwnerOnlyError: this client is not the owner's.
        """
        owner = self.owned("drain_lifecycle_events")
        more = True
        while more:
            try:
                known = yield from self.greet(session)
                wanted = max(0, limit - len(self._records))
                answered = yield from self._ask(session, Drain(owner, wanted, known.drained))
                more = self._keep_records(known, _expect(answered.answer, Records))
            except (OdsError, TimeoutError):
                if not self._records:
                    raise
                break
        with self._guard:
            taken, self._records = self._records[:limit], self._records[limit:]
        return taken

    def _keep_records(self, known: Known[B], records: Records) -> bool:
        """Keep the records that are new; whether there were any in the answer."""
        with self._guard:  # two calls at once may have asked for the same ones
            for record in records.events:
                sequence = record.get("sequence")
                if type(sequence) is not int:
                    raise ProtocolError("a lifecycle record without a number", reason="lifecycle record")
                if sequence >= known.drained:
                    self._records.append(record)
                    known.drained = sequence + 1
        return bool(records.events)

    def left_over(self, pending: list[dict[str, object]]) -> list[dict[str, object]]:
        """What no :meth:`drain` returned of a run that is over; ``pending`` is what its broker held at the end."""
        if self.known is None:
            return pending
        self._keep_records(self.known, Records(tuple(pending), 0, 0))
        with self._guard:
            left, self._records = self._records, []
        return left

    def owned(self, operation: str) -> bytes:
        """The owner's token.

        Raises:
            OwnerOnlyError: this client has none.
        """
        if self.owner is None:
            raise OwnerOnlyError(
                f"{operation} is for the owner of the service only, and this client of {self.endpoint} has no owner "
                "token; call it on the engine that started the service, or give the client owner=",
                operation=operation,
            )
        return self.owner

    def sample(self, session: Session, wanted: Sample, landing: object) -> Talk[B]:
        """One batch, drawn again when a row changed while it was copied.

        Who draws alike again and again gets a few plans more with each answer, for the next calls. They are good for as
        long as the segment shows the edition of the buffer that they were drawn from: until then a draw at the time of
        the call would choose in the same way among the same windows.
        """
        while True:
            batch = yield from self._from_spare(session, wanted, landing)
            if batch is not None:
                return batch
            batches = yield from self.draw(session, wanted, landing, session.spares_for(wanted))
            for lease, batch in batches:
                if lease is not None:
                    session.finished.append(lease)
                return batch

    def _from_spare(self, session: Session, wanted: Sample, landing: object) -> Talk[B | None]:
        """The batch of a plan that came with an earlier one, or None when there is none that is still good."""
        known = self.known
        if known is None or known.memory is None:
            return None
        memory = known.memory
        plan = session.spare(wanted, known, memory.edition)
        if plan is None:
            return None
        try:
            nbytes = memory.nbytes(wanted.batch_size, wanted.length, wanted.history)
            batches: list[B | None] = yield Do(_bound(memory.gather, (plan,), landing), nbytes)
        except BaseException:
            session.undelivered.append(plan.lease_id)
            raise
        (batch,) = batches
        if batch is None:
            self.redrawn += 1
            session.overslept = True
            session.undelivered.append(plan.lease_id)
        else:
            session.finished.append(plan.lease_id)
        return batch

    def draw(
        self, session: Session, wanted: Sample, landing: object, spare: int = 0
    ) -> Talk[list[tuple[int | None, B]]]:
        """Up to ``wanted.count`` batches, each with the lease to hand back when it has been delivered (None: none).

        A batch whose rows changed while they were copied is handed back as undelivered and left out. Up to ``spare``
        plans more are kept in the session, for :meth:`sample`.
        """
        known, memory = yield from self.ready(session)
        session.drop_spares()
        release, undelivered = session.take()
        request = Sample(
            batch_size=wanted.batch_size,
            length=wanted.length,
            mode=wanted.mode,
            history=wanted.history,
            horizon=wanted.horizon,
            generations=wanted.generations,
            seed=wanted.seed,
            count=wanted.count if memory.shared else 1,
            frame=not memory.shared,
            release=release,
            undelivered=undelivered,
            spare=min(spare, self._most_spares(memory, wanted)) if spare else 0,
        )
        prepared: list[object] = []

        def prepare() -> None:
            prepared.append(memory.prepare(wanted.batch_size, wanted.length, wanted.history, landing))

        answered = yield from self._ask(session, request, prepare if memory.shared else None)
        session.overslept = False
        answer = answered.answer
        if isinstance(answer, Batch):
            _check_shape(answer, wanted)
            # Without budgets nobody minds whether a batch that left was delivered.
            frame = answer.lease_id if known.welcome.settings.get("episode_sample_budget") is not None else None
            try:
                batch = yield Do(_bound(memory.wrap, answer, answered.payload, landing))
                yield from self._learn_new(session, known, answer.language)
            except BaseException:
                session.undelivered += [] if frame is None else [frame]
                raise
            return [(frame, batch)]
        plans = _expect(answer, Plans)
        open_leases = [plan.lease_id for plan in plans.plans]
        drawn: list[tuple[int | None, B]] = []
        nbytes = memory.nbytes(wanted.batch_size, wanted.length, wanted.history)
        try:
            for plan in plans.plans:
                _check_shape(plan, wanted)
            now = plans.plans[: wanted.count]
            for begin in range(0, len(now), GATHERED_TOGETHER):
                some = now[begin : begin + GATHERED_TOGETHER]
                batches = yield Do(_bound(memory.gather, some, landing, tuple(prepared)), nbytes * len(some))
                prepared.clear()
                for plan, batch in zip(some, batches, strict=True):
                    if batch is None:
                        self.redrawn += 1
                        session.overslept = True
                        open_leases.remove(plan.lease_id)
                        session.undelivered.append(plan.lease_id)
                    else:
                        drawn.append((plan.lease_id, batch))
            yield from self._learn_new(session, known, plans.language)
        except BaseException:
            session.undelivered += open_leases
            raise
        session.keep(wanted, known, plans.plans[wanted.count :], plans.edition)
        return drawn

    @staticmethod
    def _most_spares(memory: Memory[B], wanted: Sample) -> int:
        """How many plans may be kept for later: none where the buffer's edition cannot be seen."""
        if wanted.seed is not None or memory.edition is None:
            return 0
        large = memory.nbytes(wanted.batch_size, wanted.length, wanted.history) > LARGE_BYTES
        return FEW_SPARES if large else MOST_SPARES

    # --- language ---------------------------------------------------------------------------------------------------

    def _learn_new(self, session: Session, known: Known[B], sizes: tuple[int, int]) -> Talk[None]:
        """Fetch new dictionary entries now, so that they can be looked up when the broker is gone.

        The batch at hand is worth more than its words: trouble is left to :meth:`resolve`, which asks again.
        """
        for kind, size in zip(KINDS, sizes, strict=True):
            if known.words(kind) < size:
                try:
                    yield from self._fetch(session, known, kind, size)
                except (OdsError, TimeoutError):
                    return

    def _fetch(self, session: Session, known: Known[B], kind: str, size: int) -> Talk[None]:
        """Ask for entries until ``size`` are known or the broker has no more."""
        held = known.words(kind)
        while held < size:
            answered = yield from self._ask(session, GetLanguage(kind, held))
            entries = _expect(answered.answer, LanguageEntries)
            try:
                with self._guard:  # several sessions may learn the same words at once
                    known.language.follow(kind, entries.since, entries.entries)
            except ArgumentError as error:
                raise ProtocolError(error.message, reason="language entries") from error
            if known.words(kind) == held:
                return
            held = known.words(kind)

    def language(self, session: Session, needed: Mapping[str, int]) -> Talk[None]:
        """Make sure that, per kind, that many entries are known, as far as the broker has them."""
        known = yield from self.greet(session)
        for kind, size in needed.items():
            yield from self._fetch(session, known, kind, size)


def _bound(work: Callable[..., object], *args: object) -> Callable[[], object]:
    return lambda: work(*args)


def _expect(answer: Answer, expected: type[A]) -> A:
    if not isinstance(answer, expected):
        raise ProtocolError(
            f"expected {expected.__name__} as the answer, got {type(answer).__name__}; the broker and this client do "
            "not speak the same protocol",
            reason="kind of answer",
        )
    return answer


def _check_shape(answer: Plan | Batch, wanted: Sample) -> None:
    found = answer.batch_size, answer.length, answer.history
    asked = wanted.batch_size, wanted.length, wanted.history
    if found != asked:
        raise ProtocolError(
            f"asked for {asked[0]} windows of {asked[1]} steps (history {asked[2]}), got {found[0]} of {found[1]} "
            f"(history {found[2]}); the broker and this client do not speak the same protocol",
            reason="shape of the batch",
        )
