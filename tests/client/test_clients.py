"""Both clients against a real peer, over both data paths. Every test that takes ``make`` runs for both clients."""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from ods_async.client.aio import AsyncClient
from ods_async.client.batch import Mould
from ods_async.client.link import Link
from ods_async.client.sync import Client
from ods_async.core.requests import BufferDescription, Cancel, GetLanguage, Plans, Sample
from ods_async.core.states import OnlineDataEngineState
from ods_async.errors import (
    ArgumentError,
    BrokerUnreachableError,
    ClosedError,
    EndpointError,
    OwnerOnlyError,
    PeerError,
    RequestTimeoutError,
    RunChangedError,
    SharedMemoryError,
    StateError,
)
from ods_async.testing.in_memory import OWNER, episode_of
from ods_async.transport.curve import CurveKeys
from tests.client.peer import Service

Make = Callable[..., Any]

PATHS = ("shared_memory", "frames")


def check_windows(batch: TensorDict) -> None:
    """Every window holds one episode's fingerprint, its steps in order."""
    qpos, steps = batch["obs", "qpos"], batch["actions"][..., 0]
    assert (qpos == qpos[:, :1, :1]).all()
    assert (steps[:, 1:] - steps[:, :-1] == 1).all()
    assert batch["valid"].all()


@pytest.mark.parametrize("path", PATHS)
def test_a_batch_has_the_shape_asked_for_and_whole_windows_b20_b21(make: Make, path: str) -> None:
    with Service() as service, make(service.endpoint, data_path=path) as client:
        batch = client.sample_batch(7, 3)
        assert batch.batch_size == torch.Size((7, 3))
        assert batch["obs", "qpos"].shape == (7, 3, 3)
        assert batch["obs", "qpos"].dtype == torch.float64
        check_windows(batch)
        assert client.data_path == path
        assert client.run_id == 7
        assert client.state is OnlineDataEngineState.READY


@pytest.mark.parametrize("path", PATHS)
def test_large_batches_come_whole_over_both_paths(make: Make, path: str) -> None:
    with Service() as service, make(service.endpoint, data_path=path) as client:
        batch = client.sample_batch(4099, 5)
        check_windows(batch)
        batch["obs", "qpos"].mul_(0)


@pytest.mark.parametrize("path", PATHS)
def test_contexts_are_padded_and_masked_b25_b26_b27(make: Make, path: str) -> None:
    with Service(fill=5) as service, make(service.endpoint, data_path=path) as client:
        batch = client.sample_batch_with_context(64, 3, 4, seed=5)
        assert batch.batch_size == torch.Size((64, 6))
        assert batch["valid"][:, 2].all()
        assert not batch["loss_mask"][:, :2].any()
        assert (batch["loss_mask"] == (batch["valid"] & (torch.arange(6) >= 2))).all()
        padding = ~batch["valid"]
        assert padding.any()
        assert (batch["obs", "qpos"][padding] == 0).all()
        assert (batch["task_index"][padding] == -1).all()


def test_a_seed_draws_the_same_over_both_paths_and_by_both_clients_b24(make: Make) -> None:
    with Service() as service:
        drawn = [
            make(service.endpoint, data_path=path).sample_batch(9, 4, seed=2**64 - 1) for path in PATHS for _ in "ab"
        ]
        assert all((drawn[0] == other).all() for other in drawn)


def test_a_generator_makes_draws_repeatable_and_global_ones_stay_untouched_b24(make: Make) -> None:
    with Service() as service, make(service.endpoint) as client:
        before = torch.get_rng_state()
        a, b = (
            [client.sample_batch(9, 4, generator=generator) for _ in range(2)]
            for generator in (torch.Generator().manual_seed(3), torch.Generator().manual_seed(3))
        )
        assert (a[0] == b[0]).all()
        assert (a[1] == b[1]).all()
        assert not (a[0]["obs", "qpos"] == a[1]["obs", "qpos"]).all()
        assert (torch.get_rng_state() == before).all()
        with pytest.raises(ArgumentError, match="seed"):
            client.sample_batch(9, 4, generator=torch.Generator(), seed=1)


