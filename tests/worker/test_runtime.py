"""A worker against a broker that only listens: tickets, verdicts, failures, ends (B15, B19, C20, C25, C33, C34)."""

# A worker's failure is raised when its block is left, so that the block is what must raise.
# ruff: noqa: PT012
from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from typing import Any

import numpy as np
import pytest

from ods_async.config import OnlineDataEngineCfg
from ods_async.core.reports import (
    AttemptFailed,
    Goodbye,
    Heartbeat,
    Hello,
    RevokeTickets,
    RolloutReport,
    ShutDown,
    Ticket,
    TicketStarted,
    Verdict,
    WorkerFailed,
)
from ods_async.core.requests import Limits
from ods_async.core.schema import RECORDED
from ods_async.errors import (
    BrokerUnreachableError,
    ConfigError,
    LimitExceededError,
    OwnerOnlyError,
    RolloutRefusedError,
    SchemaMismatchError,
)
from ods_async.testing import COUNTING_ID, window_faults
from ods_async.wire.codec import encode_ticket
from ods_async.worker.runtime import Worker


def config(*, num_envs: int = 1, gym: dict[str, Any] | None = None, **settings: Any) -> OnlineDataEngineCfg:
    rows = {"id": COUNTING_ID, "num_envs": num_envs, **(gym or {})}
    kwargs = {"max_length": 9, **settings.pop("kwargs", {})}
    return OnlineDataEngineCfg(
        buffer_size=4, max_episode_steps=50, gym_config={**rows, "kwargs": kwargs}, **{"seed": 5, **settings}
    )


def worker(peer: Any, cfg: OnlineDataEngineCfg | None = None, **kwargs: Any) -> Worker:
    return Worker(cfg or config(), peer.endpoint, **{"worker_id": "w1", "flush_timeout": 5.0, **kwargs})


async def off(function: Any, *args: Any) -> Any:
    return await asyncio.to_thread(function, *args)


async def test_a_ticket_becomes_a_whole_rollout_of_one_episode_per_row(peer: Any) -> None:
    """B15: header, one payload, segments per row (B42), and the ticket's start before it."""
    async with worker(peer, config(num_envs=3)) as made:
        hello = await off(peer.ready)
        assert hello.num_envs == 3
        assert tuple(f.path for f in hello.fields[-len(RECORDED) :]) == tuple(f.path for f in RECORDED)
        peer.ticket(11)
        await off(peer.first, RolloutReport)
        (rollout,) = peer.rollouts
        assert (rollout.ticket_id, rollout.worker_id, rollout.attempts, len(rollout.episodes)) == (11, "w1", 1, 3)
        assert rollout.production_seconds > 0
        for episode in rollout.episodes:
            assert window_faults(episode.arrays) == ""
            assert [s.instruction for s in episode.segments] == [f"count part {i}" for i in range(3)]
            assert episode.segments[-1].end == episode.length
            assert episode.instruction == "count to the end"
        assert len({int(e.arrays["obs", "fingerprint"][0]) for e in rollout.episodes}) == 3
        kinds = [type(r) for r in peer.reports if not isinstance(r, Heartbeat)]
        assert kinds == [Hello, Hello, TicketStarted, RolloutReport]
    assert made.rollouts == 1
    assert peer.first(Goodbye).reason == "stopped"
    assert (made.failure, made.lost) == (None, ())


async def test_the_same_seed_and_ticket_make_another_episode_in_another_worker(make_peer: Any) -> None:
    prints = []
    for name in ("w1", "w2", "w1"):
        peer = make_peer()
        async with worker(peer, worker_id=name, max_rollouts=1) as made:
            peer.ticket(7)
            assert await made.wait(20) == 0
        prints.append(int(peer.rollouts[-1].episodes[0].arrays["obs", "fingerprint"][0]))
    assert prints[0] == prints[2] != prints[1]


async def test_a_unit_that_comes_back_is_made_anew(peer: Any) -> None:
    async with worker(peer):
        await off(peer.ready)
        peer.ticket(1, rollout=4)
        peer.ticket(2, rollout=4)
        await off(peer.first, RolloutReport, 2)
    assert len({int(r.episodes[0].arrays["obs", "fingerprint"][0]) for r in peer.rollouts}) == 2


