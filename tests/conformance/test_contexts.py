"""The suite's tests of contexts, run here."""

from ods_async.testing.conformance.contexts import *  # noqa: F403