@pytest.mark.parametrize("path", PATHS)
def test_editing_a_batch_changes_nobody_elses_data_c30_b20(make: Make, path: str) -> None:
    with Service() as service:
        one, other = make(service.endpoint, data_path=path), make(service.endpoint, data_path=path)
        kept = [one.sample_batch(33, 4, seed=seed) for seed in range(25)]
        copies = [batch.clone() for batch in kept]
        expected = one.sample_batch(33, 4, seed=99).clone()
        for tensor in one.sample_batch(33, 4, seed=99).values(include_nested=True, leaves_only=True):
            tensor.zero_()
        assert (one.sample_batch(33, 4, seed=99) == expected).all()
        assert (other.sample_batch(33, 4, seed=99) == expected).all()
        assert all((batch == copy).all() for batch, copy in zip(kept, copies, strict=True))


@pytest.mark.parametrize("path", PATHS)
def test_memory_of_a_batch_is_not_used_again_while_any_tensor_of_it_lives_c30(make: Make, path: str) -> None:
    with Service() as service, make(service.endpoint, data_path=path) as client:
        slices = [client.sample_batch(33, 4, seed=seed)["obs", "qpos"][3:5, 1:] for seed in range(20)]
        copies = [piece.clone() for piece in slices]
        for seed in range(20):
            client.sample_batch(33, 4, seed=100 + seed)
        assert all((piece == copy).all() for piece, copy in zip(slices, copies, strict=True))


@pytest.mark.parametrize("path", PATHS)
def test_out_is_filled_and_returned(make: Make, path: str) -> None:
    with Service() as service, make(service.endpoint, data_path=path) as client:
        out = client.sample_batch(9, 4, seed=1)
        expected = client.sample_batch(9, 4, seed=2)
        address = out["actions"].data_ptr()
        assert client.sample_batch(9, 4, seed=2, out=out) is out
        assert out["actions"].data_ptr() == address
        assert (out == expected).all()


@pytest.mark.parametrize(
    ("spoil", "rule"),
    [
        (lambda out: out.exclude("actions"), "missing"),
        (lambda out: out.set("more", torch.zeros(9, 4)), "no such field"),
        (lambda out: out.set("actions", out["actions"].double()), "float32"),
        (lambda out: out[:8], "the batch is"),
        (lambda out: "nothing", "TensorDict"),
    ],
)
def test_an_unfitting_out_is_refused_by_name_and_the_client_goes_on(make: Make, spoil: Any, rule: str) -> None:
    with Service() as service, make(service.endpoint) as client:
        out = spoil(client.sample_batch(9, 4))
        with pytest.raises(ArgumentError, match=rule):
            client.sample_batch(9, 4, out=out)
        check_windows(client.sample_batch(9, 4))
        client.get_stats()
        assert service.open_leases == 0


def test_pinning_and_a_device_work_without_an_accelerator_c31(make: Make) -> None:
    with Service() as service, make(service.endpoint) as client:
        check_windows(client.sample_batch(9, 4, pin_memory=True, device="cpu"))
        assert client.sample_batch(9, 4, device="meta").device == torch.device("meta")
        with pytest.raises(ArgumentError, match="device"):
            client.sample_batch(9, 4, device="toaster")


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, 10**9, "two", True, 1.5, None, 2**70])
def test_a_bad_batch_size_is_refused_and_the_next_request_succeeds_c12_b23(make: Make, value: Any) -> None:
    with Service() as service, make(service.endpoint) as client:
        with pytest.raises(ArgumentError, match="batch_size"):
            client.sample_batch(value, 3)
        check_windows(client.sample_batch(np.int64(5), np.int32(3)))


def test_bad_arguments_name_the_argument_b23(make: Make) -> None:
    with Service() as service, make(service.endpoint) as client:
        for match, call in {
            "chunk_size": lambda: client.sample_batch(2, 11),
            "sampling_mode": lambda: client.sample_batch(2, 3, "sideways"),
            "history_length": lambda: client.sample_batch_with_context(2, 0, 3),
            "prediction_horizon": lambda: client.sample_batch_with_context(2, 3, "x"),
            "generations": lambda: client.sample_batch_with_context(2, 3, 1, generations=(1,)),
            "timeout": lambda: client.sample_batch(2, 3, timeout=float("nan")),
            "prefetch": lambda: client.stream(2, 3, prefetch=-1),
            "generation": lambda: client.wait_for_generation(99),
        }.items():
            with pytest.raises(ArgumentError, match=match):
                call()