async def test_b15_failed_tries_are_counted_and_never_handed_in(peer: Any) -> None:
    kwargs = {"fail_phase": "step", "fail_kind": "failure", "fail_step": 2, "fail_times": 2}
    async with worker(peer, config(kwargs=kwargs, max_generation_attempts=3)):
        await off(peer.ready)
        peer.ticket(5)
        await off(peer.first, RolloutReport)
    failed = peer.said(AttemptFailed)
    assert [(f.ticket_id, f.attempt, f.episodes, f.reason) for f in failed] == [
        (5, 1, 1, "failure"),
        (5, 2, 1, "failure"),
    ]
    assert [r.attempts for r in peer.rollouts] == [3]


async def test_b19_after_the_last_try_the_worker_fails_with_the_last_reason(peer: Any) -> None:
    cfg = config(kwargs={"fail_phase": "step", "fail_kind": "nan", "fail_step": 1}, max_generation_attempts=2)
    made = worker(peer, cfg)
    with pytest.raises(RuntimeError, match=r"rollout 3 of generation 1 .* in 2 attempts.*obs/state at step 2"):
        async with made:
            await off(peer.ready)
            peer.ticket(5, 3)
            assert await made.wait(20) == 1
    failed = peer.first(WorkerFailed)
    assert (failed.module, failed.type_name, failed.ticket_id) == ("builtins", "RuntimeError", 5)
    assert len(peer.said(AttemptFailed)) == 2
    assert peer.rollouts == []


@pytest.mark.parametrize(
    ("phase", "step"), [("make", None), ("reset", None), ("plan", 0), ("step", 7), ("close", None)]
)
async def test_c34_the_cause_of_a_failure_is_told(peer: Any, phase: str, step: int | None) -> None:
    kwargs = {"fail_phase": phase, "fail_step": 7, "min_length": 9}
    made = worker(peer, config(kwargs=kwargs), max_rollouts=1)
    with pytest.raises(RuntimeError, match=f"told to fail in {phase}"):
        async with made:
            peer.ticket(5)
            assert await made.wait(20) == 1
    failed = peer.first(WorkerFailed)
    assert (failed.worker_id, failed.phase, failed.step) == ("w1", phase, step)
    assert (failed.module, failed.type_name) == ("ods_async.testing.counting", "CountingError")
    assert failed.message.startswith(f"told to fail in {phase}")
    assert "counting.py" in failed.traceback_text
    assert "Traceback" in failed.traceback_text
    assert len(peer.rollouts) == (1 if phase == "close" else 0)
    assert peer.said(Goodbye) == []
    if step is not None:
        assert "the limit is 50 steps" in failed.traceback_text


async def test_b11_a_refused_observation_keeps_its_type_and_field(peer: Any) -> None:
    kwargs = {"fail_phase": "step", "fail_step": 1, "fail_kind": "shape", "min_length": 9}
    with pytest.raises(SchemaMismatchError, match="obs/state"):
        async with worker(peer, config(kwargs=kwargs)) as made:
            peer.ticket(5)
            await made.wait(20)
    failed = peer.first(WorkerFailed)
    assert (failed.type_name, failed.phase) == ("SchemaMismatchError", "step")


async def test_settings_that_do_not_fit_the_environment_end_the_worker_before_a_step(peer: Any) -> None:
    with pytest.raises(SchemaMismatchError, match="action_dim: expected 9"):
        async with worker(peer, config(action_dim=9)) as made:
            assert await made.wait(20) == 1
    assert peer.first(WorkerFailed).phase == "make"
    with pytest.raises(ConfigError, match="no_such_module"):
        async with worker(peer, config(gym={"policy": "no_such_module:x"})) as made:
            assert await made.wait(20) == 1
    assert not [hello for hello in peer.said(Hello) if hello.fields]


async def test_c33_heartbeats_go_on_while_a_step_is_slow(peer: Any) -> None:
    async with worker(peer, config(kwargs={"reset_delay": 1.0})):
        await off(peer.ready)
        peer.ticket(5)
        await off(peer.first, TicketStarted)
        await off(peer.first, RolloutReport)
    at = {type(r): t for r, t in zip(peer.reports, peer.times, strict=True)}
    during = [
        (r, t)
        for r, t in zip(peer.reports, peer.times, strict=True)
        if isinstance(r, Heartbeat) and at[TicketStarted] < t < at[RolloutReport]
    ]
    assert len(during) >= 8
    assert {(r.phase, r.ticket_id) for r, _ in during[1:-2]} == {("reset", 5)}
    assert max(b - a for (_, a), (_, b) in itertools.pairwise(during)) < 0.5


