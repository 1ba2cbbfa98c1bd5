"""Rows in processes of their own: gymnasium's ``AsyncVectorEnv``, with the cause of a failure kept (C34).

Gymnasium sends a row's exception to its parent by its own means, which lose or hang on what they cannot carry. So a row
turns its exception into one that travels, with the traceback as a note; and a process that dies is said to have died.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import os
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import gymnasium as gym
from gymnasium import logger
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from ods_async.worker.environments import VectorEnvironment
from ods_async.worker.recorder import Moment
from ods_async.worker.settings import EnvironmentSettings
from ods_async.worker.spaces import SpaceCodec

__all__ = ["AsyncEnvironment", "make_async"]


class _Portable(gym.Wrapper[Any, Any, Any, Any]):
    """Raises only what can be carried from one process to another."""

    def reset(self, **kwargs: Any) -> Any:
        return _carry(partial(self.env.reset, **kwargs))

    def step(self, action: Any) -> Any:
        return _carry(partial(self.env.step, action))


def _carry(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        made = _portable(error)
        made.add_note("in the row's own process:\n" + "".join(traceback.format_exception(error))[-16_384:])
        raise made from None


def _portable(error: Exception) -> Exception:
    """A builtin exception of the same type where there is one, else one that names the type."""
    kind, text = type(error), str(error)
    if getattr(builtins, kind.__name__, None) is kind:
        try:
            made: Exception = kind(text)
            if str(made) == text:
                return made
        except TypeError:
            pass  # a type that wants more than a text
    return RuntimeError(f"{kind.__module__}.{kind.__qualname__}: {text}")


class AsyncEnvironment(VectorEnvironment):
    """A vector environment whose rows live in processes of their own."""

    _broken = False

    def reset(self, seeds: Sequence[int], episode_index: int = 0) -> list[Moment]:
        """Begin an episode in every row."""
        return self._watched(partial(super().reset, seeds, episode_index))  # type: ignore[no-any-return]

    def step(self, actions: Sequence[Any]) -> list[Moment | None]:
        """One step of the whole."""
        return self._watched(partial(super().step, actions))  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the rows' processes, by force after a failure."""
        vector: Any = self.whole.unwrapped
        if not self._broken:
            self._quietly(partial(vector.close, timeout=30))
            return
        if vector.closed:
            return
        vector.closed = True
        for process in vector.processes:
            if process.is_alive():
                process.terminate()
        for process in vector.processes:
            process.join(5)
        for pipe in vector.parent_pipes:
            if pipe is not None:
                pipe.close()

    def _watched(self, call: Callable[[], Any]) -> Any:
        try:
            return self._quietly(call)
        except (EOFError, ConnectionError) as error:
            self._dead(error)
        except Exception as error:
            self._broken = True
            # Gymnasium wraps the row's exception in another one of its type; the inner one has the notes.
            inner = error.args[0] if error.args else None
            if isinstance(inner, Exception):
                raise inner from None
            raise

    def _dead(self, error: Exception) -> NoReturn:
        self._broken = True
        vector: Any = self.whole.unwrapped
        for process in vector.processes:
            process.join(1.0)
            if process.exitcode is not None:
                break
        codes = [process.exitcode for process in vector.processes]
        raise RuntimeError(f"a row's process ended during a step or reset; exit codes by row: {codes}") from error

    @staticmethod
    def _quietly(call: Callable[[], Any]) -> Any:
        """Gymnasium repeats a row's error as warnings; it is told once, by us."""
        level, logger.min_level = logger.min_level, logger.ERROR + 1
        try:
            return call()
        finally:
            logger.min_level = level


def _make_row(
    spec: EnvSpec, imports: Sequence[str], limit: int, kwargs: Mapping[str, Any], parent: int
) -> gym.Env[Any, Any]:
    """One row, in its own process (and in the ``parent``, where gymnasium looks at its spaces)."""
    if os.getpid() != parent:
        # Ctrl-C in a terminal reaches the whole group; the worker decides when its rows end.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in imports:
        importlib.import_module(name)
    return _Portable(gym.make(spec, max_episode_steps=limit, disable_env_checker=True, **kwargs))


def make_async(settings: EnvironmentSettings, capacity: int, limit: int, kwargs: Mapping[str, Any]) -> AsyncEnvironment:
    """``settings.num_envs`` rows in processes of their own, told to truncate after ``limit`` steps.

    Raises:
        SchemaMismatchError: a space that cannot be recorded.
        Exception: whatever the environment's constructor raises.
    """
    spec = gym.spec(settings.id)
    make = partial(_make_row, spec, settings.imports, limit, dict(kwargs), os.getpid())
    with contextlib.closing(make()) as probe:  # what cannot be recorded is refused before any process is started
        SpaceCodec(probe.observation_space, ("obs",))
        SpaceCodec(probe.action_space, ("actions",))
    vector = AsyncVectorEnv([make] * settings.num_envs, autoreset_mode=AutoresetMode.DISABLED, context="forkserver")
    return AsyncEnvironment(vector, capacity, settings.id, settings)
