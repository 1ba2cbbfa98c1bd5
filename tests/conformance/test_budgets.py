"""The suite's tests of budgets, run here."""

from ods_async.testing.conformance.budgets import *  # noqa: F403