async def test_a_revoked_ticket_is_not_started(peer: Any) -> None:
    async with worker(peer, config(kwargs={"reset_delay": 0.4})):
        await off(peer.ready)
        for number in (1, 2, 3):
            peer.ticket(number)
        await off(peer.first, TicketStarted)
        peer.tell(RevokeTickets((2,)))
        await off(peer.first, RolloutReport, 2)
    assert [r.ticket_id for r in peer.rollouts] == [1, 3]


async def test_a_ticket_of_another_run_is_ignored(peer: Any) -> None:
    async with worker(peer):
        await off(peer.ready)
        peer.raw("push", [encode_ticket(Ticket(1, 1, 0, 1234))])
        peer.raw("push", [b"no ticket at all"])
        peer.ticket(2)
        await off(peer.first, RolloutReport)
    assert [r.ticket_id for r in peer.rollouts] == [2]


async def test_a_worker_that_hands_in_its_last_rollout_and_exits_loses_nothing(make_peer: Any) -> None:
    peer = make_peer(judge=False)
    made = worker(peer, max_rollouts=1, flush_timeout=20.0)
    async with made:
        await off(peer.ready)
        peer.ticket(9)
        await off(peer.first, RolloutReport)
        with pytest.raises(TimeoutError):
            await made.wait(0.5)
        peer.tell(Verdict(9, "w1", "accepted"))
        assert await made.wait(20) == 0
    assert made.lost == ()
    assert peer.first(Goodbye).reason == "all wanted rollouts are made"


