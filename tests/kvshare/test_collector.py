"""What a server asks of Python's garbage collector, and of its threads."""

import ctypes
import gc
import subprocess
import sys

import pytest

from kvshare.collector import make_collections_rare, no_collections, take_short_turns


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


def test_nothing_is_collected_while_modules_are_imported() -> None:
    """What they made is not looked at afterwards."""
    frozen = gc.get_freeze_count()
    try:
        with no_collections():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()


def test_a_thread_waits_a_tenth_of_pythons_own_time_for_its_turn() -> None:
    """Five milliseconds by default."""
    before = sys.getswitchinterval()
    try:
        take_short_turns()
        assert sys.getswitchinterval() <= before / 10
    finally:
        sys.setswitchinterval(before)


_COUNTS_BLOCKS_FROM_THE_KERNEL = """
import ctypes
from kvshare.collector import keep_freed_memory
class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "abcdefghij"]
library = ctypes.CDLL(None)
library.mallinfo2.restype = Info
library.malloc.restype = ctypes.c_void_p
def blocks():
    before = library.mallinfo2().d
    library.malloc(ctypes.c_size_t(8 * 2**20))
    return library.mallinfo2().d - before
at_first = blocks()
keep_freed_memory()
print(at_first, blocks())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc")
def test_large_arrays_come_from_memory_that_is_kept() -> None:
    """8 MiB are a mapping of the kernel's by default, which is gone when they are freed."""
    found = subprocess.run(
        [sys.executable, "-c", _COUNTS_BLOCKS_FROM_THE_KERNEL], capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["1", "0"]
