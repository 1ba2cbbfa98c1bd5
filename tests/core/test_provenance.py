"""Provenance stamps: B34."""

from __future__ import annotations

from ods_async.core.provenance import provenance_of
from ods_async.core.requests import Refill, Sample
from ods_async.core.schema import PROVENANCE
from ods_async.core.stimuli import Instant
from ods_async.testing.in_memory import OWNER, InMemoryBroker


def test_b34_each_episode_of_a_rollout_gets_the_next_id_and_the_same_times() -> None:
    found = provenance_of(9, 3, 40, 2, Instant(monotonic_ns=111, unix_ns=222))
    assert found == ((9, 40, 3, 222, 111), (9, 41, 3, 222, 111))


def test_b34_the_stamps_follow_the_order_of_the_fields_without_the_step_number() -> None:
    (stamps,) = provenance_of(9, 3, 40, 1, Instant(monotonic_ns=111, unix_ns=222))
    fields = [spec.path[0].removeprefix("ods_") for spec in PROVENANCE if spec.path != ("ods_frame_index",)]
    assert [name.replace("_at_mono", "_mono") for name in fields] == list(stamps._fields)


def test_b34_every_valid_step_is_stamped_and_nothing_else() -> None:
    broker = InMemoryBroker(include_provenance=True, refill_policy="manual")
    broker.join()
    broker.connect()
    broker.fill(length=6)
    broker.get(Refill(OWNER))
    broker.pass_time(0.25)
    broker.fill(length=3, limit=2)
    batch = broker.draw(Sample(batch_size=200, length=7, history=4, horizon=4))
    valid = batch[("valid",)]
    made = {path[0]: batch[path] for path in (spec.path for spec in PROVENANCE)}
    for values in made.values():
        assert (values[~valid] == -1).all()
    assert set(made["ods_run_id"][valid].tolist()) == {7}
    assert (made["ods_frame_index"][valid] == batch[("episode_step",)][valid]).all()
    ids, generations = made["ods_episode_id"][valid], made["ods_generation"][valid]
    assert set(zip(ids.tolist(), generations.tolist(), strict=True)) == {(2, 1), (3, 1), (4, 2), (5, 2)}
    for name, late in (
        ("ods_accepted_at_ns", broker.now.unix_ns),
        ("ods_published_at_monotonic_ns", broker.now.monotonic_ns),
    ):
        assert (made[name][valid] == late - 250_000_000 * (generations == 1)).all()
