"""``keygen``: make the broker's keys and those of its clients, and say what goes where."""

from __future__ import annotations

import argparse
from pathlib import Path

from ods_async.cli.output import print_json
from ods_async.errors import ConfigError
from ods_async.transport.curve import CLIENT, make_keys

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Make what is missing; nothing that is there is changed."""
    folder, clients = Path(options.folder), tuple(dict.fromkeys(options.clients or (CLIENT,)))
    try:
        made = make_keys(folder, clients)
    except OSError as error:
        raise ConfigError(
            f"cannot write keys to {folder}: {(error.strerror or str(error)).lower()}",
            argument="DIR",
            value=str(folder),
            rule="a folder to write in",
        ) from error
    if options.json:
        print_json({"written": [str(file) for file in made.written], "kept": [str(file) for file in made.kept]})
        return 0
    for file in made.written:
        print(f"wrote {file}")
    for file in made.kept:
        print(f"kept  {file}")
    names = ", ".join(f"{name}.key" for name in clients)
    print(f"broker:  server_keys: {folder} in its settings, or --keys {folder}")
    print(f"clients: copy {names} and server.pub to their machine, then --keys PATH or keys=CurveKeys.load(PATH)")
    print(f"to shut a client out, remove its file from {folder / 'clients'}")
    return 0
