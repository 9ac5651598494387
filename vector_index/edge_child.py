"""
Optimising an Edge shard in a process of its own.

`EdgeShard.optimize()` of qdrant-edge-py 0.9 holds the GIL until it is done, about 0.4 ms a point:
in the server's process it would stop every request for seconds.
"""

import asyncio
import logging
import sys
from pathlib import Path

log = logging.getLogger(__name__)

PROGRAM = """
import sys, qdrant_edge
shard = qdrant_edge.EdgeShard.load(sys.argv[1])
shard.optimize()
shard.close()
"""


async def optimise_in_child(folder: Path) -> None:
    """
    Optimise the shard in a folder that nobody has open, and wait for it.

    A child that fails is logged: the shard is then as it was. Cancelling ends the child.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, str(folder), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        if await child.wait() != 0:
            log.warning("optimising the Edge index failed with exit status %d", child.returncode)
    finally:
        if child.returncode is None:
            child.kill()
            await asyncio.shield(child.wait())
