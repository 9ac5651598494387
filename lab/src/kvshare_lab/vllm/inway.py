"""
`kvshare bench inway --engine vllm`: whether sharing is in the way, on real servers and default settings.

Both arms are requests to one proxy in front of one vLLM with the connector, in turns: with sharing, and with
`mode: off`. A request of each kind (bounds.py) is sent

    alone   of each length, one after the other
    mix     of random lengths, a share of them near-duplicates, at random times: as many a second as
            80 % of what the arm without sharing completes in a closed loop. Both arms get the same times

Prompts are sent as text, so that the proxy has them tokenized, which it need not with mode off. Their lengths
are those before they were made text, and about a sixth shorter than vLLM finds them.

With `--seconds` the repeats of a length, and the mixes, end when the next one would take too long; what was
left out is listed.

`noise`: the arm without sharing measured against itself. `hop`: what the proxy adds with mode off, over stock
vLLM, and over the vLLM that it stands in front of.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from delta_tree import TokenIds
from kvshare.demo import MODEL_PATH
from kvshare_lab.bench.harness import listed, median
from kvshare_lab.vllm.bounds import KINDS, Cells, prompt_of_kind, verdict
from kvshare_lab.vllm.client import Answer, Client
from kvshare_lab.vllm.prompts import unrelated_prompt
from kvshare_lab.vllm.sequences import Request, play, play_open, poisson_arrivals
from kvshare_lab.vllm.session import Session, run_benchmark
from kvshare_lab.vllm.stack import BenchConfig, StackOptions

_OFF: Mapping[str, Any] = {"kvshare": {"mode": "off"}}
_ARMS: Mapping[str, Mapping[str, Any] | None] = {"off": _OFF, "on": None}
_OF_CAPACITY = 0.8
_CLIENTS = 8
_UNTIL_MIXES, _UNTIL_HOPS = 0.55, 0.85  # shares of `seconds`
_OUTPUT_TOKENS = 8  # of an answer at load
_MOST = 4  # times as many repeats of short prompts
_ROOM = 128  # tokens of context beyond the longest prompt,
_LONGER = 1.25  # which may be so many times as long as text
_REPORT_S, _POLL_S, _REST_S = 60.0, 0.005, 0.02


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    """
    `repeats`: pairs of each kind of the longest prompts; of shorter ones more. `requests`: of each mix.
    `seconds`: after the start of the servers; None: no limit.
    """

    tokens: str = "256,512,1024,2048,4096"
    shares: str = "0,0.1,0.5,0.9"
    repeats: int = 10
    requests: int = 60
    disk_ms: float = 0.0
    seconds: float | None = None

    @property
    def own_model(self) -> str:
        return "long"

    @property
    def lengths(self) -> list[int]:
        """Raises ConfigError."""
        return listed("--tokens", self.tokens, int, range(64, 2**20))

    @property
    def near_shares(self) -> list[float]:
        """Raises ConfigError."""
        return listed("--shares", self.shares, float, None)

    @property
    def options(self) -> StackOptions:
        vllm = replace(self.vllm, max_model_len=int(_LONGER * max(self.lengths)) + _ROOM, kv_cache_gib=2)
        return replace(self.stack_of(vllm, kv_bytes=2**30), disk_s=1e-3 * self.disk_ms)

    def repeats_of(self, length: int) -> int:
        return self.repeats * min(_MOST, max(1, max(self.lengths) // length))


async def measure(bench: Session[Config]) -> dict[str, Any]:
    """Milliseconds of each cell in both arms, and which bounds were missed."""
    lengths = bench.config.lengths
    donors = {length: unrelated_prompt(bench.rng, length) for length in lengths}
    arms = _Arms(bench, donors, AutoTokenizer.from_pretrained(MODEL_PATH))
    budget = Budget(bench.config.seconds)
    await arms.begin()
    for number in range(max(map(bench.config.repeats_of, lengths))):
        for length in lengths:
            name = f"alone, {length} tokens"
            if number < bench.config.repeats_of(length) and budget.allows(name, _UNTIL_MIXES):
                with budget.timed(name):
                    await arms.alone(length, is_on_first=number % 2 == 1)
    for share in bench.config.near_shares:
        if budget.allows("mix", _UNTIL_HOPS, left_out=f"mix {share:.0%}"):
            with budget.timed("mix"):
                await arms.mixed(share)
    hop = []
    for length in lengths:
        if budget.allows("hop", 1.0, left_out=f"hop, {length} tokens"):
            with budget.timed("hop"):
                hop.append(await arms.hop(length))
    noise = [cell.to_json() for cell in arms.noise]
    found = {**verdict(arms.cells), "noise": noise, "hop": hop, "decisions": bench.watch.decisions}
    return {**found, "left_out": dict(budget.left_out)}


class Budget:
    """The seconds of a benchmark: work begins if it will have ended by then, as far as its last time says."""

    def __init__(self, seconds: float | None) -> None:
        self._began, self._seconds = time.perf_counter(), seconds
        self._took: dict[str, float] = {}  # by kind of work, the last time
        self.left_out: Counter[str] = Counter()

    def allows(self, name: str, until: float, *, left_out: str | None = None) -> bool:
        """Return whether work ends within the share `until` of all seconds; note it as left out if not."""
        ends_s = time.perf_counter() - self._began + self._took.get(name, 0.0)
        if self._seconds is None or ends_s <= until * self._seconds:
            return True
        self.left_out[left_out or name] += 1
        return False

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self._took[name] = time.perf_counter() - began


@dataclass(slots=True)
class _Arms:
    bench: Session[Config]
    donors: Mapping[int, TokenIds]
    tokenizer: PreTrainedTokenizerBase
    cells: Cells = field(default_factory=Cells)
    noise: Cells = field(default_factory=Cells)

    async def begin(self) -> None:
        """Have the proxy, and vLLM without it, serve every donor."""
        for donor in self.donors.values():
            for client in (self.bench.plain, self.bench.proxy):
                await client.complete(donor, extra=self._body(donor, None))
        await self.bench.begin()

    async def alone(self, length: int, *, is_on_first: bool) -> None:
        """A pair of each kind, and one of the arm without sharing."""
        for kind in KINDS:
            cell = self.cells.of(load="alone", tokens=length, kind=kind)
            for arm in ("on", "off") if is_on_first else ("off", "on"):
                answer = await self._send(arm, self._prompt(kind, length))
                (cell.on_s if arm == "on" else cell.off_s).append(answer.ttft_s)
            cell.decisions[self.bench.watch.seen[-1].decision] += 1
        noise = self.noise.of(load="alone", tokens=length)
        for seconds in (noise.off_s, noise.on_s):
            seconds.append((await self._send("off", self._prompt("unshared", length))).ttft_s)

    async def mixed(self, share: float) -> None:
        """In two halves, of which each arm begins one."""
        for order in (("off", "on"), ("on", "off")):
            number = self.bench.config.requests // 2
            lengths = self.bench.rng.choice(self.bench.config.lengths, number).tolist()
            is_near = (self.bench.rng.permutation(number) < round(share * number)).tolist()
            full = self._requests("off", lengths, [False] * number)
            closed = await play(self.bench.proxy, full, concurrency=_CLIENTS)
            per_s = _OF_CAPACITY * closed.completed_per_s
            arrivals = poisson_arrivals(self.bench.rng, number, per_s=per_s)
            for arm in order:
                await self.bench.settle()
                requests = self._requests(arm, lengths, is_near)
                answers = (await play_open(self.bench.proxy, requests, arrivals)).answers
                self._note(arm, requests, answers, load=f"mix {share:.0%}")
        await self.bench.settle()
        await self.bench.watch.look()

    async def hop(self, length: int) -> dict[str, Any]:
        """Milliseconds that the proxy adds with mode off, as the differences of medians."""
        bench, seconds = self.bench, dict[str, list[float]](stock=[], same=[], proxied=[])
        ends: dict[str, tuple[Client, Mapping[str, Any] | None]] = {
            "stock": (bench.plain, None),
            "same": (bench.shared, None),
            "proxied": (bench.proxy, _OFF),
        }
        for _ in range(bench.config.repeats):
            for name, (client, extra) in ends.items():
                if name != "proxied":  # it works where the last one did
                    await bench.settle()
                prompt = unrelated_prompt(bench.rng, length)
                answer = await client.complete(prompt, extra=self._body(prompt, extra))
                seconds[name].append(answer.ttft_s)
        found = {name: 1e3 * median(own) for name, own in seconds.items()}
        return {
            "tokens": length,
            **{f"{name}_ms": round(value, 3) for name, value in found.items()},
            "over_stock_ms": round(found["proxied"] - found["stock"], 3),
            "over_same_vllm_ms": round(found["proxied"] - found["same"], 3),
        }

    def _prompt(self, kind: str, length: int) -> TokenIds:
        return prompt_of_kind(self.bench.rng, kind, self.donors[length])

    def _body(self, prompt: TokenIds, extra: Mapping[str, Any] | None) -> dict[str, Any]:
        return {**(extra or {}), "prompt": self.tokenizer.decode(prompt.tolist())}

    def _requests(self, arm: str, lengths: Sequence[int], is_near: Sequence[bool]) -> list[Request]:
        """Prompts are new to both arms, as they share vLLM's prefix cache."""
        prompts = [
            self._prompt("shared" if near else "unshared", length)
            for length, near in zip(lengths, is_near, strict=True)
        ]
        return [
            Request(prompt, _OUTPUT_TOKENS, is_near=near, extra=self._body(prompt, _ARMS[arm]))
            for prompt, near in zip(prompts, is_near, strict=True)
        ]

    def _note(self, arm: str, requests: Sequence[Request], answers: Sequence[Answer], *, load: str) -> None:
        for request, answer in zip(requests, answers, strict=True):
            kind = "shared" if request.is_near else "unshared"
            for token, seconds in (("first", answer.ttft_s), ("whole", answer.token_times_s[-1])):
                cell = self.cells.of(load=load, kind=kind, token=token)
                (cell.on_s if arm == "on" else cell.off_s).append(seconds)

    async def _send(self, arm: str, prompt: TokenIds) -> Answer:
        """One request. With sharing on, the next one waits until this one is stored."""
        bench, num_seen = self.bench, len(self.bench.watch.seen)
        answer = await bench.proxy.complete(prompt, extra=self._body(prompt, _ARMS[arm]))
        if arm == "on":
            async with asyncio.timeout(_REPORT_S):
                while len(bench.watch.seen) == num_seen:
                    await asyncio.sleep(_POLL_S)
                    await bench.watch.look()
        await asyncio.sleep(_REST_S)
        return answer


run = partial(run_benchmark, "inway", measure)
