"""``python -m ods_async``: the command line. Child processes of an owner start here as well."""

from __future__ import annotations

import contextlib
import os
import sys


def main() -> int:
    """Run the command line, or be the child process that an owner started."""
    if sys.argv[1:2] == ["_child"]:
        from ods_async.supervise.child import main as be_child

        return be_child()
    from ods_async.cli.signals import listen_early

    listen_early()
    from ods_async.cli.main import main as command_line

    return command_line(leave=_leave)


def _leave(code: int) -> int:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
