"""Errors on the wire: described in words by the sender, rebuilt from a list of known classes by the receiver.

Nothing received decides what code runs: a class is looked up by name among the package's own errors, a fixed list of
builtins, and the classes registered with :func:`register_error`. Everything else arrives as
:class:`~ods_async.errors.OnlineDataWorkerError` with module, type, message and traceback as text.
"""

from __future__ import annotations

import builtins
import traceback
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from ods_async import errors
from ods_async.core.reports import WorkerFailed
from ods_async.core.requests import Limits
from ods_async.errors import ArgumentError, OdsError, OnlineDataWorkerError, error_class
from ods_async.wire.coders import Refused
from ods_async.wire.messages import LIMITS, ErrorReport
from ods_async.wire.plain import plain_coder
from ods_async.wire.text import WORDS_BYTES, clip

__all__ = ["SAFE_BUILTINS", "describe_error", "own_type", "register_error", "restore_error", "worker_failure"]

# Absent on purpose: what ends a program or a loop when raised (SystemExit, KeyboardInterrupt, StopIteration, …).
SAFE_BUILTINS: Final[Mapping[str, type[Exception]]] = {
    name: getattr(builtins, name)
    for name in (
        *("ArithmeticError", "AssertionError", "AttributeError", "BlockingIOError", "BrokenPipeError", "BufferError"),
        *("BytesWarning", "ChildProcessError", "ConnectionAbortedError", "ConnectionError", "ConnectionRefusedError"),
        *("ConnectionResetError", "DeprecationWarning", "EOFError", "Exception", "FileExistsError"),
        *("FileNotFoundError", "FloatingPointError", "FutureWarning", "ImportError", "ImportWarning", "IndexError"),
        *("InterruptedError", "IsADirectoryError", "KeyError", "LookupError", "MemoryError", "ModuleNotFoundError"),
        *("NameError", "NotADirectoryError", "NotImplementedError", "OSError", "OverflowError", "PermissionError"),
        *("ProcessLookupError", "RecursionError", "ReferenceError", "ResourceWarning", "RuntimeError"),
        *("RuntimeWarning", "SyntaxError", "SystemError", "TimeoutError", "TypeError", "UnboundLocalError"),
        *("UnicodeDecodeError", "UnicodeEncodeError", "UnicodeError", "UserWarning", "ValueError", "Warning"),
        *("ZeroDivisionError",),
    )
}

_NAME_BYTES: Final = 256
_MAX_FIELDS: Final = 32
_MAX_NOTES: Final = 16

_OURS: Final = errors.__name__

ExceptionClass = TypeVar("ExceptionClass", bound=type[Exception])

_registered: dict[tuple[str, str], Callable[[str], Exception] | type[Exception]] = {}


