"""``python -m ods_async``: the command line. Child processes of an owner start here as well."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line, or be the child process that an owner started."""
    if sys.argv[1:2] == ["_child"]:
        from ods_async.supervise.child import main as be_child

        return be_child()
    from ods_async.cli.main import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