async def test_a_worker_that_gives_up_waiting_for_a_verdict_says_so(
    make_peer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    peer = make_peer(judge=False)
    made = worker(peer, max_rollouts=1, flush_timeout=0.3)
    async with made:
        await off(peer.ready)
        peer.ticket(9)
        assert await made.wait(20) == 1
    assert made.lost == (9,)
    assert "gave up waiting for the verdict on 1 rollout(s) after 0.3 s: tickets [9]" in caplog.text


async def test_a_rollout_without_verdict_is_sent_again_and_a_verdict_for_another_worker_is_not_its_own(
    make_peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ods_async.worker.outbox.FIRST_RESEND", 0.2)
    peer = make_peer(judge=False)
    async with worker(peer) as made:
        await off(peer.ready)
        peer.ticket(9)
        await off(peer.first, RolloutReport)
        peer.tell(Verdict(9, "w11", "accepted"))
        await off(peer.first, RolloutReport, 2)
        peer.tell(Verdict(9, "w1", "duplicate", "was there"))
    assert made.lost == ()
    first, again = peer.rollouts[:2]
    np.testing.assert_array_equal(first.episodes[0].arrays[("actions",)], again.episodes[0].arrays[("actions",)])


async def test_c20_nothing_more_is_made_while_too_much_waits_for_its_verdict(make_peer: Any) -> None:
    peer = make_peer(judge=False)
    made = worker(peer, config(kwargs={"image_shape": [64, 64, 3]}))
    made._shift.link.desk.outbox._max_bytes = 100_000
    async with made:
        await off(peer.ready)
        for number in (1, 2, 3):
            peer.ticket(number)
        await off(peer.first, RolloutReport)
        beats = len(peer.said(Heartbeat))
        await off(peer.until, lambda: len(peer.said(Heartbeat)) > beats + 6)
        await off(peer.until, lambda: len(peer.said(RolloutReport)) == len(peer.said(TicketStarted)))
        held = len(peer.rollouts)
        assert held <= 2
        peer.judge = True
        for rollout in peer.rollouts[:held]:
            peer.tell(Verdict(rollout.ticket_id, "w1", "accepted"))
        await off(peer.first, RolloutReport, 3)
    assert made.lost == ()


async def test_told_to_shut_down_it_ends_between_two_steps(peer: Any) -> None:
    made = worker(peer, config(kwargs={"step_delay": 0.02, "endless": True}, max_generation_attempts=1))
    async with made:
        await off(peer.ready)
        peer.ticket(9)
        await off(peer.until, lambda: [b for b in peer.said(Heartbeat) if b.phase == "step"])
        peer.tell(ShutDown("enough", 5.0))
        assert await made.wait(20) == 0
    assert peer.rollouts == []
    assert peer.said(AttemptFailed) == []
    assert peer.first(Goodbye).reason == "told to end: enough"


async def test_no_broker_is_an_error_with_the_endpoint_within_the_time() -> None:
    began = time.monotonic()
    made = Worker(config(), "tcp://127.0.0.1:9", connect_timeout=0.5)
    with pytest.raises(BrokerUnreachableError, match=r"tcp://127.0.0.1:9: nobody answered within 0.5 s"):
        async with made:
            raise AssertionError("not reached")
    assert time.monotonic() - began < 5


async def test_the_brokers_refusal_is_raised_as_it_is(peer: Any) -> None:
    peer.refuse = OwnerOnlyError("no more workers here", operation="connect")
    with pytest.raises(OwnerOnlyError, match="no more workers here"):
        async with worker(peer):
            raise AssertionError("not reached")


async def test_a_refused_hello_ends_the_worker_with_the_reason(peer: Any) -> None:
    with pytest.raises(RolloutRefusedError, match="records other data"):
        async with worker(peer) as made:
            await off(peer.ready)
            peer.tell(Verdict(-1, "w1", "refused", "records other data"))
            assert await made.wait(20) == 1
    assert peer.said(WorkerFailed) == []


async def test_a_silent_broker_ends_the_worker_in_three_heartbeat_time_outs(peer: Any) -> None:
    peer.heartbeat = (0.05, 0.2)
    with pytest.raises(BrokerUnreachableError, match="silent"):
        async with worker(peer) as made:
            await off(peer.ready)
            peer.beating = False
            assert await made.wait(20) == 1


async def test_c20_with_patience_a_worker_finds_the_broker_that_was_started_anew(make_peer: Any, tmp_path: Any) -> None:
    endpoint = f"ipc://{tmp_path}/b"
    first = make_peer(endpoint=endpoint, judge=False)
    first.heartbeat = (0.05, 0.2)
    made = worker(first, patience=20.0, max_rollouts=2)
    async with made:
        await off(first.ready)
        first.ticket(1)
        await off(first.first, RolloutReport)
        first.close()
        second = make_peer(endpoint=endpoint, run_id=88)
        hello = await off(second.ready)
        assert hello.fields
        second.ticket(2)
        assert await made.wait(20) == 1
    assert [r.ticket_id for r in second.rollouts] == [2]
    assert made.lost == (1,)


async def test_c43_a_rollout_over_the_announced_limit_fails_with_both_sizes(peer: Any) -> None:
    peer.limits = Limits(rollout_bytes=4096)
    with pytest.raises(LimitExceededError, match=r"\d{5,} .*4096"):
        async with worker(peer, config(kwargs={"image_shape": [64, 64, 3]})) as made:
            peer.ticket(1)
            assert await made.wait(20) == 1
    assert peer.rollouts == []


async def test_the_shorter_of_both_capacities_counts(peer: Any) -> None:
    peer.settings = {"max_episode_steps": 7}
    async with worker(peer, config(kwargs={"endless": True})):
        await off(peer.ready)
        peer.ticket(1)
        await off(peer.first, RolloutReport)
    (episode,) = peer.rollouts[0].episodes
    assert (episode.length, bool(episode.arrays[("truncated",)][-1])) == (7, True)


async def test_c34_a_failed_close_is_noted_on_an_error_of_the_body(peer: Any) -> None:
    with pytest.raises(KeyError) as caught:
        async with worker(peer, config(kwargs={"fail_phase": "close"})):
            await off(peer.ready)
            raise KeyError("mine")
    assert any("told to fail in close" in note for note in caught.value.__notes__)


async def test_the_end_of_the_owners_pipe_ends_the_worker(peer: Any) -> None:
    from ods_async.worker.desk import LinkSettings
    from ods_async.worker.runtime import _Shift

    read, write = os.pipe()
    settings = LinkSettings(peer.endpoint, "w1", alive_fd=read)
    shift = _Shift(config(), settings, policy=None, flush_timeout=1.0, max_rollouts=None, say=print)
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(shift.work()))
    thread.start()
    await off(peer.ready)
    os.close(write)
    await off(thread.join, 20)
    os.close(read)
    assert codes == [0]
    assert peer.first(Goodbye).reason == "the owner is gone"


async def test_nothing_stays_behind(peer: Any) -> None:
    from ods_async.transport.sockets import open_channel_count

    before = {t.name for t in threading.enumerate()}, open_channel_count()
    async with worker(peer):
        await off(peer.ready)
    left = {t.name for t in threading.enumerate() if t.name.startswith("ods-")} - before[0]
    assert (left, open_channel_count()) == (set(), before[1])
