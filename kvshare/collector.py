"""Settings of Python's interpreter for a server: its cyclic garbage collector, and its threads' turns."""

import gc
import sys

_YOUNG_OBJECTS = 20_000  # allocations between collections; planning a long prompt makes thousands, no cycles
_TURN_S = 0.0005


def take_short_turns() -> None:
    """
    Let a thread that wants to run wait at most half a millisecond for another one, instead of five.

    numpy gives up the interpreter's lock in each larger operation, of which a plan has hundreds, and must
    wait for it again if meanwhile another thread stores a prompt or reads a body.
    """
    sys.setswitchinterval(_TURN_S)


def make_collections_rare() -> None:
    """
    Make collections rare and short, since all threads wait for them. Called when the server has started.

    Objects that exist now are never collected: a full collection over the modules of torch and transformers
    takes 0.3 s.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 100)
