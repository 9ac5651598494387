"""
Parts of a benchmark's report that only `kvshare bench gpu` has.

    break_even   time to the first token of edited prompts of growing length, shared, and in full by stock
                 vLLM, with the connector's stages; and what the proxy concludes from the rates that it
                 measures meanwhile
    inter_token  time between the tokens of streams that decode while other requests arrive, one by one
    syncs        how often the host waits for the device, as vLLM's own check reports it
                 (`VLLM_GPU_SYNC_CHECK=warn`), while streams decode. Each wait stops all requests of its step
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from kvshare.sharing.cost import Rates
from kvshare_lab.bench.figures import by_name, percentiles
from kvshare_lab.bench.harness import alternate, median
from kvshare_lab.vllm.client import Answer
from kvshare_lab.vllm.prompts import unrelated_prompt
from kvshare_lab.vllm.session import Session
from kvshare_lab.vllm.stack import EditedConfig

STREAM_PROMPT = 32  # tokens: short, as their prefill is not measured
_SHORTEST = 128  # tokens
_ARMS = ("quiet", "full", "saves", "loads")
_MOST_PLACES = 20
# As `warnings` writes it, perhaps with the name of a process in front.
_WARNING = re.compile(
    r"(?P<file>[^\s:]+\.py):(?P<line>\d+): \w+: "
    r"(?:called a synchronizing CUDA operation|GPU<->CPU sync detected)"
)
_PACKAGES = ("/kvshare/", "/vllm/", "/torch/")


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    streams: int = 8
    output_tokens: int = 128
    repeats: int = 3


async def break_even(bench: Session[Config]) -> dict[str, Any]:
    """The number of tokens from which sharing pays. The proxy must share whether it pays or not."""
    rows = [await _row(bench, length) for length in lengths(bench.config.prompt_tokens)]
    costs = await bench.stats("costs")
    return {"measured_tokens": first_that_pays(rows), "lengths": rows, **learned(costs, bench.config.changed)}


def lengths(longest: int) -> list[int]:
    """Doubling up to the longest, which is the last."""
    shorter = [_SHORTEST << power for power in range(16) if _SHORTEST << power < longest]
    return [*shorter, longest]


async def _row(bench: Session[Config], length: int) -> dict[str, Any]:
    donor = unrelated_prompt(bench.rng, length)
    await bench.proxy.complete(donor)

    async def ask(arm: str) -> Answer:
        await bench.settle()
        if arm == "full":
            return await bench.plain.complete(unrelated_prompt(bench.rng, length))
        return await bench.proxy.complete(bench.edited(donor))

    answers = await alternate(("full", "shared"), bench.config.repeats, ask)
    await bench.settle()
    reports = (await bench.watch.look())[-bench.config.repeats :]
    stage_s = by_name([report.stage_seconds for report in reports])
    ttft_s = {arm: median([answer.ttft_s for answer in own]) for arm, own in answers.items()}
    return {
        "tokens": length,
        "full_ttft_s": ttft_s["full"],
        "shared_ttft_s": ttft_s["shared"],
        "speedup": ttft_s["full"] / ttft_s["shared"],
        "reused": median([answer.num_cached / length for answer in answers["shared"]]),
        "stage_ms": {stage: 1e3 * median(values) for stage, values in stage_s.items()},
    }


def first_that_pays(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The shortest length from which on all were faster when shared; None if the longest was not."""
    paying = list(takewhile(lambda row: row["speedup"] > 1, reversed(rows)))
    return int(paying[-1]["tokens"]) if paying else None


def learned(costs: Mapping[str, Any], changed: float) -> dict[str, Any]:
    """The length from which plans save time, by the proxy's rates; None unless all rates were measured."""
    rates = Rates(**{field.name: costs[field.name] for field in fields(Rates)})
    is_known = len(costs["measured"]) == 2
    tokens = rates.break_even(computed=changed, min_saved_s=0.0) if is_known else None
    return {"learned_tokens": tokens, "costs": dict(costs)}


class Decoded(NamedTuple):
    """One round: seconds between the tokens of all streams, and how many requests arrived meanwhile."""

    gaps_s: list[float]
    num_arrived: int


async def inter_token(bench: Session[Config]) -> dict[str, Any]:
    """
    Percentiles of each arm, and ratios over those of `quiet`. What arrives:

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

    return inter_token_figures(await alternate(_ARMS, bench.config.repeats, decode))


def inter_token_figures(rounds: dict[str, list[Decoded]]) -> dict[str, Any]:
    """Of all gaps of each arm, and each arm over `quiet`."""
    gaps = {arm: [gap for decoded in own for gap in decoded.gaps_s] for arm, own in rounds.items()}
    # Where the client reads late, several tokens come at once: the mean does not depend on that.
    arms = {arm: {"mean_ms": 1e3 * fmean(own), **percentiles(own)} for arm, own in gaps.items()}
    ratios = {
        f"{figure}_ratio": {
            arm: arms[arm][f"{figure}_ms"] / arms["quiet"][f"{figure}_ms"] for arm in _ARMS[1:]
        }
        for figure in ("mean", "p99", "max")
    }
    arrived = {arm: sum(decoded.num_arrived for decoded in own) for arm, own in rounds.items()}
    return {**ratios, "arms": arms, "arrivals": arrived}


async def syncs(bench: Session[Config]) -> dict[str, Any]:
    """While streams decode, with loads and saves. The servers must have been started with the check on."""
    before = await bench.shared.counters()
    await inter_token(bench)
    counters = (await bench.shared.counters()).since(before)
    log = bench.servers.shared.log_path.read_text(errors="replace")
    return counted_syncs(log, counters.total("vllm:iteration_tokens_total_count"))


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
