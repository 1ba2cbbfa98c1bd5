"""A policy learns reach-v3 while the expert is still making demonstrations; its success rate is printed as it learns.

Behaviour cloning in its smallest form: a network maps an observation to the expert's action. The engine starts a broker
and two simulation workers; ``stream`` draws batches ahead in a thread of its own, so the training loop does not wait.

    python examples/01_train_while_it_streams.py
"""

from __future__ import annotations

import argparse
import time

import gymnasium as gym
import metaworld  # noqa: F401  registers Meta-World's environments
import torch
from torch import nn

import ods_async as ods

TASK = "reach-v3"


def make_policy(observation_width: int, action_width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(observation_width, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, action_width)
    )


@torch.no_grad()
def success_rate(policy: nn.Module, episodes: int, max_steps: int = 120) -> float:
    """Share of fresh episodes in which the policy reaches the goal."""
    env = gym.make("Meta-World/MT1", env_name=TASK, seed=1234, disable_env_checker=True)
    reached = 0
    for _ in range(episodes):
        observation, _ = env.reset()
        for _ in range(max_steps):
            action = policy(torch.as_tensor(observation, dtype=torch.float32))
            observation, _, _, truncated, info = env.step(action.clamp(-1, 1).numpy())
            if info["success"]:
                reached += 1
            if info["success"] or truncated:
                break
    env.close()
    return reached / episodes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=900)
    parser.add_argument("--evaluations", type=int, default=3)
    arguments = parser.parse_args()

    cfg = ods.OnlineDataEngineCfg(
        buffer_size=32,
        max_episode_steps=200,
        gym_config={
            "id": "Meta-World/MT1",
            "kwargs": {"env_name": TASK},
            "policy": "ods_async.worker.metaworld:expert",
        },
        num_workers=2,
        refill_threshold=200,
    )
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so small a network is no faster on more, and the workers need the cores
    with ods.OnlineDataEngine(cfg) as engine:
        policy: nn.Module | None = None
        since = time.perf_counter()
        every = max(1, arguments.batches // arguments.evaluations)
        for number, batch in enumerate(engine.stream(batch_size=256, chunk_size=1, prefetch=4), 1):
            observations = batch["obs"].flatten(0, 1).float()
            actions = batch["actions"].flatten(0, 1).float().clamp(-1, 1)
            if policy is None:
                policy = make_policy(observations.shape[-1], actions.shape[-1])
                optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
                print(f"before training: success {success_rate(policy, 10):.0%}", flush=True)
            loss = nn.functional.mse_loss(policy(observations), actions)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if number % every == 0:
                stats = engine.get_stats()
                rate = success_rate(policy, 10)
                print(
                    f"{number:5d} batches, {time.perf_counter() - since:5.1f} s: loss {loss.item():.4f}, success "
                    f"{rate:.0%}, {stats['successful_episodes']} demonstrations so far",
                    flush=True,
                )
            if number >= arguments.batches:
                break
    print(f"example ok: success {rate:.0%}")


if __name__ == "__main__":
    main()
