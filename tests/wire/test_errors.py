from __future__ import annotations

import builtins
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ods_async.errors as errors_module
from ods_async.core.requests import Limits
from ods_async.errors import (
    ArgumentError,
    DataUnavailableError,
    LanguageCapacityError,
    OdsError,
    OnlineDataWorkerError,
    SchemaMismatchError,
    WorkerExitedError,
)
from ods_async.wire import codec
from ods_async.wire.errors import (
    SAFE_BUILTINS,
    describe_error,
    own_type,
    register_error,
    restore_error,
    worker_failure,
)
from ods_async.wire.messages import ErrorReport
from ods_async.wire.text import clip
from tests.wire.strategies import of_class

OURS = [getattr(errors_module, n) for n in errors_module.__all__ if isinstance(getattr(errors_module, n), type)]


def sent(error: BaseException) -> Exception:
    return codec.decode_error(codec.encode_error(error))


def failed(error: BaseException, **words: Any) -> OnlineDataWorkerError:
    """The error that stands for a worker's failure, as the broker makes it from the worker's report."""
    told = worker_failure(error, worker_id="w7", phase="step", step=3, **words)
    report = codec.decode_report(codec.encode_report(told))
    assert report == told
    return OnlineDataWorkerError(
        f"worker w7 failed: {told.message}",
        module=told.module,
        type_name=told.type_name,
        detail=told.message,
        traceback_text=told.traceback_text,
        worker_id=told.worker_id,
        phase=told.phase,
        step=told.step,
    )


@pytest.mark.parametrize("cls", OURS, ids=lambda cls: cls.__name__)
def test_the_packages_own_errors_come_back_as_they_are(cls: type[OdsError]) -> None:
    """B11"""
    error = cls("what, and what to do", size=5, limit=2.5, found=("a", None), name="x")
    error.add_note("first")
    error.add_note("second ☕")
    for back in (sent(error), codec.decode_answer(codec.encode_answer(3, error))[1]):
        assert type(back) is cls
        assert isinstance(back, OdsError)
        assert (back.message, back.fields, str(back)) == (error.message, error.fields, str(error))
        assert back.__notes__ == ["first", "second ☕"]


class _Private(SchemaMismatchError):
    pass


def test_a_subclass_of_ours_arrives_as_the_nearest_known_one() -> None:
    """B11"""
    back = sent(_Private("text", field="obs"))
    assert type(back) is SchemaMismatchError
    assert back.fields == {"field": "obs"}


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad"),
        ValueError(),
        ValueError("a", 3),
        KeyError("joint"),
        KeyError(("a", "b")),
        IndexError("list index out of range"),
        FileNotFoundError(2, "No such file", "/tmp/x"),
        OSError(28, "No space left on device"),
        OSError("just text"),
        ZeroDivisionError("division by zero"),
        AssertionError(),
        NotImplementedError("later"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        ModuleNotFoundError("No module named 'egl'"),
        UserWarning("mind the gap"),
        TimeoutError("too slow"),
        RuntimeError("☕ \ud800".encode("utf-8", "replace").decode()),
    ],
    ids=repr,
)
def test_builtin_exceptions_arrive_as_their_own_type_with_their_own_message(error: Exception) -> None:
    """B11"""
    error.add_note("kept")
    back = sent(error)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.__notes__ == ["kept"]
    revived = own_type(failed(error))
    if not isinstance(error, UnicodeDecodeError):
        assert type(revived) is type(error)
    assert str(revived) == str(error) or isinstance(revived, OnlineDataWorkerError)


def test_an_os_error_keeps_its_number() -> None:
    back = sent(FileNotFoundError(2, "No such file", "/tmp/x"))
    assert isinstance(back, FileNotFoundError)
    assert (back.errno, back.filename) == (2, "/tmp/x")


def test_a_revived_exception_names_worker_phase_step_and_traceback() -> None:
    """B11: nothing of the failure is lost when it becomes its own type."""
    try:
        raise KeyError("joint")
    except KeyError as error:
        failure = failed(error)
    back = own_type(failure)
    assert type(back) is KeyError
    assert str(back) == "'joint'"
    assert back.__cause__ is failure
    note = "\n".join(back.__notes__)
    assert "worker w7, phase step, step 3" in note
    assert 'raise KeyError("joint")' in note
    assert str(pickle.loads(pickle.dumps(back))) == "'joint'"


class _Alien(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [
        _Alien("strange"),
        ExceptionGroup("several", [ValueError("one")]),
        SystemExit(3),
        KeyboardInterrupt(),
        StopIteration(5),
    ],
    ids=repr,
)
def test_every_other_type_arrives_in_words(error: BaseException) -> None:
    """B11: an unknown type, and whatever would end a program or a loop, is told and never raised."""
    back = sent(error)
    assert type(back) is OnlineDataWorkerError
    assert back.fields["type_name"] == type(error).__qualname__
    assert back.fields["module"] == type(error).__module__
    assert back.fields["detail"] == str(error)
    failure = failed(error)
    assert own_type(failure) is failure


def test_no_builtin_on_the_list_ends_a_program_or_a_loop() -> None:
    for name, cls in SAFE_BUILTINS.items():
        assert getattr(builtins, name) is cls
        assert issubclass(cls, Exception)
        assert not issubclass(cls, (StopIteration, StopAsyncIteration, BaseExceptionGroup))


