"""The same windows through a PyTorch DataLoader, with worker processes that each connect for themselves.

python examples/03_dataloader.py
"""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader

import ods_async as ods


def only_what_the_model_needs(batch):
    return {"obs": batch["obs", "state"], "actions": batch["actions"], "valid": batch["valid"]}


def main() -> None:
    cfg = ods.OnlineDataEngineCfg(
        buffer_size=16,
        max_episode_steps=60,
        gym_config={"id": "ods_async/Counting-v0", "kwargs": {"min_length": 40, "max_length": 50}},
    )
    with ods.OnlineDataEngine(cfg) as engine:
        # Chunk lengths are drawn anew for every batch; each worker process has a stream of draws of its own.
        dataset = ods.OnlineDataset(
            engine.endpoint,
            chunk_size=ods.UniformChunkSampler(8, 32),
            batch_size=16,
            transform=only_what_the_model_needs,
            seed=0,
        )
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=2,
            collate_fn=ods.OnlineDataset.passthrough_collate_fn,
            multiprocessing_context="spawn",
        )
        lengths = torch.zeros(64, dtype=torch.int64)
        for number, batch in enumerate(loader, 1):
            assert batch["obs"].shape[0] == 16
            lengths[batch["obs"].shape[1]] += 1
            if number == 100:
                break
    print(f"chunk lengths drawn: {lengths.nonzero().flatten().tolist()}")
    print("example ok: 100 batches")


if __name__ == "__main__":
    main()
