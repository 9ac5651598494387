"""Makes a process that native code ends write the Python stack of each thread to stderr."""

import faulthandler
import os
from contextlib import suppress

_FOR_CHILDREN = "PYTHONFAULTHANDLER"


def report_crashes() -> None:
    """
    Called once where a process of ours begins. Python processes that it starts, or becomes, do the same.

    A stderr without a file, as in tests, leaves it off.
    """
    os.environ.setdefault(_FOR_CHILDREN, "1")
    if not faulthandler.is_enabled():
        with suppress(OSError, ValueError, RuntimeError, AttributeError):
            faulthandler.enable()
