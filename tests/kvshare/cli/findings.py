"""Where `kvshare doctor` looks for a vLLM: at small servers, and at an address without one."""

from __future__ import annotations

import socket
from collections.abc import Callable

from tests.kvshare.cli.fake_vllm import Fake

Start = Callable[[Fake], Fake]


def nowhere() -> str:
    """An address of loopback where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"
