"""The suite's tests of lifecycle, run here."""

from ods_async.testing.conformance.lifecycle import *  # noqa: F403
