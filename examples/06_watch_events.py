"""Follow everything that happens to the buffer, from the first event on, and see that nothing was missed.

python examples/06_watch_events.py
"""

from __future__ import annotations

from collections import Counter

import ods_async as ods


def main() -> None:
    cfg = ods.OnlineDataEngineCfg(
        buffer_size=8,
        max_episode_steps=60,
        gym_config={"id": "ods_async/Counting-v0", "kwargs": {"min_length": 20, "max_length": 50}},
        refill_policy="manual",
        num_workers=2,
    )
    with ods.OnlineDataEngine(cfg) as engine:
        generation = engine.request_refill()
        seen = Counter()
        following = 0
        # since=0 replays what happened before this subscriber came; the numbers have no gap.
        with ods.EventSubscriber(engine.endpoint, since=0) as events:
            for event in events:
                assert event.sequence == following
                following += 1
                seen[event.kind] += 1
                print(f"{event.sequence:4d} {event.kind}", flush=True)
                if event.kind == "generation_completed" and event.generation == generation:
                    break
    print(f"example ok: {dict(seen)}")


if __name__ == "__main__":
    main()
