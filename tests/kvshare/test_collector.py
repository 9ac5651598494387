"""What a server asks of Python's garbage collector."""

import gc

from kvshare.collector import make_collections_rare


def test_what_is_there_is_not_looked_at_again() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)  # Python's own: a server may have run in this process
        make_collections_rare()
        assert gc.get_freeze_count() > 1000
        assert gc.get_threshold()[0] > 700
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
