"""The suite's tests of looking, run here."""

from ods_async.testing.conformance.looking import *  # noqa: F403
