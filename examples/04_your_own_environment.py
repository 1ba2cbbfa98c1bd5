"""A custom environment with its own expert: everything you write yourself to stream demonstrations of your robot.

See ``point_robot.py`` beside this file: an environment offers ``create_demo_segments()``, named parts of a
demonstration, each with the actions that perform it. Actions may be a generator, so that each segment is planned from
the state that the one before it reached. (An expert that lives elsewhere is named in ``gym_config["policy"]`` as
"module:attribute".)

    python examples/04_your_own_environment.py
"""

from __future__ import annotations

import ods_async as ods


def main() -> None:
    cfg = ods.OnlineDataEngineCfg(
        buffer_size=16,
        max_episode_steps=120,
        # "module:id": the worker imports the module, which registers the environment.
        gym_config={"id": "point_robot:examples/PointRobot-v0"},
        num_workers=2,
    )
    with ods.OnlineDataEngine(cfg) as engine:
        batch = engine.sample_batch(32, 4, sampling_mode="segment")
        texts = engine.resolve_language(batch)
        print(batch)
        print(f"example ok: {sorted({text for row in texts['subtask'] for text in row})}")


if __name__ == "__main__":
    main()
