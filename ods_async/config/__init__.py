"""The settings, their rules, and the files they may come from. Imports neither numpy nor torch."""

from __future__ import annotations

from ods_async.config.rules import DEFAULT_LIMITS, GYM_KEYS, plain_copy
from ods_async.config.settings import OnlineDataEngineCfg

__all__ = ["DEFAULT_LIMITS", "GYM_KEYS", "OnlineDataEngineCfg", "plain_copy"]
