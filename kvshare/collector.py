"""
Settings of a server's process: Python's cyclic garbage collector, its threads' turns, and when the C library
gives freed memory back.
"""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_YOUNG_OBJECTS = 20_000  # allocations between collections; planning a long prompt makes thousands, no cycles
_TURN_S = 0.0005
# glibc's names and numbers. It reaches these values by itself once a block of 32 MiB was freed.
_TRIM_THRESHOLD, _TRIM_BYTES = -1, 64 * 2**20
_MMAP_THRESHOLD, _MMAP_BYTES = -3, 32 * 2**20


def take_short_turns() -> None:
    """
    Let a thread that wants to run wait at most half a millisecond for another one, instead of five.

    numpy gives up the interpreter's lock in each larger operation, of which a plan has hundreds, and must
    wait for it again if meanwhile another thread stores a prompt or reads a body.
    """
    sys.setswitchinterval(_TURN_S)


@contextmanager
def no_collections() -> Iterator[None]:
    """
    Collect nothing while inside, and never what was made there: for imports, whose objects stay.

    Those of torch and transformers make a million objects. Looking through them again and again took a sixth
    of their time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def make_collections_rare() -> None:
    """
    Make collections rare and short, since all threads wait for them. Called when the server has started.

    Objects that exist now are never collected: a full collection over the modules of torch and transformers
    takes 0.3 s.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 100)


def keep_freed_memory() -> None:
    """
    Let the C library keep up to 64 MiB of freed memory a heap. Without effect where it is not glibc.

    A plan of a long prompt uses some megabytes, in arrays of which each was given back and asked for again: a
    fifth of the plan's time went into pages that the kernel had to clear.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)
        library.mallopt(_TRIM_THRESHOLD, _TRIM_BYTES)
