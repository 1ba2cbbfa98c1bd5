"""The suite's tests of refills, run here."""

from ods_async.testing.conformance.refills import *  # noqa: F403
