from __future__ import annotations

import subprocess
import sys

CODE = """
import resource, threading
from ods_async.transport.allocator import keep_big_blocks

faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def use():
    for _ in range(6):
        bytearray(48 << 20)

print(keep_big_blocks())
use()
before = faults()
use()
thread = threading.Thread(target=use)
thread.start()
thread.join()
print(faults() - before)
"""


def test_big_blocks_are_made_of_memory_that_was_touched_before() -> None:
    """In every thread: otherwise each 48 MiB block costs 12,288 page faults."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True)
    told, faults = done.stdout.split()
    assert told == "False" or int(faults) < 5000
