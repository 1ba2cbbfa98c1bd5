"""Settings for a command: the file, and what the command line puts over it."""

from __future__ import annotations

import argparse

from ods_async.config import OnlineDataEngineCfg
from ods_async.errors import ConfigError
from ods_async.transport.endpoint import default_ipc

__all__ = ["settings_for"]


def settings_for(options: argparse.Namespace, *, standing: bool = True) -> OnlineDataEngineCfg:
    """The settings that ``options`` name.

    Args:
        options: the parsed command line.
        standing: a service that others must find: without an endpoint it gets the default one of its name.

    Raises:
        ConfigError: the file cannot be read, or a setting is wrong.
    """
    try:
        cfg = OnlineDataEngineCfg.from_file(options.config)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"{options.config}: {reason}", argument="CONFIG", value=repr(options.config), rule="a readable file"
        ) from error
    if getattr(options, "endpoint", None) is not None:
        cfg = cfg.replace(endpoint=options.endpoint)
    if standing and options.keys is not None:
        cfg = cfg.replace(server_keys=options.keys)
    if getattr(options, "workers", None) is not None:
        cfg = cfg.replace(num_workers=options.workers)
    if standing and cfg.endpoint is None:
        cfg = cfg.replace(endpoint=str(default_ipc(cfg.name)))
    return cfg
