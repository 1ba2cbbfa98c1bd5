"""What a consumer may ask for: checked before anything is planned, leased or spent."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, NoReturn

from ods_async.core.requests import Limits, Sample
from ods_async.core.windows import MODES
from ods_async.errors import ArgumentError, LimitExceededError

__all__ = ["CONTEXT_MODES", "LONGEST_CONTEXT", "check_batch_bytes", "check_plan_bytes", "check_request", "most_plans"]

CONTEXT_MODES: Final = ("episode", "segment")
PLAN_BYTES_CHUNK: Final = 16  # of each window: row, start, stamp
PLAN_BYTES_CONTEXT: Final = 24  # and the run of its real steps
LONGEST_CONTEXT: Final = 2**24  # contexts may be longer than a row, but must stay far from the end of int32


def check_request(sample: Sample, steps: int, provenance: bool, limits: Limits) -> None:
    """Refuse a request that no buffer with rows of ``steps`` steps can ever serve.

    ``provenance`` says whether the buffer records generations, which the generations filter needs.

    Raises:
        ArgumentError: naming the argument as the user typed it, the value, and what is allowed.
    """
    _whole("batch_size", sample.batch_size, 1, limits.batch_windows)
    _whole("count", sample.count, 1, limits.plans_per_request)
    _whole("spare", sample.spare, 0, limits.plans_per_request)
    if sample.frame and sample.count != 1:
        _refuse("count", sample.count, "1 where the batch itself is asked for")
    if sample.seed is not None:
        _whole("seed", sample.seed, 0, 2**64 - 1)
    if _is_context(sample):
        _check_context(sample, provenance)
        return
    _one_of("sampling_mode", sample.mode, MODES)
    _whole("chunk_size", sample.length, 1, steps, f"max_episode_steps is {steps}")
    if sample.mode == "boundary" and sample.length < 2:
        _refuse("chunk_size", sample.length, "at least 2 for sampling_mode='boundary', one step on each side")
    if sample.generations:
        _refuse("generations", sample.generations, "empty for chunks: only contexts can be restricted to generations")


def check_plan_bytes(sample: Sample, limits: Limits) -> None:
    """Refuse a request whose plans would not fit into one answer, before anything is drawn.

    Raises:
        LimitExceededError: with the size and the limit.
    """
    size = sample.count * _plan_bytes(sample)
    if size > limits.header_bytes:
        raise LimitExceededError(
            f"the plans of {sample.count} batches of {sample.batch_size} windows have {size} bytes, over the limit of "
            f"{limits.header_bytes} for one answer (header_bytes); ask for fewer windows at once",
            what="header_bytes",
            size=size,
            limit=limits.header_bytes,
        )


def most_plans(sample: Sample, limits: Limits) -> int:
    """How many plans of this kind one answer may hold."""
    return min(limits.plans_per_request, limits.header_bytes // _plan_bytes(sample))


def _plan_bytes(sample: Sample) -> int:
    return sample.batch_size * (PLAN_BYTES_CONTEXT if sample.history else PLAN_BYTES_CHUNK)


def check_batch_bytes(batch_size: int, length: int, step_nbytes: int, limits: Limits) -> None:
    """Refuse a batch whose bytes alone (``step_nbytes`` a step) are over the limit for one message.

    Raises:
        LimitExceededError: with the size and the limit.
    """
    size = batch_size * length * step_nbytes
    if size > limits.batch_bytes:
        raise LimitExceededError(
            f"a batch of {batch_size} windows of {length} steps has {size} bytes, over the limit of "
            f"{limits.batch_bytes} (batch_bytes); ask for fewer or shorter windows",
            what="batch",
            size=size,
            limit=limits.batch_bytes,
        )


def _is_context(sample: Sample) -> bool:
    return not (_is_int(sample.history) and _is_int(sample.horizon) and sample.history == sample.horizon == 0)


def _check_context(sample: Sample, provenance: bool) -> None:
    _whole("history_length", sample.history, 1, LONGEST_CONTEXT)
    _whole("prediction_horizon", sample.horizon, 1, LONGEST_CONTEXT)
    _one_of("sampling_mode", sample.mode, CONTEXT_MODES)
    length = sample.history + sample.horizon - 1
    if not _is_int(sample.length) or sample.length != length:
        _refuse("length", sample.length, f"history_length + prediction_horizon - 1, which is {length}")
    if not isinstance(sample.generations, tuple):
        _refuse("generations", sample.generations, "a tuple of positive integers, or nothing")
    for generation in sample.generations:
        if not _is_int(generation) or not 1 <= generation < 2**63:
            _refuse("generations", sample.generations, "a tuple of positive integers")
    if sample.generations and not provenance:
        _refuse("generations", sample.generations, "used with include_provenance=True only, which records them")


def _is_int(value: object) -> bool:
    return type(value) is int


def _whole(argument: str, value: int, low: int, high: int, reason: str = "") -> None:
    if not _is_int(value) or not low <= value <= high:
        _refuse(argument, value, f"an integer from {low} to {high}" + (f" ({reason})" if reason else ""))


def _one_of(argument: str, value: str, allowed: Collection[str]) -> None:
    if value not in allowed:
        _refuse(argument, value, "one of " + ", ".join(map(repr, allowed)))


def _refuse(argument: str, value: object, rule: str) -> NoReturn:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    message = f"{argument} must be {rule}, got {shown}"
    raise ArgumentError(message, argument=argument, value=shown, rule=rule)