def test_other_errors_are_left_alone_by_own_type() -> None:
    for error in (
        DataUnavailableError("x"),
        WorkerExitedError("x", module="builtins", type_name="ValueError", detail="y"),
    ):
        assert own_type(error) is error
    partial = OnlineDataWorkerError("x", module=5, type_name="ValueError", detail="y")
    assert own_type(partial) is partial


class _Simple(Exception):
    pass


class _Decorating(Exception):
    def __init__(self, joint: str) -> None:
        super().__init__(f"joint {joint} is stuck")


class _Demanding(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class _Rude(Exception):
    def __str__(self) -> str:
        return f"rude {self.args!r}"


@pytest.mark.parametrize("error", [_Simple("a"), _Decorating("elbow"), _Demanding(5, "no power")], ids=repr)
def test_registered_types_arrive_as_themselves(error: Exception) -> None:
    """B11: with their own message, however they are constructed."""
    register_error(type(error))
    assert type(sent(error)) is type(error)
    assert str(sent(error)) == str(error)
    back = own_type(failed(error))
    assert (type(back), str(back)) == (type(error), str(error))


def test_a_registered_type_may_bring_its_own_way_to_be_made() -> None:
    register_error(_Demanding, lambda message: _Demanding(9, message))
    back = sent(_Demanding(5, "no power"))
    assert isinstance(back, _Demanding)
    assert (back.code, str(back)) == (9, "no power")


def test_a_registered_type_that_cannot_be_made_arrives_in_words() -> None:
    register_error(_Rude)
    back = sent(_Rude("x"))
    assert type(back) is OnlineDataWorkerError
    assert back.fields["detail"] == "rude ('x',)"


@pytest.mark.parametrize("cls", [int, KeyboardInterrupt, "ValueError", ValueError("x")])
def test_only_exception_classes_can_be_registered(cls: Any) -> None:
    with pytest.raises(ArgumentError, match="subclass of Exception"):
        register_error(cls)


class _Broken(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")

    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


def test_exceptions_that_cannot_be_pickled_or_shown_are_still_told() -> None:
    """C34"""
    failure = failed(_Broken())
    assert failure.type_name == "_Broken"
    assert failure.detail == "<its text cannot be made: ValueError>"
    strange = ValueError(lambda: None, np.zeros(3))
    assert str(sent(strange)) == str(strange)


def test_everything_is_bounded_and_still_says_the_most_important() -> None:
    """B11, C34, C43"""
    error = OnlineDataWorkerError("m" * 10**6, worker_id="w" * 10**6, many=tuple(range(10**5)), odd={1: 2})
    for index in range(1000):
        error.add_note(f"note {index} " + "n" * 10_000)
    data = codec.encode_error(error)
    assert len(data) < 500_000
    back = codec.decode_error(data)
    assert str(back).startswith("mmmm")
    assert "bytes" in str(back)
    assert back.fields["odd"] == "{1: 2}"  # type: ignore[attr-defined]


def _recurse(depth: int) -> None:
    if depth:
        _recurse(depth - 1)
    raise RuntimeError("at the bottom " + "x" * 100_000)


def test_a_long_traceback_keeps_its_end() -> None:
    """C34"""
    try:
        _recurse(5)
    except RuntimeError as error:
        told = worker_failure(error, worker_id="w", phase="reset", limits=Limits(text_bytes=1000))
    assert len(told.traceback_text.encode()) <= 1000
    assert len(told.message.encode()) <= 1000
    assert told.message.startswith("at the bottom")
    codec.encode_report(told, Limits(text_bytes=1000))


@given(st.text(st.characters(codec=None), max_size=100), st.integers(0, 300), st.booleans())
def test_clipped_text_is_valid_and_short_enough(text: str, size: int, tail: bool) -> None:
    assert len(clip(text, size, tail=tail).encode()) <= size


def test_text_with_lone_surrogates_can_be_told() -> None:
    """C26: names of files that are not UTF-8 appear in messages."""
    assert str(sent(OSError("bad name a\udcff"))) == "bad name a\\udcff"


@given(
    of_class(ErrorReport),
    st.sampled_from(["builtins", "ods_async.errors", "os", "x"]),
    st.sampled_from([*SAFE_BUILTINS, "PeerError", "exit"]),
)
@settings(max_examples=150, deadline=None)
def test_any_description_gives_an_exception_and_nothing_else(report: ErrorReport, module: str, name: str) -> None:
    """C45"""
    made = restore_error(ErrorReport(module, name, report.message, report.fields, report.notes))
    assert isinstance(made, OdsError)
    assert isinstance(own_type(made), Exception)


@pytest.mark.parametrize("key", ["message", "self", "fields", "__class__", "_x", "a b", "", "args", "x" * 1000])
def test_fields_that_would_be_something_else_are_dropped(key: str) -> None:
    """C45"""
    made = restore_error(ErrorReport("ods_async.errors", "StateError", "text", {key: "evil", "operation": "x"}))
    assert type(made).__name__ == "StateError"
    assert (made.message, made.fields) == ("text", {"operation": "x"})


@pytest.mark.parametrize("name", ["error_class", "rebuild", "Any", "annotations", "__builtins__", "Exception", ""])
def test_names_in_our_module_that_are_no_error_give_the_base_class(name: str) -> None:
    made = restore_error(ErrorReport("ods_async.errors", name, "text"))
    assert type(made) is OdsError


def test_an_error_stays_catchable_by_its_builtin_base() -> None:
    back = sent(LanguageCapacityError("full", needed=5, capacity=3))
    assert isinstance(back, OverflowError)
    assert describe_error(back).fields == {"needed": 5, "capacity": 3}
