"""``python -m ods_async.testing.simulation``: run schedules, and show one that fails."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from ods_async.testing.simulation import simulate

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the schedules that the arguments name.

    Returns:
        0 when all held, 1 when one failed.
    """
    parser = argparse.ArgumentParser(prog="python -m ods_async.testing.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first schedule (default 0)")
    parser.add_argument("--count", type=int, default=1, help="how many schedules (default 1)")
    parser.add_argument("--trace", action="store_true", help="print everything that happens")
    parser.add_argument("--keep-going", action="store_true", help="go on after a failing schedule")
    given = parser.parse_args(arguments)
    begun = time.monotonic()
    steps = batches = episodes = answers = runs = failed = done = 0
    broken: list[int] = []
    for seed in range(given.seed, given.seed + given.count):
        try:
            outcome = simulate(seed, print if given.trace else None)
        except Exception as error:
            broken.append(seed)
            print(f"seed {seed}: {type(error).__name__}: {error}")
            print(f"  replay: python -m ods_async.testing.simulation --seed {seed} --trace", flush=True)
            if given.trace:
                raise
            if not given.keep_going:
                return 1
            continue
        done += 1
        steps += outcome.steps
        batches += outcome.batches
        episodes += outcome.episodes
        answers += outcome.answers
        runs += outcome.runs
        failed += outcome.failed
        if done % 1000 == 0:
            print(f"{done} schedules, {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    print(
        f"{done} schedules held in {time.monotonic() - begun:.1f} s: {steps} steps, {runs} runs of the broker "
        f"({failed} failed as they should), {episodes} episodes, {answers} answers, {batches} batches checked"
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
