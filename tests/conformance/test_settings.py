"""The suite's tests of settings, run here."""

from ods_async.testing.conformance.settings import *  # noqa: F403
