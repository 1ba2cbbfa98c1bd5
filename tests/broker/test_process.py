from __future__ import annotations

import subprocess
import sys

CODE = """
import gc, ods_async.broker.service
from ods_async.broker.process import settle_in

before = len(gc.get_objects())
settle_in()
print(before, len(gc.get_objects()), gc.isenabled())
"""


def test_the_search_for_garbage_does_not_look_at_what_a_broker_has_imported() -> None:
    """A collection of all generations costs its objects, on the loop: it must not cost more than 5 ms."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    before, after, enabled = done.stdout.split()
    assert int(before) > 10_000
    assert int(after) < 1_000
    assert enabled == "True"
