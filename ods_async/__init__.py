"""Fresh robot demonstrations, streamed from simulators to trainers."""

__version__ = "0.1.0"
