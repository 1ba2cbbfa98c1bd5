"""Carrying conversations out: over a blocking lane, or over an asyncio one."""

from __future__ import annotations

import asyncio
import functools
from typing import Any, TypeVar

from ods_async.client.exchange import LARGE_BYTES, Ask, Step, Talk
from ods_async.transport.lane import AsyncLane, Lane

__all__ = ["drive", "drive_async"]

A = TypeVar("A")


def drive(talk: Talk[A], lane: Lane, deadline: float) -> A:
    """Carry out ``talk`` over ``lane`` until ``deadline`` (monotonic seconds), and return its outcome."""
    try:
        step: Step = next(talk)
        while True:
            try:
                outcome: Any
                if isinstance(step, Ask):
                    outcome = lane.ask(step.request, deadline, step.limit, step.meanwhile)
                else:
                    outcome = step.work()
            except BaseException as error:
                step = talk.throw(error)
            else:
                step = talk.send(outcome)
    except StopIteration as done:
        result: A = done.value
        return result
    finally:
        talk.close()


async def drive_async(talk: Talk[A], lane: AsyncLane, deadline: float) -> A:
    """As :func:`drive`, awaiting. Work on large memory is done in a thread.

    A talk that asks nothing lets the loop run once, so that whoever draws in a loop starves nobody.
    """
    waited = False
    try:
        step: Step = next(talk)
        while True:
            try:
                outcome: Any
                if isinstance(step, Ask):
                    waited = True
                    outcome = await lane.ask(step.request, deadline, step.limit, step.meanwhile)
                elif step.nbytes > LARGE_BYTES:
                    outcome = await _in_thread(step)
                else:
                    if not waited:
                        waited = True
                        await asyncio.sleep(0)
                    outcome = step.work()
            except BaseException as error:
                step = talk.throw(error)
            else:
                step = talk.send(outcome)
    except StopIteration as done:
        result: A = done.value
        return result
    finally:
        talk.close()


async def _in_thread(step: Any) -> object:
    """Do the work in a thread. When cancelled, wait for it all the same: it may be writing to the caller's memory."""
    work = asyncio.ensure_future(asyncio.get_running_loop().run_in_executor(None, functools.partial(step.work)))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            try:
                await asyncio.wait([work])
            except asyncio.CancelledError:
                continue  # cancelled again; a copy takes milliseconds and the first cancellation is passed on below
        raise
