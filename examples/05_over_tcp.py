"""Broker, worker and trainer as programs of their own, meeting over tcp, as they would on three machines.

The three commands below are what you would type on each machine. On other machines than this one use the broker's
address in place of 127.0.0.1, and keys (see docs/security.md).

    python examples/05_over_tcp.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import ods_async as ods

CONFIG = """
buffer_size = 16
max_episode_steps = 60
worker_failure = "tolerate"
endpoint = "tcp://127.0.0.1:0"

[gym_config]
id = "ods_async/Counting-v0"
kwargs = { min_length = 20, max_length = 50 }
"""


def start(*arguments: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "ods_async", *arguments]
    print("$ ods-async", *arguments, flush=True)
    return subprocess.Popen(command, text=True, **options)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.toml"
        config.write_text(CONFIG)
        programs = [start("broker", str(config), "--json", stdout=subprocess.PIPE)]
        try:
            assert programs[0].stdout is not None
            endpoint = json.loads(programs[0].stdout.readline())["endpoints"][0]
            programs += [start("worker", str(config), "--connect", endpoint) for _ in range(2)]
            with ods.Client(endpoint, data_path="frames") as trainer:
                trainer.wait_ready(timeout=60.0)
                for number, batch in enumerate(trainer.stream(batch_size=64, chunk_size=16, prefetch=2), 1):
                    assert batch.batch_size == (64, 16)
                    if number == 200:
                        break
                stats = trainer.get_stats()
            subprocess.run([sys.executable, "-m", "ods_async", "stats", endpoint], check=True)
        finally:
            for program in reversed(programs):
                program.terminate()
            for program in programs:
                program.wait(timeout=20)
    print(f"example ok: 200 batches over tcp, {stats['successful_episodes']} episodes")


if __name__ == "__main__":
    main()
