"""What a server asks of Python's garbage collector, and of its threads."""

import gc
import sys

from kvshare.collector import make_collections_rare, take_short_turns


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


def test_a_thread_waits_a_tenth_of_pythons_own_time_for_its_turn() -> None:
    """Five milliseconds by default."""
    before = sys.getswitchinterval()
    try:
        take_short_turns()
        assert sys.getswitchinterval() <= before / 10
    finally:
        sys.setswitchinterval(before)
