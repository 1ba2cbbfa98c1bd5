"""Published helpers for tests of code that uses this package. Importing it registers ``ods_async/Counting-v0``."""

from __future__ import annotations

from ods_async.testing.counting import COUNTING_ID, CountingEnv, register, window_faults

__all__ = ["COUNTING_ID", "CountingEnv", "window_faults"]

register()
