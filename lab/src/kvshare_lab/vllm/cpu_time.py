"""What the processes of a server have computed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def session_cpu_seconds(session_id: int) -> float:
    """User and system time of the processes of a session, and of their children that have ended."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # ended meanwhile
            # Fields from the third on: the second, the name in brackets, may contain blanks.
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session_id:
                ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")
