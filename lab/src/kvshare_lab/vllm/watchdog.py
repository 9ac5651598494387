"""
Ends the processes of a server when the benchmark that started them has ended, however that was: a kill leaves
no time for it.

A program of its own, started with the id of their process group. Its input is a pipe from the benchmark, to
which nothing is written and which the system closes at its end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

STOP_S = 20.0  # to end by themselves
_LOOK_EVERY_S = 0.1


def watched(group: int) -> subprocess.Popen[bytes]:
    """A process that watches this one for a group. Kill it before the group's id can be another's."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(group)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # what is typed in a terminal is for the benchmark
    )


def _end(group: int) -> None:
    """Ask the processes to end, and kill those that do not."""
    os.killpg(group, signal.SIGTERM)
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        time.sleep(_LOOK_EVERY_S)
        os.killpg(group, 0)
    os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    while os.read(sys.stdin.fileno(), 1):
        pass
    with suppress(ProcessLookupError):  # all have ended
        _end(int(sys.argv[1]))
