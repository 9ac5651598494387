"""
Host waits for the device that vLLM's own check reports (`VLLM_GPU_SYNC_CHECK=warn`), while streams decode and
other requests load and save: each stalls every request of its step.
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
# As `warnings` writes it; in front may stand the name of a process.
_WARNING = re.compile(
    r"(?P<file>[^\s:]+\.py):(?P<line>\d+): \w+: "
    r"(?:called a synchronizing CUDA operation|GPU<->CPU sync detected)"
)
_PACKAGES = ("/kvshare/", "/vllm/", "/torch/")


async def measure(servers: Stack, config: decoding.Config) -> dict[str, Any]:
    """While streams decode, with loads and saves. The servers were started with the check on."""
    before = await _num_steps(servers)
    await decoding.measure(servers, config)
    num_steps = await _num_steps(servers) - before
    return counted(servers.shared.log_path.read_text(errors="replace"), num_steps)


def counted(log: str, num_steps: float) -> dict[str, Any]:
    """Of a vLLM's log: how many in all and in our code, per step, and where."""
    places = Counter(_place(found["file"], found["line"]) for found in _WARNING.finditer(log))
    ours = sum(count for place, count in places.items() if place.startswith("kvshare/"))
    return {
        "per_step": sum(places.values()) / max(num_steps, 1),
        "ours_per_step": ours / max(num_steps, 1),
        "steps": num_steps,
        "places": dict(places.most_common(_MOST_PLACES)),
    }


def _place(file: str, line: str) -> str:
    """From the package on: where it is installed is nobody's business."""
    starts = [file.rfind(package) + 1 for package in _PACKAGES if package in file]
    return f"{file[max(starts) :] if starts else Path(file).name}:{line}"


async def _num_steps(servers: Stack) -> float:
    async with connected(servers.shared.url) as client:
        return (await reports.read_counters(client)).total("vllm:iteration_tokens_total_count")