def test_a_bad_endpoint_or_data_path_is_refused_at_once(make: Make) -> None:
    with pytest.raises(EndpointError):
        make("tcp:/nowhere")
    with pytest.raises(ArgumentError, match="data_path"):
        make("tcp://127.0.0.1:1", data_path="telepathy")


# --- leases, stamps -------------------------------------------------------------------------------------------------


def test_the_lease_is_handed_back_right_after_the_copy(make: Make) -> None:
    with Service() as service, make(service.endpoint) as client:
        for _ in range(5):
            client.sample_batch(9, 4)
        client.get_stats()
        assert service.open_leases == 0


def test_stale_stamps_make_it_draw_again_and_the_torn_batch_is_never_seen(make: Make) -> None:
    with Service(fill=8) as service, make(service.endpoint, data_path="shared_memory") as client:
        client.connect()
        spoiled: list[int] = []

        def spoil(answer: object) -> None:
            if isinstance(answer, Plans) and len(spoiled) < 2:
                spoiled.append(answer.plans[0].lease_id)
                layout, memory = service.broker.layout, service.broker.memory
                assert layout is not None
                layout.stamps(memory)[:] += 2 if len(spoiled) == 1 else -2

        service.before_answer = spoil
        check_windows(client.sample_batch(9, 4))
        service.before_answer = lambda answer: None
        assert client.redrawn == 1
        handed_back = [lease for sample in service.asked(Sample) for lease in sample.undelivered]
        assert handed_back == spoiled[:1]


def test_stamps_that_stay_wrong_end_at_the_deadline(make: Make) -> None:
    with Service() as service, make(service.endpoint, data_path="shared_memory") as client:
        client.sample_batch(9, 4)
        layout = service.broker.layout
        assert layout is not None
        service.do(lambda: layout.stamps(service.broker.memory).__iadd__(1))
        with pytest.raises(RequestTimeoutError):
            client.sample_batch(9, 4, timeout=0.3)
        assert client.redrawn > 1


# --- deadlines ------------------------------------------------------------------------------------------------------


def test_an_empty_buffer_is_waited_for_and_the_error_says_what_is_missing_c35(make: Make) -> None:
    with Service(fill=0) as service, make(service.endpoint) as client:
        service.do(service.broker.join)
        with pytest.raises(RequestTimeoutError, match="0 of 9 windows") as caught:
            client.sample_batch(9, 4, timeout=0.2)
        assert isinstance(caught.value, TimeoutError)
        assert service.do(lambda: service.broker.fill(8)) > 0
        check_windows(client.sample_batch(9, 4))


def test_a_parked_request_is_answered_when_the_data_comes(make: Make) -> None:
    with Service(fill=0) as service, make(service.endpoint) as client:

        def produce() -> None:
            service.wait_for(lambda: len(service.broker.state.run.parking) > 0)
            service.do(service.broker.join)
            service.do(lambda: service.broker.fill(8))

        producer = threading.Thread(target=produce)
        producer.start()
        check_windows(client.sample_batch(9, 4, timeout=20))
        producer.join()


def test_a_late_answer_is_dropped_and_the_next_answer_is_its_own(make: Make) -> None:
    with Service() as service, make(service.endpoint) as client:
        client.sample_batch(9, 4)
        service.hold = lambda answer: isinstance(answer, Plans)
        with pytest.raises(RequestTimeoutError, match="Sample"):
            client.sample_batch(9, 4, timeout=0.05)
        service.let_go()
        batch = client.sample_batch(5, 6)
        assert batch.batch_size == torch.Size((5, 6))
        check_windows(batch)
        assert service.asked(Cancel)


async def test_a_cancelled_call_leaves_the_client_usable() -> None:
    import asyncio

    with Service() as service:
        async with AsyncClient(service.endpoint) as client:
            await client.sample_batch(9, 4)
            service.hold = lambda answer: isinstance(answer, Plans)
            for _ in range(3):
                call = asyncio.ensure_future(client.sample_batch(9, 4))
                await asyncio.to_thread(service.wait_for, lambda: bool(service.held))
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                service.let_go()
                service.hold = lambda answer: isinstance(answer, Plans)
            service.let_go()
            batch = await client.sample_batch(5, 6)
            assert batch.batch_size == torch.Size((5, 6))
            check_windows(batch)
            assert len(service.sessions) == 1


