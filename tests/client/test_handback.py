"""Leases go back with the next draw, or a moment after the last one."""

from __future__ import annotations

import gc
import threading
import weakref

from ods_async.client.handback import Handback
from ods_async.client.sync import Client
from ods_async.core.requests import Release, Sample
from tests.client.peer import Service


def handback_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ods-handback"]


def test_a_draw_carries_the_lease_of_the_one_before() -> None:
    with Service() as service, Client(service.endpoint) as client:
        for _ in range(40):
            client.sample_batch(9, 4)
        samples, notices = service.asked(Sample), service.asked(Release)
        carried = sum(len(sample.release) for sample in samples)
        told = sum(len(notice.leases) for notice in notices)
        assert carried + told in (39, 40)  # the last one may still be owed
        assert carried > told


def test_a_lease_nobody_follows_up_goes_back_by_itself(make) -> None:  # type: ignore[no-untyped-def]
    with Service() as service, make(service.endpoint) as client:
        client.sample_batch(9, 4)
        if isinstance(client, Client):
            service.wait_for(lambda: any(notice.leases for notice in service.asked(Release)))
        else:  # its loop only runs while it is asked something
            client.get_stats()
        assert service.open_leases == 0


def test_closing_hands_back_and_ends_the_thread() -> None:
    with Service() as service:
        with Client(service.endpoint) as client:
            client.sample_batch(9, 4)
        assert not handback_threads()
        service.wait_for(lambda: any(notice.leases for notice in service.asked(Release)))
        assert service.open_leases == 0


def test_the_thread_ends_with_its_owner_and_when_nothing_is_owed() -> None:
    class Owner:
        def __init__(self) -> None:
            self.handback = Handback(self.settle)

        def settle(self) -> bool:
            return False

    owner = Owner()
    owner.handback.owed()
    (thread,) = handback_threads()
    thread.join(10)
    assert not thread.is_alive()
    owner.handback.owed()
    (thread,) = handback_threads()
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    thread.join(10)
    assert gone() is None
