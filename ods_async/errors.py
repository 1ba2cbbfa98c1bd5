"""The error tree, sorted by who must act.

Every error is a class with fields and one sentence: what was expected, what was found, what to do. Fields travel with
the error through pickling and over the wire, so that a trainer in another process catches the very same thing.

* :class:`MisuseError`: the caller's code must change.
* :class:`DataUnavailableError`: the buffer does not hold what was asked for (yet).
* :class:`RequestTimeoutError`: a deadline passed; asking again is fine.
* :class:`OnlineDataWorkerError`: a simulation worker failed.
* :class:`PeerError`: the other end is away, foreign, or speaks nonsense.
* :class:`ClosedError`: this object, or the service behind it, has ended.
"""

from __future__ import annotations

from typing import Any, Self

__all__ = [
    "ArgumentError",
    "AuthenticationError",
    "BrokerUnreachableError",
    "ClosedError",
    "ConfigError",
    "DataUnavailableError",
    "EndpointError",
    "EndpointInUseError",
    "ForcedShutdownError",
    "LanguageCapacityError",
    "LimitExceededError",
    "MisuseError",
    "OdsError",
    "OnlineDataBudgetExhaustedError",
    "OnlineDataWorkerError",
    "OwnerOnlyError",
    "PeerError",
    "ProtocolError",
    "RequestTimeoutError",
    "RolloutRefusedError",
    "RunChangedError",
    "SchemaMismatchError",
    "SessionLostError",
    "SharedMemoryError",
    "StartCancelledError",
    "StateError",
    "WorkerExitedError",
    "error_class",
    "rebuild",
]


class OdsError(Exception):
    """Base of every error this package raises on purpose.

    Args:
        message: the whole sentence shown to the user.
        **fields: plain values (numbers, text, None, tuples of them) that a program may want; they become attributes.
    """

    def __init__(self, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        extra = {key: value for key, value in self.__dict__.items() if key not in ("message", "fields")}
        return rebuild, (type(self), self.message, self.fields), extra or None

    def __str__(self) -> str:
        return self.message

    def copy(self) -> Self:
        """A fresh instance with the same text and fields, so that a stored error can be raised more than once."""
        return type(self)(self.message, **self.fields)


class MisuseError(OdsError):
    """The calling code asked for something that cannot be; retrying the same call cannot help."""


class ArgumentError(MisuseError, ValueError):
    """A bad argument. Fields: ``argument``, ``value`` (its repr), ``rule``."""


class ConfigError(ArgumentError):
    """A bad setting. Fields: ``argument`` (the setting's name), ``value`` (its repr), ``rule``."""


class EndpointError(ConfigError):
    """An endpoint that cannot be used. Fields: ``argument``, ``value``, ``rule``."""


class EndpointInUseError(EndpointError):
    """A good endpoint that somebody else has, now. Fields: ``argument``, ``value``, ``rule``."""


class StateError(MisuseError, RuntimeError):
    """An operation in the wrong state. Fields: ``operation``, ``required``, ``current``."""


class OwnerOnlyError(MisuseError, RuntimeError):
    """A verb that only the owner of the service may use. Field: ``operation``."""


class DataUnavailableError(OdsError, RuntimeError):
    """No eligible window. Fields: ``mode``, ``length``, ``holds`` (what the buffer holds, in words)."""


class OnlineDataBudgetExhaustedError(DataUnavailableError):
    """The episodes' quotas cannot fill the batch; nothing was spent. Fields: ``requested``, ``remaining``."""


class RequestTimeoutError(OdsError, TimeoutError):
    """A deadline passed. Fields: ``operation``, ``timeout`` (seconds), ``missing`` (what was waited for)."""


class OnlineDataWorkerError(OdsError, RuntimeError):
    """A simulation worker failed.

    Fields: ``module``, ``type_name``, ``detail`` (the exception's own message), ``traceback_text``, ``worker_id``,
    ``phase`` (make, reset, plan, step or close), ``step`` (or None).
    """


class WorkerExitedError(OnlineDataWorkerError):
    """A worker's process ended without a word. Fields: ``worker_id``, ``exit_code`` (negative: the signal's number)."""


class ForcedShutdownError(OnlineDataWorkerError):
    """A process had to be ended by force, so what its environment should have written to disk may be incomplete."""


class SchemaMismatchError(OdsError, ValueError):
    """Data that does not fit the schema. Fields: ``field``, ``expected``, ``found``."""


class RolloutRefusedError(OdsError, ValueError):
    """A rollout the broker would not take. Fields: ``ticket_id``, ``reason``."""


class LimitExceededError(OdsError, ValueError):
    """Something is larger than allowed. Fields: ``what``, ``size``, ``limit``."""


class LanguageCapacityError(OdsError, OverflowError):
    """The language dictionary is full (``language_buffer_bytes``). Fields: ``needed``, ``capacity``."""


class PeerError(OdsError, ConnectionError):
    """The other end is away, is not ours, or cannot be understood."""


class BrokerUnreachableError(PeerError):
    """Nobody answers. Fields: ``endpoint``, ``timeout``."""


class AuthenticationError(PeerError):
    """Keys that do not fit: wrong ones, unlisted ones, or keys on one side only.

    Fields: ``endpoint``, ``key_file`` (empty without keys), ``reason``. Trying again cannot help.
    """


class ProtocolError(PeerError):
    """Bytes that are not a valid message. Field: ``reason``."""


class RunChangedError(PeerError):
    """The broker at this endpoint was restarted: another run. Fields: ``endpoint``, ``old_run_id``, ``new_run_id``."""


class SessionLostError(PeerError):
    """The broker does not know this connection (it was restarted, or forgot it): connect again, then ask again."""


class SharedMemoryError(OdsError, OSError):
    """Shared memory cannot be created or mapped. Fields: ``path``, ``needed_bytes``, ``free_bytes``."""


class StartCancelledError(OdsError, RuntimeError):
    """``stop()`` was called while ``start()`` was waiting for the first generation."""


class ClosedError(OdsError, RuntimeError):
    """The object, or the service behind it, has ended. Field: ``what``."""


def rebuild(cls: type[OdsError], message: str, fields: dict[str, Any]) -> OdsError:
    """The error of class ``cls`` with that text and those fields (used by pickling)."""
    return cls(message, **fields)


def _tree(cls: type[OdsError]) -> dict[str, type[OdsError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found |= _tree(child)
    return found


def error_class(name: str) -> type[OdsError] | None:
    """The class of this module with that name, or None: how a received error gets its type without unpickling."""
    found = _tree(OdsError).get(name)
    return found if found is not None and found.__module__ == __name__ else None