async def test_a_waiting_task_does_not_hold_up_another() -> None:
    import asyncio

    with Service() as service:
        async with AsyncClient(service.endpoint, owner=OWNER) as client:
            generation = await client.request_refill()
            waiting = asyncio.ensure_future(client.wait_for_generation(generation))
            for _ in range(3):
                check_windows(await client.sample_batch(9, 4))
            assert not waiting.done()
            service.do(lambda: service.broker.fill(8))
            await asyncio.wait_for(waiting, 10)


def test_threads_share_a_client() -> None:
    with Service() as service, Client(service.endpoint) as client:
        errors: list[BaseException] = []

        def draw(size: int) -> None:
            try:
                for _ in range(10):
                    batch = client.sample_batch(size, 4)
                    assert batch.batch_size[0] == size
                    check_windows(batch)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=draw, args=(size,)) for size in (3, 5, 7)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors


# --- data paths -----------------------------------------------------------------------------------------------------


def spoil_description(service: Service, **changes: Any) -> None:
    """Let the broker describe its memory wrongly."""

    def job() -> None:
        production = service.broker.state.production
        assert isinstance(production.buffer, BufferDescription)
        production.buffer = replace(production.buffer, **changes)

    service.do(job)


@pytest.mark.parametrize(
    "change",
    [
        {"token": b"x" * 32},
        {"segment": "/dev/shm/ods-0-1-1-7-000000000000"},
        {"segment": None},
    ],
    ids=["foreign", "missing", "none"],
)
def test_other_memory_falls_back_to_frames_with_one_warning_c39(
    make: Make, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with Service() as service, caplog.at_level(logging.WARNING, "ods_async"):
        spoil_description(service, **change)
        client = make(service.endpoint)
        check_windows(client.sample_batch(9, 4))
        check_windows(client.sample_batch(9, 4))
        assert client.data_path == "frames"
        assert len(caplog.records) == (0 if change == {"segment": None} else 1)
        with pytest.raises(SharedMemoryError, match="demanded"):
            make(service.endpoint, data_path="shared_memory").sample_batch(9, 4)


# --- the other end --------------------------------------------------------------------------------------------------


def test_nobody_there_is_said_in_time_with_the_address_c21(make: Make) -> None:
    client = make("tcp://127.0.0.1:9", connect_timeout=0.2)
    begin = time.monotonic()
    with pytest.raises(BrokerUnreachableError, match=r"127\.0\.0\.1:9") as caught:
        client.sample_batch(9, 4)
    assert isinstance(caught.value, ConnectionError)
    client.close()
    client.close()
    assert time.monotonic() - begin < 2.0
    with pytest.raises(ClosedError):
        client.sample_batch(9, 4)


def test_a_broker_that_goes_away_is_noticed_while_waiting_c21(make: Make) -> None:
    with Service(fill=0) as service:
        client = make(service.endpoint)

        def end() -> None:
            service.wait_for(lambda: len(service.broker.state.run.parking) > 0)
            service.end()

        ender = threading.Thread(target=end)
        ender.start()
        begin = time.monotonic()
        with pytest.raises(BrokerUnreachableError, match="went away"):
            client.sample_batch(9, 4, timeout=60)
        assert time.monotonic() - begin < 5
        ender.join()


def test_another_run_is_told_once_then_drawn_from(make: Make) -> None:
    first = Service()
    with first:
        client = make(first.endpoint)
        client.sample_batch(9, 4)
        kept = client.sample_batch(9, 4)
    second = Service(first.endpoint)
    second.broker.state.run.run_id = 8
    with second:
        with pytest.raises(RunChangedError) as caught:
            client.sample_batch(9, 4)
        assert (caught.value.old_run_id, caught.value.new_run_id) == (7, 8)
        check_windows(client.sample_batch(9, 4))
        assert client.run_id == 8
        check_windows(kept)


def test_batches_outlive_client_and_broker_c40(make: Make) -> None:
    with Service() as service:
        client = make(service.endpoint, data_path="shared_memory")
        batch = client.sample_batch(9, 4)
        piece, copy = batch["obs", "qpos"][2:], batch.clone()
        client.close()
        kept: list[TensorDict] = []

        def fail_inside() -> None:
            with make(service.endpoint) as other:
                kept.append(other.sample_batch(9, 4))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail_inside()
        check_windows(kept[0])
    assert (batch == copy).all()
    assert (piece == copy["obs", "qpos"][2:]).all()


def test_closing_from_another_thread_ends_a_waiting_call_c21() -> None:
    with Service(fill=0) as service:
        client = Client(service.endpoint)

        def end() -> None:
            service.wait_for(lambda: len(service.broker.state.run.parking) > 0)
            client.close()

        ender = threading.Thread(target=end)
        ender.start()
        with pytest.raises(ClosedError):
            client.sample_batch(9, 4, timeout=60)
        ender.join()


def test_a_pickled_client_connects_where_it_is_used_and_is_no_owner_c41() -> None:
    with Service() as service:
        with Client(service.endpoint, owner=OWNER, data_path="frames") as client:
            again = pickle.loads(pickle.dumps(client))
            assert b"owner-token" not in pickle.dumps(client)
        with again:
            check_windows(again.sample_batch(9, 4))
            assert again.data_path == "frames"
            with pytest.raises(OwnerOnlyError):
                again.request_refill()


def test_a_forked_child_connects_anew_and_the_parent_goes_on_c41() -> None:
    with Service() as service, Client(service.endpoint) as client:
        client.sample_batch(9, 4)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                check_windows(client.sample_batch(5, 4, timeout=10))
                client.close()
                os.write(writer, b"ok")
            finally:
                os._exit(0)
        os.close(writer)
        assert os.waitpid(child, 0)[1] == 0
        assert os.read(reader, 10) == b"ok"
        os.close(reader)
        check_windows(client.sample_batch(9, 4))


# --- looking, owner, language ---------------------------------------------------------------------------------------


def test_what_can_be_looked_at_has_the_promised_names_b47_b38(make: Make) -> None:
    described = {"buffer_size": 4, "episode_sample_budget": 50}
    budget = {"episode_sample_budget": 50, "episode_sample_hard_limit": 60}
    with Service(described=described, **budget) as service, make(service.endpoint) as client:
        client.wait_ready(timeout=5)
        client.check_health()
        client.sample_batch(9, 4)
        assert client.buffer_size == 4
        stats = client.get_stats()
        assert stats["run_id"] == 7
        assert stats["sampled_chunks"] == 9
        names = "requested_generation completed_generation successful_episodes failed_episodes generated_frames"
        assert set(stats) == {*names.split(), "run_id", "production_seconds", "sampled_chunks", "valid_frames", "extra"}
        flow = client.get_flow_status()
        assert flow["unlocked_remaining_chunks"] == 4 * 50 - 9
        assert flow["total_delivered_chunks"] == 9
        snapshot = client.get_sampling_budget_snapshot()
        assert snapshot["enabled"]
        assert sum(row["delivered"] for row in snapshot["rows"]) == 9
        row = "run_id episode_id generation slot assigned delivered remaining locked"
        assert set(snapshot["rows"][0]) == set(row.split())
        status = client.get_status()
        assert status["state"] == "READY"
        assert status["workers"][0]["worker_id"] == "w0"


def test_before_connecting_there_is_nothing_to_tell(make: Make) -> None:
    client = make("tcp://127.0.0.1:9")
    with pytest.raises(StateError, match="connect"):
        _ = client.run_id


def test_only_the_owner_uses_the_owners_verbs_b13(make: Make) -> None:
    with Service(lifecycle_event_capacity=64) as service:
        consumer, thief = make(service.endpoint), make(service.endpoint, owner=b"guess")
        for client in (consumer, thief):
            for call in (
                client.request_refill,
                client.drain_lifecycle_events,
                client.stop,
                lambda client=client: client.report_exit("w0", -9),
            ):
                with pytest.raises(OwnerOnlyError):
                    call()
        owner = make(service.endpoint, owner=OWNER)
        generation = owner.request_refill()
        assert owner.request_refill() == generation
        service.do(lambda: service.broker.fill(6))
        owner.wait_for_generation(generation, timeout=10)
        records = owner.drain_lifecycle_events()
        assert {record["kind"] for record in records} == {"published", "evicted"}
        assert records[0]["valid_frame_indices"] == list(range(8))
        assert owner.drain_lifecycle_events() == []


def test_language_is_resolved_like_the_batch_also_without_the_broker_b43(make: Make) -> None:
    with Service(fill=0) as service:

        def produce() -> None:
            service.broker.join()
            for text in ("pick", "place the cup ☕", "pick", "stack"):
                ticket = service.broker.start_ticket()
                service.broker.hand_in(ticket, episode_of(8, 1.0, instruction=text))

        service.do(produce)
        client = make(service.endpoint)
        batch = client.sample_batch(40, 3)
        again = client.sample_batch(40, 3)
        assert len(service.asked(GetLanguage)) == 2  # once a kind; known words are not fetched again
    texts = client.resolve_language(batch)
    assert len(texts["task"]) == 40
    assert len(texts["task"][0]) == 3
    assert {text for row in texts["task"] for text in row} == {"pick", "place the cup ☕", "stack"}
    assert texts["task"] == texts["subtask"]
    client.resolve_language(again)
    batch["task_index"][1, 2] = -1
    with pytest.raises(ValueError, match="padding"):
        client.resolve_language(batch)
    with pytest.raises(ValueError, match="task_index"):
        client.resolve_language(batch.exclude("task_index"))


# --- streams --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_a_stream_gives_whole_batches_and_leaves_no_lease(make: Make, path: str, ahead: int) -> None:
    with Service() as service, make(service.endpoint, data_path=path) as client:
        stream = client.stream(9, 4, prefetch=ahead)
        for _ in range(12):
            check_windows(client.take(stream))
        client.end_stream(stream)
        client.end_stream(stream)
        service.wait_for(lambda: not any(service.broker.state.run.store.leases_of(who) for who in service.sessions))
    assert not [thread for thread in threading.enumerate() if thread.name == "ods-prefetch"]


def test_a_closed_client_gives_its_memory_back_and_batches_theirs_when_they_go(make: Make) -> None:
    """At once, and not when the garbage collector finds it: a trainer may open one client after the other."""
    with Service() as service:
        client = make(service.endpoint, data_path="shared_memory")
        pool = getattr(client, "client", client)._pool
        first = client.sample_batch(9, 4)
        client.sample_batch(9, 4)
        assert pool.idle_bytes > 0
        client.close()
        assert pool.idle_bytes == 0
        check_windows(first)
        del first
        assert pool.idle_bytes == 0


def test_a_seeded_stream_repeats(make: Make) -> None:
    with Service() as service, make(service.endpoint) as client:
        runs = []
        for _ in range(2):
            stream = client.stream(9, 4, prefetch=4, seed=11)
            runs.append([client.take(stream) for _ in range(6)])
            client.end_stream(stream)
        assert all((a == b).all() for a, b in zip(*runs, strict=True))
        assert not (runs[0][0]["obs", "qpos"] == runs[0][1]["obs", "qpos"]).all()


def test_what_a_budgeted_stream_drew_ahead_and_never_delivered_is_given_back_b37(make: Make) -> None:
    described = {"buffer_size": 4, "episode_sample_budget": 500}
    budget = {"episode_sample_budget": 500, "episode_sample_hard_limit": 500}
    with Service(described=described, **budget) as service, make(service.endpoint) as client:
        stream = client.stream(5, 4, prefetch=6)
        for _ in range(3):
            client.take(stream)
        service.wait_for(lambda: service.broker.state.sampling.sampled_windows >= 5 * 6)
        client.end_stream(stream)
        service.wait_for(lambda: service.broker.state.run.budget.snapshot().total_delivered_chunks == 15)


def test_threads_that_share_a_stream_get_each_batch_once_and_every_window_is_accounted_for_b37() -> None:
    budget = {"episode_sample_budget": 100_000, "episode_sample_hard_limit": 100_000}
    described = {"buffer_size": 4, "episode_sample_budget": 100_000}
    with Service(described=described, **budget) as service, Client(service.endpoint) as client:
        stream = client.stream(5, 4, prefetch=4)
        taken: list[list[int]] = [[], [], []]

        def take(mine: list[int]) -> None:
            for _ in range(120):
                batch = next(stream)
                check_windows(batch)
                mine.append(batch["obs", "qpos"].data_ptr())

        threads = [threading.Thread(target=take, args=(mine,)) for mine in taken]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert [len(mine) for mine in taken] == [120, 120, 120]
        stream.close()
        service.wait_for(lambda: service.broker.state.run.budget.snapshot().total_delivered_chunks == 5 * 360)
        service.wait_for(lambda: not any(service.broker.state.run.store.leases_of(who) for who in service.sessions))


def test_a_stream_tells_an_error_once_and_tries_again(make: Make) -> None:
    with Service(fill=0) as service, make(service.endpoint) as client:
        service.do(service.broker.join)
        stream = client.stream(9, 4, prefetch=2, timeout=0.2)
        with pytest.raises(RequestTimeoutError):
            client.take(stream)
        service.do(lambda: service.broker.fill(8))
        check_windows(client.take(stream))
        client.end_stream(stream)


def test_closing_the_client_ends_its_streams_at_once_c21(make: Make) -> None:
    with Service(fill=0) as service:
        client = make(service.endpoint)
        stream = client.stream(9, 4, prefetch=2, timeout=0.1)
        with pytest.raises(RequestTimeoutError):
            client.take(stream)
        begin = time.monotonic()
        client.close()
        assert time.monotonic() - begin < 3
        with pytest.raises((StopIteration, StopAsyncIteration)):
            client.take(stream)


def test_a_key_the_broker_does_not_take_is_told_within_seconds_c18(make: Make) -> None:
    import zmq

    (public, secret), (server, _) = zmq.curve_keypair(), zmq.curve_keypair()
    keys = CurveKeys(public.decode(), secret.decode(), server.decode())
    with Service() as service:
        client = make(service.endpoint, keys=keys)
        begin = time.monotonic()
        with pytest.raises(PeerError) as caught:
            client.sample_batch(9, 4, timeout=30)
        assert time.monotonic() - begin < 6
        assert service.endpoint in str(caught.value)
        assert secret.decode() not in repr(client)


def test_what_is_made_ahead_of_a_plan_and_fails_calls_the_request_off(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the client can be used at once."""
    with Service() as service, make(service.endpoint) as client:
        client.sample_batch(7, 3)
        with monkeypatch.context() as patch:
            patch.setattr(Link, "prepare", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                client.sample_batch(7, 3)
        check_windows(client.sample_batch(7, 3))
        service.wait_for(lambda: service.asked(Cancel))


def test_the_quick_way_to_a_batch_gives_what_the_constructor_gives() -> None:
    """Nested fields, keys with dots, one size for all levels."""
    views = {
        ("obs", "qpos"): np.arange(30, dtype=np.float32).reshape(2, 5, 3),
        ("obs", "cam.era", "rgb"): np.arange(80, dtype=np.uint8).reshape(2, 5, 8),
        ("valid",): np.ones((2, 5), np.bool_),
    }
    quick = Mould(tuple(views), 2, 5).over(views.values())
    nested = {"obs": {"qpos": 0, "cam.era": {"rgb": 0}}, "valid": 0}
    assert set(quick.keys(True, True)) == {("obs", "qpos"), ("obs", "cam.era", "rgb"), "valid"}
    assert set(quick.keys()) == set(nested)
    for level in (quick, quick["obs"], quick["obs"]["cam.era"]):
        assert isinstance(level, TensorDict)
        assert level.batch_size == torch.Size((2, 5))
        assert not level.is_locked
    slow = TensorDict(
        {
            "obs": {"qpos": quick["obs", "qpos"], "cam.era": {"rgb": quick["obs", "cam.era", "rgb"]}},
            "valid": quick["valid"],
        },
        batch_size=(2, 5),
    )
    assert (quick == slow).all()
    assert quick["obs", "qpos"].data_ptr() == views["obs", "qpos"].ctypes.data
    half = quick[:, 1:4]
    assert half["obs"].batch_size == torch.Size((2, 3))
    quick["new"] = torch.zeros(2, 5, 7)
    with pytest.raises(RuntimeError):
        quick["bad"] = torch.zeros(3, 5)
