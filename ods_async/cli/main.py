"""``ods-async``: parse, run, and turn whatever happens into an exit code and one line of reason."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

from ods_async.cli.arguments import parser
from ods_async.cli.output import describe_failure
from ods_async.cli.signals import INTERRUPTED, Interrupted, take_watch
from ods_async.errors import ArgumentError, EndpointInUseError

__all__ = ["main"]

# Module and function; imported when called for, since some of them take seconds to import.
_VERBS: Final = {
    "up": "up:run",
    "broker": "services:run_broker",
    "worker": "services:run_one_worker",
    "sample": "sample:run",
    "stats": "ask:stats",
    "budget": "ask:budget",
    "refill": "ask:refill",
    "stop": "ask:stop",
    "events": "events:run",
    "dashboard": "dashboard:run",
    "keygen": "keygen:run",
}
# Whoever ends them means it: SIGTERM is their ordinary end, with code 0.
_SERVICES: Final = ("up", "broker", "worker", "dashboard")


def main(arguments: Sequence[str] | None = None, *, leave: Callable[[int], int] = int) -> int:
    """Run one command.

    Args:
        arguments: the words after the program's name; None: those of this process.
        leave: called with the exit code when a signal cut the command short and everything is put in order; a program
            may end right there, since taking an interpreter with torch apart takes seconds on a busy machine.

    Returns:
        The exit code: 0 fine, 1 failed, 2 bad usage, 130 interrupted.
    """
    watch = take_watch()
    try:
        options = parser().parse_args(arguments)
    except SystemExit as done:
        return done.code if isinstance(done.code, int) else 2
    level = (logging.WARNING, logging.INFO, logging.DEBUG)[min(options.verbose, 2)]
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options.watch = watch
    service = options.verb in _SERVICES or bool(getattr(options, "follow", False))
    try:
        watch.interrupt()
        module, _, function = _VERBS[options.verb].partition(":")
        run: Callable[[Any], int] = getattr(importlib.import_module(f"ods_async.cli.{module}"), function)
        code = run(options)
        sys.stdout.flush()
    except (Interrupted, KeyboardInterrupt):
        return leave(watch.exit_code(service=service) if watch.number is not None else INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has seen enough; nothing more may be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ArgumentError as error:
        describe_failure(error)
        return 1 if isinstance(error, EndpointInUseError) else 2  # the words were right, the moment was not
    except Exception as error:
        describe_failure(error)
        if options.verbose:
            logging.getLogger(__name__).exception("where it happened")
        return 1
    finally:
        watch.close()
    return code
