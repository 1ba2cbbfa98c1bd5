"""Workers joining, failing, falling silent and leaving, and what that means for the run (B10, B12)."""

from __future__ import annotations

from ods_async.core import events
from ods_async.core.episode import recorded_schema
from ods_async.core.production import ProductionDesk
from ods_async.core.reports import Goodbye, Heartbeat, Hello, Report, TicketStarted, Verdict, WorkerFailed
from ods_async.core.requests import Limits, ReportExit
from ods_async.core.roster import WorkerRecord
from ods_async.core.run import Run
from ods_async.core.schema import ANNOTATIONS, PROVENANCE, RECORDED, EpisodeSchema, FieldSpec
from ods_async.core.stimuli import Announce, CreateBuffer
from ods_async.errors import LimitExceededError, OdsError, OnlineDataWorkerError, SchemaMismatchError, WorkerExitedError

__all__ = ["HELLO_REFUSED", "HELLO_WANTED", "Workforce"]

LAST_WORDS_REMEMBERED = 256
HELLO_REFUSED = -1
"""The ticket id in a verdict that refuses a worker's hello."""
HELLO_WANTED = -2
"""The ticket id in a verdict that asks a worker to say hello again: the broker hears it and does not know it."""

MAKING = "make"
"""The phase in the heartbeats of a worker that is still making its environment."""


