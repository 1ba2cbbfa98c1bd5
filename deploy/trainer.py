"""A trainer in a container: clones the experts' behaviour from windows that it draws from the broker.

    python trainer.py tcp://broker:5555 --keys /keys/trainer.key

Ends after ``--batches`` batches (0: never) or on SIGTERM with code 0, on SIGINT with 130. Put your own training loop
where the small one is; keep the first lines: process 1 of a container gets only those signals that it asked for, and
importing torch takes seconds.
"""

import signal
import sys


def end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    sys.exit(130 if number == signal.SIGINT else 0)


for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, end)

import argparse  # noqa: E402
import time  # noqa: E402

import torch  # noqa: E402
from tensordict import TensorDict  # noqa: E402
from torch import nn  # noqa: E402

import ods_async as ods  # noqa: E402

SHOW_SECONDS = 5.0


def observations(batch: TensorDict) -> torch.Tensor:
    """Every floating observation of a batch side by side: ``[windows * steps, width]``."""
    if isinstance(batch["obs"], torch.Tensor):
        return batch["obs"].flatten(0, 1).flatten(1).float()
    found = [value for value in batch["obs"].values(True, True) if value.is_floating_point()]
    return torch.cat([value.flatten(0, 1).flatten(1).float() for value in found], dim=-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("endpoint")
    parser.add_argument("--keys")
    parser.add_argument("--batches", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--chunk-size", type=int, default=16)
    arguments = parser.parse_args()

    policy = optimizer = None
    with ods.Client(arguments.endpoint, keys=arguments.keys, name="trainer", timeout=600.0) as client:
        client.wait_ready()
        shown, drawn_then = time.monotonic() - SHOW_SECONDS, 0
        with client.stream(arguments.batch_size, arguments.chunk_size, prefetch=2) as stream:
            for number, batch in enumerate(stream, 1):
                seen, actions = observations(batch), batch["actions"].flatten(0, 1).float()
                if policy is None:
                    policy = nn.Sequential(nn.Linear(seen.shape[-1], 128), nn.ReLU(), nn.Linear(128, actions.shape[-1]))
                    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
                loss = nn.functional.mse_loss(policy(seen), actions)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                now = time.monotonic()
                if now - shown >= SHOW_SECONDS or number == arguments.batches:
                    rate = (number - drawn_then) / (now - shown)
                    shown, drawn_then = now, number
                    words = f"{number} batches over {client.data_path}, {rate:.0f} a second, loss {loss.item():.4f}"
                    print(words, flush=True)
                if number == arguments.batches:
                    return


if __name__ == "__main__":
    main()
