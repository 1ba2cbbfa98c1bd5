"""Threads that nobody waits for let others go first, and none is started while somebody waits."""

from __future__ import annotations

import os
import threading

from ods_async.transport.priority import own_threads, step_back, thread_pool


def nice_of(thread: int) -> int:
    return os.getpriority(os.PRIO_PROCESS, thread)


def test_a_thread_steps_back_and_no_other_does() -> None:
    here, seen = nice_of(threading.get_native_id()), []

    def run() -> None:
        step_back()
        seen.append(nice_of(threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [min(19, here + 10)]
    assert nice_of(threading.get_native_id()) == here


def test_a_thread_that_is_gone_cannot_step_back_and_nothing_is_raised() -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    assert thread.native_id is not None
    step_back(thread.native_id)


def test_all_threads_of_a_pool_are_there_before_the_first_work() -> None:
    before, here = own_threads(), nice_of(threading.get_native_id())
    with thread_pool(3, "ods-test", stepping_back=True) as pool:
        started = own_threads() - before
        assert len(started) == 3
        together = threading.Barrier(3)
        jobs = [pool.submit(lambda: (together.wait(10.0), threading.get_native_id())) for _ in range(3)]
        assert {job.result()[1] for job in jobs} == started
        assert {nice_of(thread) for thread in started} == {min(19, here + 10)}
