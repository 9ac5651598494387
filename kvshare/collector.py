"""Python's cyclic garbage collector, told what kind of process this is."""

import gc

_YOUNG_OBJECTS = 20_000  # between two collections: a long prompt's plan makes some thousands, without a cycle


def calm_collector() -> None:
    """
    Keep collections rare and short, once a server is up; its threads all wait for each.

    What is there now stays, and is never looked at again: a full collection over the modules of torch and
    transformers takes 0.3 s.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 100)