class Workforce:
    """Takes reports from workers and from whoever watches their processes."""

    def __init__(self, run: Run, production: ProductionDesk) -> None:
        self._run = run
        self._production = production
        self._last_words: dict[str, OdsError] = {}

    # --- reports ----------------------------------------------------------------------------------------------------

    def reported(self, report: Report) -> None:
        """A worker said something that is no rollout."""
        if isinstance(report, Hello):
            self._hello(report)
            return
        record = self.heard(report.worker_id)
        if isinstance(report, TicketStarted):
            if self._run.tickets.started(report.ticket_id, report.worker_id, self._run.now.seconds) and record:
                record.ticket_id = report.ticket_id
        elif isinstance(report, Heartbeat):
            if record is not None:
                record.ticket_id = report.ticket_id
            unknown = record is None or record.ended or (record.state == "starting" and report.phase != MAKING)
            if unknown and self._run.alive:
                # Its hello was lost on the way (a socket that reconnects by itself tells nobody what it dropped), or
                # the last words of its predecessor came after it. A process that is gone hears nothing.
                what = "say hello again"
                self._run.do(Announce(Verdict(HELLO_WANTED, report.worker_id, "unknown", what)))
        elif isinstance(report, WorkerFailed):
            self._failed(report)
        elif isinstance(report, Goodbye):
            self._goodbye(report)

    def heard(self, worker_id: str) -> WorkerRecord | None:
        """A sign of life."""
        record, back = self._run.roster.heard(worker_id, self._run.now.seconds)
        if back:
            self._run.emit(events.WorkerReturned, worker_id=worker_id)
        return record

    def exited(self, exit_: ReportExit) -> None:
        """A local worker's process ended, says the one who watches it (who may say so late, or twice)."""
        run = self._run
        record = run.roster.get(exit_.worker_id)
        if record is None:
            record = run.roster.never_heard(exit_.worker_id, run.now.seconds)
        if exit_.pid:
            if record.exited_pid == exit_.pid:
                return
            record.exited_pid = exit_.pid
        replaced = exit_.pid not in (0, record.pid) and not record.ended
        spoke = exit_.worker_id in self._last_words if replaced else record.failed
        left = record.said_goodbye
        run.emit(events.WorkerExited, worker_id=exit_.worker_id, exit_code=exit_.exit_code)
        if not replaced:
            run.roster.leave(exit_.worker_id)
            self._production.reissue(run.tickets.abandon(exit_.worker_id, f"{exit_.worker_id} exited"))
        if exit_.will_restart:
            record.restarts += 1
            run.emit(events.WorkerRestarted, worker_id=exit_.worker_id, restarts=record.restarts)
        if not run.alive and exit_.exit_code == 0:
            return
        if left and exit_.exit_code == 0 and exit_.worker_id not in run.settings.supervised:
            return
        how = f"exit code {exit_.exit_code}" if exit_.exit_code >= 0 else f"signal {-exit_.exit_code}"
        error: OdsError = WorkerExitedError(
            f"worker {exit_.worker_id} ended unexpectedly ({how})",
            worker_id=exit_.worker_id,
            exit_code=exit_.exit_code,
        )
        if spoke:
            error = self._last_words.get(exit_.worker_id, error)
        else:
            record.failures += 1
            run.report_worker_failure(exit_.worker_id, "process", None, error)
        if run.settings.worker_failure == "fail" and not exit_.will_restart:
            self._end_run(error)

    # --- time -------------------------------------------------------------------------------------------------------

    def look_for_silence(self) -> None:
        """Workers not heard for too long are stalled; their tickets go to others. Much later they are gone."""
        run = self._run
        now = run.now.seconds
        for record in run.roster.newly_silent(now):
            silent_for = round(now - record.last_heard, 3)
            run.emit(events.WorkerStalled, worker_id=record.worker_id, silent_for=silent_for)
            reason = f"{record.worker_id} silent for {silent_for:g} s"
            self._production.reissue(run.tickets.abandon(record.worker_id, reason))
            record.ticket_id = None
            watched = record.worker_id in run.settings.supervised
            if run.settings.worker_failure == "fail" and not watched and run.alive:
                error = WorkerExitedError(
                    f"worker {record.worker_id} on {record.host} has been silent for {silent_for:g} s",
                    worker_id=record.worker_id,
                    exit_code=None,
                )
                run.report_worker_failure(record.worker_id, "silence", None, error)
                run.fail(error)
        for record in run.roster.long_silent(now):
            run.emit(events.WorkerLeft, worker_id=record.worker_id, reason="silent for too long")

    # --- inside -----------------------------------------------------------------------------------------------------

    def _hello(self, hello: Hello) -> None:
        run = self._run
        old = run.roster.get(hello.worker_id)
        if old is not None and old.ended and old.exited_pid == hello.pid != 0 and old.host in ("", hello.host):
            return  # said before its end, the news of which came by another way, and faster
        if old is None and run.roster.present >= run.settings.limits.sessions:
            limit = run.settings.limits.sessions
            run.reject("rollouts", f"a hello of one more worker than the {limit} that are allowed (sessions)")
            return
        record = run.roster.hello(hello, run.now.seconds)
        if old is not None and not old.is_process(hello.host, hello.pid):
            reason = f"{hello.worker_id} is another process now"
            self._production.reissue(run.tickets.abandon(hello.worker_id, reason))
        if not hello.fields:
            return
        refused = self._hello_refused(hello)
        if refused is not None:
            run.roster.leave(hello.worker_id)
            record.failures += 1
            record.failed = True
            self._remember_last_words(hello.worker_id, refused)
            run.do(Announce(Verdict(HELLO_REFUSED, hello.worker_id, "refused", str(refused))))
            run.report_worker_failure(hello.worker_id, "make", None, refused)
            if run.settings.worker_failure == "fail":
                run.fail(refused)
            return
        if not record.told_ready:
            record.told_ready = True
            run.emit(
                events.WorkerJoined,
                worker_id=hello.worker_id,
                host=hello.host,
                pid=hello.pid,
                environment=hello.environment,
            )
        self._production.advance()

    def _hello_refused(self, hello: Hello) -> OdsError | None:
        """Why the worker cannot work here; None when it can. The first good hello defines the buffer."""
        run = self._run
        if hello.num_envs != run.settings.num_envs:
            return SchemaMismatchError(
                f"worker {hello.worker_id} makes {hello.num_envs} environments, the broker was told of "
                f"{run.settings.num_envs}; set gym_config['num_envs'] alike for both",
                field="num_envs",
                expected=str(run.settings.num_envs),
                found=str(hello.num_envs),
            )
        try:
            _check_size(hello, run.settings.limits)
            recorded = _schema_of(hello)
            schema = recorded + ANNOTATIONS + (PROVENANCE if run.settings.include_provenance else ())
        except (SchemaMismatchError, LimitExceededError) as error:
            return error
        if run.recorded is None:
            run.recorded, run.schema = recorded, schema
            run.do(CreateBuffer(schema, run.settings.rows, run.settings.max_episode_steps))
            return None
        return _difference(hello.worker_id, run.recorded, recorded)

    def _remember_last_words(self, worker_id: str, error: OdsError) -> None:
        self._last_words[worker_id] = error
        while len(self._last_words) > LAST_WORDS_REMEMBERED:
            self._last_words.pop(next(iter(self._last_words)))

    def _failed(self, report: WorkerFailed) -> None:
        run = self._run
        where = report.phase + (f" at step {report.step}" if report.step is not None else "")
        error = OnlineDataWorkerError(
            f"worker {report.worker_id} failed in {where}: {report.type_name}: {report.message}",
            module=report.module,
            type_name=report.type_name,
            detail=report.message,
            traceback_text=report.traceback_text,
            worker_id=report.worker_id,
            phase=report.phase,
            step=report.step,
        )
        record = run.roster.get(report.worker_id)
        if record is not None:
            record.failures += 1
            record.failed = True
        self._remember_last_words(report.worker_id, error)
        run.roster.leave(report.worker_id)
        run.report_worker_failure(report.worker_id, report.phase, report.step, error)
        reason = f"{report.worker_id} failed: {report.type_name}"
        self._production.reissue(run.tickets.abandon(report.worker_id, reason))
        watched = report.worker_id in run.settings.supervised
        if not run.alive:
            self._end_run(error)
        elif run.settings.worker_failure == "fail" and not (watched and run.settings.max_worker_restarts):
            run.fail(error)

    def _end_run(self, error: OdsError) -> None:
        """Fail the run; after a stop the failure (of ``close``, say) is kept for the answer to it."""
        run = self._run
        if run.alive:
            run.fail(error)
        elif run.failure is None:
            run.failure = error

    def _goodbye(self, goodbye: Goodbye) -> None:
        run = self._run
        record = run.roster.get(goodbye.worker_id)
        if record is None or record.state == "gone":
            return
        record.said_goodbye = True
        run.roster.leave(goodbye.worker_id)
        run.emit(events.WorkerLeft, worker_id=goodbye.worker_id, reason=goodbye.reason[:500])
        self._production.reissue(run.tickets.abandon(goodbye.worker_id, f"{goodbye.worker_id} left"))


