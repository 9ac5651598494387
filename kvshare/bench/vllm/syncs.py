"""
How often the host waits for the device, as vLLM's own check reports it (`VLLM_GPU_SYNC_CHECK=warn`), while
streams decode and other requests load and save. Each wait stops all requests of its step.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from kvshare.bench.vllm import decoding, reports
from kvshare.bench.vllm.client import connected
from kvshare.bench.vllm.stack import Stack

_MOST_PLACES = 20
# As `warnings` writes it, perhaps with the name of a process in front.
_WARNING = re.compile(
    r"(?P<file>[^\s:]+\.py):(?P<line>\d+): \w+: "
    r"(?:called a synchronizing CUDA operation|GPU<->CPU sync detected)"
)
_PACKAGES = ("/kvshare/", "/vllm/", "/torch/")


async def measure(servers: Stack, config: decoding.Config) -> dict[str, Any]:
    """While streams decode, with loads and saves. The servers must have been started with the check on."""
    before = await _num_steps(servers)
    await decoding.measure(servers, config)
    num_steps = await _num_steps(servers) - before
    return counted(servers.shared.log_path.read_text(errors="replace"), num_steps)


def counted(log: str, num_steps: float) -> dict[str, Any]:
    """The waits in the log of a vLLM: per step, in all and in our code, and where they are."""
    places = Counter(_place(found["file"], found["line"]) for found in _WARNING.finditer(log))
    ours = sum(count for place, count in places.items() if place.startswith("kvshare/"))
    return {
        "per_step": sum(places.values()) / max(num_steps, 1),
        "ours_per_step": ours / max(num_steps, 1),
        "steps": num_steps,
        "places": dict(places.most_common(_MOST_PLACES)),
    }


def _place(file: str, line: str) -> str:
    """The file's path from its package on, and the line: where a package is installed is not published."""
    starts = [file.rfind(package) + 1 for package in _PACKAGES if package in file]
    return f"{file[max(starts) :] if starts else Path(file).name}:{line}"


async def _num_steps(servers: Stack) -> float:
    async with connected(servers.shared.url) as client:
        return (await reports.read_counters(client)).total("vllm:iteration_tokens_total_count")
