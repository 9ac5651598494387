"""Settings of Python's cyclic garbage collector for a server."""

import gc

_YOUNG_OBJECTS = 20_000  # allocations between collections; planning a long prompt makes thousands, no cycles


def make_collections_rare() -> None:
    """
    Make collections rare and short, since all threads wait for them. Called when the server has started.

    Objects that exist now are never collected: a full collection over the modules of torch and transformers
    takes 0.3 s.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 100)
