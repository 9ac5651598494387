"""
Ports for servers that are started later, or again.

Systems give no port of this range to a socket for which any port is good: none is taken in the meantime.
"""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

_HOST = "127.0.0.1"
_RANGE = (16_384, 32_767)  # below that of outgoing connections, on Linux and on others
_random = random.SystemRandom()  # two processes that begin at once choose others


def free_ports(count: int) -> list[int]:
    """So many that nothing listens on."""
    with ExitStack() as taken:
        return [_free_port(taken) for _ in range(count)]


def port_with_next() -> int:
    """A port that is free, as the next one is, which `kvshare vllm` gives to its control server."""
    while True:
        (port,) = free_ports(1)
        with suppress(OSError), socket.create_server((_HOST, port + 1)):
            return port


def _free_port(taken: ExitStack) -> int:
    """Taken until `taken` ends."""
    while True:
        port = _random.randint(*_RANGE)
        with suppress(OSError):
            taken.enter_context(socket.create_server((_HOST, port)))
            return port
