"""The most memory of a process and its children: of real processes."""

import os
import subprocess
import sys
import time

import numpy as np

from kvshare_lab.bench.figures import PeakMemory, memory_bytes

BYTES = 64 * 1024**2
LOOKED_AT_S = 0.5  # five looks


def test_what_a_child_has_counts() -> None:
    code = f"held = bytearray({BYTES}); print('ready', flush=True); input()"
    with (
        PeakMemory() as peak,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as child,
    ):
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(LOOKED_AT_S)
        child.communicate(b"\n")
    assert peak.own_bytes > memory_bytes()["RssAnon"] + BYTES / 2


def test_a_fork_does_not_count_twice() -> None:
    """Before it runs a program of its own it has the parent's memory."""
    held = np.ones(4 * BYTES, np.uint8)
    child = os.fork()
    if child == 0:
        time.sleep(2 * LOOKED_AT_S)
        os._exit(0)
    with PeakMemory() as peak:
        time.sleep(LOOKED_AT_S)
    os.waitpid(child, 0)
    assert peak.own_bytes < memory_bytes()["RssAnon"] + len(held) / 2