def _check_size(hello: Hello, limits: Limits) -> None:
    deepest = max((len(field.path) for field in hello.fields), default=0)
    for what, things, size, limit in (
        ("schema_fields", "fields", len(hello.fields), limits.schema_fields),
        ("nesting", "levels of fields", deepest, limits.nesting),
    ):
        if size > limit:
            raise LimitExceededError(
                f"worker {hello.worker_id} records {size} {things}, the broker takes at most {limit} ({what})",
                what=what,
                size=size,
                limit=limit,
            )


def _schema_of(hello: Hello) -> EpisodeSchema:
    fields = tuple(FieldSpec(f.path, f.dtype, f.shape, f.pad) for f in hello.fields)
    own = fields[: -len(RECORDED)]
    if fields[-len(RECORDED) :] != RECORDED:
        raise SchemaMismatchError(
            f"worker {hello.worker_id} does not record {', '.join(f.text for f in RECORDED)} as its last fields",
            field="recorded fields",
            expected=", ".join(f.text for f in RECORDED),
            found=", ".join(f.text for f in fields[-len(RECORDED) :]),
        )
    return recorded_schema(own)


def _difference(worker_id: str, expected: EpisodeSchema, found: EpisodeSchema) -> SchemaMismatchError | None:
    if expected == found:
        return None
    ours, theirs = {f.path: f.text for f in expected}, {f.path: f.text for f in found}
    for path in [*ours, *theirs]:
        if ours.get(path) != theirs.get(path):
            wanted, got = ours.get(path, "no such field"), theirs.get(path, "no such field")
            return SchemaMismatchError(
                f"worker {worker_id} records other data than the first worker: expected {wanted}, found {got}; all "
                "workers of a run need the same environment",
                field="/".join(path),
                expected=wanted,
                found=got,
            )
    return SchemaMismatchError(
        f"worker {worker_id} records the same fields in another order than the first worker",
        field="order",
        expected=", ".join(ours.values()),
        found=", ".join(theirs.values()),
    )