class _Verbatim(str):
    """Text that is shown as it is where Python would show its repr (the key of a KeyError)."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def register_error(cls: ExceptionClass, build: Callable[[str], Exception] | None = None) -> ExceptionClass:
    """Make exceptions of ``cls``, raised in a worker, arrive at consumers in this process as that very type.

    Args:
        cls: the class; also usable as its decorator. Known by its module and qualified name.
        build: makes the exception from its message. Without it, ``cls(message)`` is used where that keeps the message,
            else an instance that carries the message alone (``__init__`` is not called).

    Raises:
        ArgumentError: not a subclass of ``Exception``.
    """
    if not (isinstance(cls, type) and issubclass(cls, Exception)):
        raise ArgumentError(
            f"register_error takes a subclass of Exception, found {cls!r}",
            argument="cls",
            value=repr(cls),
            rule="class",
        )
    _registered[cls.__module__, cls.__qualname__] = build or cls
    return cls


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:
        return f"<its text cannot be made: {type(second).__name__}>"


def _plain_fields(fields: Mapping[Any, Any], limits: Limits) -> dict[str, object]:
    size, coder = min(WORDS_BYTES, limits.text_bytes // 4), plain_coder(limits)
    kept: dict[str, object] = {}
    for key, value in list(fields.items())[:_MAX_FIELDS]:
        if not _is_field_name(key):
            continue
        if isinstance(value, str):
            kept[key] = clip(value, size, tail=key == "traceback_text")
            continue
        try:
            coder.pack({key: value})
            kept[key] = value if len(repr(value)) <= size else clip(repr(value), size)
        except Refused:
            kept[key] = clip(repr(value), size)
    return kept


def _is_field_name(key: object) -> bool:
    return (
        isinstance(key, str)
        and len(key) <= _NAME_BYTES
        and key.isascii()
        and key.isidentifier()
        and not key.startswith("_")
        and key not in ("self", "message", "fields", "args", "add_note", "with_traceback", "copy")
    )


def describe_error(error: BaseException, limits: Limits = LIMITS) -> ErrorReport:
    """``error`` in words of bounded size. Never fails, whatever the exception's own methods do."""
    size = min(WORDS_BYTES, limits.text_bytes // 4)
    cls = type(error)
    module, name, fields = cls.__module__, cls.__qualname__, {}
    if isinstance(error, OdsError):
        known = next(c for c in cls.__mro__ if error_class(c.__name__) is c)
        module, name = _OURS, known.__name__
        fields = _plain_fields(error.fields, limits)
    elif arguments := _arguments_of(error):
        fields = _plain_fields({"arguments": arguments}, limits)
    notes = getattr(error, "__notes__", ())
    notes = notes if isinstance(notes, (list, tuple)) else ()
    return ErrorReport(
        module=clip(module, _NAME_BYTES),
        type_name=clip(name, _NAME_BYTES),
        message=clip(_text_of(error), size),
        fields=fields,
        notes=tuple(clip(note, size) for note in notes[:_MAX_NOTES] if isinstance(note, str)),
    )


def _arguments_of(error: BaseException) -> tuple[object, ...]:
    """The arguments that make the exception again, where all of them are small plain values; else nothing."""
    arguments: tuple[object, ...] = error.args
    if isinstance(error, OSError) and len(arguments) == 2 and isinstance(error.filename, str):
        arguments = (*arguments, error.filename)
    small = all(type(item) in (str, bytes, int, float, bool, type(None)) for item in arguments)
    return arguments if small and len(arguments) <= 5 else ()


def restore_error(report: ErrorReport) -> OdsError:
    """The package's own error that :func:`describe_error` described; any other is kept in words.

    Those words are an ``OnlineDataWorkerError`` with ``module``, ``type_name``, ``detail``; :func:`own_type` makes the
    exception itself of it.
    """
    fields = {key: value for key, value in report.fields.items() if _is_field_name(key)}
    if report.module == _OURS:
        error = (error_class(report.type_name) or OdsError)(report.message, **fields)
    else:
        words = {"worker_id": "", "phase": "", "step": None, "traceback_text": ""}
        words |= {"module": report.module, "type_name": report.type_name, "detail": report.message}
        error = OnlineDataWorkerError(f"{report.type_name}: {report.message}", **(fields | words))
    for note in report.notes:
        error.add_note(note)
    return error


def own_type(error: OdsError) -> Exception:
    """What to raise for an error received: a worker's exception as its own type where that is safely known (B11).

    The exception then has ``error`` as its ``__cause__``, with every field, and a note with the worker's traceback.
    Any other error, and any type not known here, is returned as it is.
    """
    if type(error) is not OnlineDataWorkerError:
        return error
    fields = error.fields
    module, name, detail = fields.get("module"), fields.get("type_name"), fields.get("detail")
    if not (isinstance(module, str) and isinstance(name, str) and isinstance(detail, str)):
        return error
    made = _known(module, name, detail, fields.get("arguments", ()))
    if made is None:
        return error
    made.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        made.add_note(note)
    if fields.get("worker_id"):
        step = "" if fields.get("step") is None else f", step {fields['step']}"
        place = f"raised in worker {fields['worker_id']}, phase {fields.get('phase')}{step}"
        made.add_note(f"{place}\n{fields.get('traceback_text') or ''}".rstrip())
    return made


def _known(module: str, name: str, message: str, arguments: object) -> Exception | None:
    """An exception of the known class of that name which shows exactly ``message``, or None."""
    if module == _OURS:
        ours = error_class(name)
        return None if ours is None else ours(message)
    build = _registered.get((module, name)) or (SAFE_BUILTINS.get(name) if module == "builtins" else None)
    if build is None:
        return None
    tries: list[tuple[object, ...]] = [(message,), (_Verbatim(message),)]
    if isinstance(arguments, tuple) and arguments and module == "builtins":
        tries.insert(0, arguments)
    for values in tries:
        made = _shows(lambda values=values: build(*values), message)  # type: ignore[misc]
        if made is not None:
            return made
    if isinstance(build, type):
        bare: Any = build
        return _shows(lambda: bare.__new__(bare, message), message)
    return None


def _shows(build: Callable[[], Exception], message: str) -> Exception | None:
    try:
        made = build()
        return made if isinstance(made, Exception) and str(made) == message else None
    except Exception:
        # A constructor that wants other arguments: the next way is tried, and in the end the words are kept.
        return None


def worker_failure(
    error: BaseException,
    *,
    worker_id: str,
    phase: str,
    step: int | None = None,
    ticket_id: int | None = None,
    limits: Limits = LIMITS,
) -> WorkerFailed:
    """A worker's last words about ``error``, bounded in size: type, message and the end of its traceback.

    Args:
        error: what was raised.
        worker_id: whose it is.
        phase: make, reset, plan, step or close.
        step: index of the step, where there is one.
        ticket_id: the ticket in hand, if any.
        limits: the broker's, where known.
    """
    report = describe_error(error, limits)
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as second:
        text = f"<its traceback cannot be made: {type(second).__name__}>"
    return WorkerFailed(
        worker_id=worker_id,
        ticket_id=ticket_id,
        module=report.module,
        type_name=report.type_name,
        message=report.message,
        traceback_text=clip(text, min(2 * WORDS_BYTES, limits.text_bytes // 2), tail=True),
        phase=phase,
        step=step,
    )
