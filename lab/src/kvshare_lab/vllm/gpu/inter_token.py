"""
Time between the tokens of streams that decode while other requests arrive, one by one; and how often the host
waits for the device meanwhile, as vLLM's own check reports it (`VLLM_GPU_SYNC_CHECK=warn`): each wait stops
all requests of its step.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from kvshare_lab.bench.figures import percentiles
from kvshare_lab.bench.harness import rounds
from kvshare_lab.vllm.gpu.config import STREAM_PROMPT, Config
from kvshare_lab.vllm.gpu.report import Figures, Progress
from kvshare_lab.vllm.prompts import unrelated_prompt
from kvshare_lab.vllm.session import Session, session
from kvshare_lab.vllm.stack import Stack

_ARMS = ("quiet", "full", "saves", "loads")
_MOST_PLACES = 20
# As `warnings` writes it, perhaps with the name of a process in front.
_WARNING = re.compile(
    r"(?P<file>[^\s:]+\.py):(?P<line>\d+): \w+: "
    r"(?:called a synchronizing CUDA operation|GPU<->CPU sync detected)"
)
_PACKAGES = ("/kvshare/", "/vllm/", "/torch/")


async def inter_token(servers: Stack, config: Config, progress: Progress) -> Figures:
    """The figures of all arms, over as many rounds as there is time for."""
    async with session(servers, config.inter_token) as bench:
        return await _measured(bench, progress.keep)


async def syncs(servers: Stack, config: Config, progress: Progress) -> Figures:
    """While streams decode, with loads and saves. The servers must have been started with the check on."""
    own = replace(config.inter_token, seed=config.part("syncs").seed, repeats=1)
    async with session(servers, own) as bench:
        before = await bench.shared.counters()
        await _measured(bench, lambda _: None)
        counters = (await bench.shared.counters()).since(before)
    log = servers.shared.log_path.read_text(errors="replace")
    return counted_syncs(log, counters.total("vllm:iteration_tokens_total_count"))


class Decoded(NamedTuple):
    """One round: seconds between the tokens of all streams, and how many requests arrived meanwhile."""

    gaps_s: list[float]
    num_arrived: int


async def _measured(bench: Session[Config], keep: Callable[[Figures], None]) -> Figures:
    """
    Percentiles of each arm, and ratios over those of `quiet`; `keep` gets them each round. What arrives:

        quiet   nothing
        full    unrelated prompts, without sharing
        saves   unrelated prompts through the proxy: their KV is saved
        loads   near-duplicates of a stored prompt: KV is loaded, the rest computed and saved
    """
    donor = bench.unrelated()
    await bench.proxy.complete(donor)
    await bench.settle()
    arrivals = {
        "full": lambda: bench.shared.complete(bench.unrelated()),
        "saves": lambda: bench.proxy.complete(bench.unrelated()),
        "loads": lambda: bench.proxy.complete(bench.edited(donor)),
    }

    async def decode(arm: str) -> Decoded:
        prompts = [unrelated_prompt(bench.rng, STREAM_PROMPT) for _ in range(bench.config.streams)]
        decoding = asyncio.gather(
            *(bench.shared.complete(prompt, max_tokens=bench.config.output_tokens) for prompt in prompts)
        )
        number = 0
        while arm in arrivals and not decoding.done():
            await arrivals[arm]()
            number += 1
        answers = await decoding
        await bench.settle()
        return Decoded([gap for answer in answers for gap in answer.gaps_s], number)

    found: dict[str, list[Decoded]] = {arm: [] for arm in _ARMS}
    for counts, order in rounds(_ARMS, bench.config.repeats):
        decoded = {arm: await decode(arm) for arm in order}
        if counts:
            for arm in _ARMS:
                found[arm].append(decoded[arm])
            keep(inter_token_figures(found))
    return inter_token_figures(found)


def inter_token_figures(decoded: dict[str, list[Decoded]]) -> dict[str, Any]:
    """Of all gaps of each arm, and each arm over `quiet`."""
    gaps = {arm: [gap for each in own for gap in each.gaps_s] for arm, own in decoded.items()}
    # Where the client reads late, several tokens come at once: the mean does not depend on that.
    arms = {arm: {"mean_ms": 1e3 * fmean(own), **percentiles(own)} for arm, own in gaps.items()}
    ratios = {
        f"{figure}_ratio": {
            arm: arms[arm][f"{figure}_ms"] / arms["quiet"][f"{figure}_ms"] for arm in _ARMS[1:]
        }
        for figure in ("mean", "p99", "max")
    }
    arrived = {arm: sum(each.num_arrived for each in own) for arm, own in decoded.items()}
    return {**ratios, "arms": arms, "arrivals": arrived}


def counted_syncs(log: str, num_steps: float) -> dict[str, Any]:
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
