"""The command line's grammar: verbs, options, and the checks that make a bad value a usage error (exit code 2)."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

from ods_async.errors import EndpointError
from ods_async.transport.endpoint import Endpoint, parse_address, parse_endpoint
from ods_async.version import __version__

__all__ = ["parser"]

_EPILOG = """\
exit codes: 0 fine, 1 failed (the reason on standard error), 2 bad usage, 130 interrupted.
Services (up, broker, worker, dashboard) and events --follow end in good order on SIGTERM and SIGHUP (code 0) and on
Ctrl-C (130); a second signal ends every command at once (128 and its number).
"""


def parser() -> argparse.ArgumentParser:
    """The whole grammar; ``verb`` holds the command's name."""
    top = argparse.ArgumentParser(
        prog="ods-async",
        description="Fresh robot demonstrations, streamed from simulators to trainers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"ods-async {__version__}")
    top.add_argument("-v", "--verbose", action="count", default=0, help="say more on standard error; twice: debugging")
    verbs = top.add_subparsers(dest="verb", required=True, metavar="COMMAND")

    up = verbs.add_parser("up", help="start a broker and its local workers, and show how they do")
    _config(up)
    up.add_argument("--workers", type=_count, help="worker processes, instead of num_workers")

    broker = verbs.add_parser("broker", help="start a broker alone; workers connect from anywhere")
    _config(broker)

    worker = verbs.add_parser("worker", help="start one worker for a broker elsewhere")
    worker.add_argument("config", metavar="CONFIG", help="settings file (.yaml, .json, .toml)")
    worker.add_argument("--connect", metavar="ENDPOINT", required=True, type=_address, help="the broker's address")
    worker.add_argument(
        "--id", dest="worker_id", metavar="NAME", help="name of the worker; default: host and process id"
    )
    worker.add_argument(
        "--patience",
        type=_seconds,
        default=0.0,
        metavar="SECONDS",
        help="how long to look for a broker that went away, and serve it again (default: end at once)",
    )
    _keys(worker)

    sample = verbs.add_parser("sample", help="draw batches; print fields, shapes and rates")
    _ask(sample, 30.0)
    sample.add_argument("-b", "--batch-size", type=_count, default=64, help="windows a batch (default 64)")
    sample.add_argument("-c", "--chunk-size", type=_count, default=32, help="steps a window (default 32)")
    sample.add_argument("-n", "--batches", type=_count, default=1, help="how many batches (default 1)")
    sample.add_argument("--mode", choices=("episode", "segment", "boundary"), default="episode")
    sample.add_argument("--history", type=_count, help="draw contexts: steps up to now")
    sample.add_argument("--horizon", type=_count, help="draw contexts: steps from now on")
    sample.add_argument("--data-path", choices=("auto", "shared_memory", "frames"), default="auto")
    sample.add_argument("--seed", type=_seed, help="repeatable draws from an unchanged buffer")

    stats = verbs.add_parser("stats", help="counters, state, workers, faults")
    _ask(stats)
    stats.add_argument(
        "--check", action="store_true", help="fail (code 1) unless the service makes and serves episodes"
    )
    stats.add_argument(
        "--worker", metavar="NAME", action="append", default=[], help="with --check: and unless this worker is well"
    )
    budget = verbs.add_parser("budget", help="what is left of every episode's sampling budget")
    _ask(budget)
    refill = verbs.add_parser("refill", help="ask for the next generation (owner)")
    _ask(refill)
    refill.add_argument("--wait", action="store_true", help="return when it is complete")
    stop = verbs.add_parser("stop", help="end the service (owner)")
    _ask(stop)
    stop.add_argument("--grace", type=_seconds, default=5.0, help="seconds workers have to end between two steps")

    events = verbs.add_parser("events", help="print the run's numbered events")
    _ask(events)
    events.add_argument("--follow", "-f", action="store_true", help="go on with those to come")
    events.add_argument("--since", type=_seed, help="first number (default: the oldest that is held)")
    events.add_argument("--kind", action="append", metavar="KIND", help="only this kind; may be given more than once")

    dashboard = verbs.add_parser("dashboard", help="show a service on a web page (and its metrics for Prometheus)")
    _ask(dashboard)
    dashboard.add_argument(
        "--bind",
        metavar="HOST:PORT",
        default="127.0.0.1:8555",
        help="where to listen for browsers (default 127.0.0.1:8555; port 0: any)",
    )
    dashboard.add_argument(
        "--allow-insecure-bind",
        action="store_true",
        help="bind beyond this machine: whoever reaches the port can read all that the page shows",
    )

    keygen = verbs.add_parser("keygen", help="make CURVE keys for a broker and its clients")
    keygen.add_argument("folder", metavar="DIR", help="where to; what is there already stays as it is")
    keygen.add_argument(
        "--client", dest="clients", metavar="NAME", action="append", help="a client; may be repeated (default: client)"
    )
    keygen.add_argument("--json", action="store_true", help="for programs: the files, as JSON")
    return top


def _config(command: argparse.ArgumentParser) -> None:
    command.add_argument("config", metavar="CONFIG", help="settings file (.yaml, .json, .toml)")
    command.add_argument("--endpoint", type=_endpoint, help="where consumers connect, instead of the file's")
    command.add_argument("--keys", metavar="PATH", help="the broker's keys (server_keys), instead of the file's")
    command.add_argument("--json", action="store_true", help="one JSON value a line")


def _ask(command: argparse.ArgumentParser, timeout: float = 10.0) -> None:
    command.add_argument("endpoint", metavar="ENDPOINT", type=_address, help="tcp://host:port or ipc:///path")
    _keys(command)
    command.add_argument("--timeout", type=_seconds, default=timeout, help=f"seconds to wait (default {timeout:g})")
    command.add_argument("--json", action="store_true", help="for programs: JSON, one value a line")


def _keys(command: argparse.ArgumentParser) -> None:
    words = "folder of CURVE keys (NAME.key and server.pub), or the NAME.key file in it, for a tcp endpoint"
    command.add_argument("--keys", metavar="PATH", help=words)


def _endpoint(text: str, parse: Callable[[str], Endpoint] = parse_endpoint) -> str:
    try:
        return str(parse(text))
    except EndpointError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _address(text: str) -> str:
    return _endpoint(text, parse_address)


def _number(text: str, low: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {low}")
    return value


def _count(text: str) -> int:
    return _number(text, 1)


def _seed(text: str) -> int:
    return _number(text, 0)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number of seconds above 0")
    return value
