"""What a process does that is a broker and nothing else."""

from __future__ import annotations

import gc

from ods_async.transport.allocator import keep_big_blocks

__all__ = ["settle_in"]


def settle_in() -> None:
    """Suit this process to serve; call it once everything is imported and before a broker is entered.

    Big blocks of memory are kept (see :func:`~ods_async.transport.allocator.keep_big_blocks`), and the search for
    garbage leaves alone what exists already: modules, classes and functions are some 35,000 objects, which never go; to
    look at all of them held the loop up for 15 ms now and then.
    """
    keep_big_blocks()
    gc.collect()
    gc.freeze()
