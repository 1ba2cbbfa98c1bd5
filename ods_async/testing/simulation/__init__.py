"""The whole service in one deterministic loop: the real broker state and client, simulated peers, network and clock.

One seed is one schedule: settings, peers, faults, and the order in which everything happens. After every step the
service is held against books that are kept a second time (:data:`INVARIANTS`)::

    python -m ods_async.testing.simulation --seed 17 --trace     # what happens in one schedule
    python -m ods_async.testing.simulation --count 100000        # many of them
"""

from __future__ import annotations

from ods_async.testing.simulation.clockwork import SimulationError, Violation
from ods_async.testing.simulation.lease_ledger import INVARIANTS
from ods_async.testing.simulation.service import Outcome, Service, simulate

__all__ = ["INVARIANTS", "Outcome", "Service", "SimulationError", "Violation", "simulate"]
