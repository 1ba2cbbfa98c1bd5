"""The suite's tests of actions, run here."""

from ods_async.testing.conformance.actions import *  # noqa: F403
