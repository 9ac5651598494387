"""
Throughput and latency of many clients, of which all, some or none send near-duplicates of popular prompts.

In a closed loop each client sends its next request when its last one is answered. In an open loop requests
arrive at random, so many a second. Both arms, stock vLLM and KVShare behind the proxy, get the same requests.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from delta_tree import TokenIds
from kvshare_lab.vllm import load as clients
from kvshare_lab.vllm.client import Client
from kvshare_lab.vllm.gpu.config import Config
from kvshare_lab.vllm.gpu.report import Figures, Progress
from kvshare_lab.vllm.sequences import (
    Load,
    Request,
    open_figures,
    play,
    play_open,
    poisson_arrivals,
    share_figures,
)
from kvshare_lab.vllm.session import Session, session
from kvshare_lab.vllm.stack import Stack

_RATES = (0.5, 0.9)  # of the requests a second that stock vLLM completes in a closed loop
_OPEN_REQUESTS = 0.5  # of the requests of a closed loop


async def load(servers: Stack, config: Config, progress: Progress) -> Figures:
    """The closed loop at each share of near-duplicates, then the open loop at each rate."""
    async with session(servers, config.load) as bench:
        arms = _Arms(bench, [bench.unrelated() for _ in range(bench.config.families)])
        await arms.serve_donors()
        closed: list[Figures] = []
        opened: list[Figures] = []

        async def keep(rows: list[Figures], what: str, row: Callable[[], Awaitable[Figures]]) -> None:
            """Add a row if there is time for as long as the last one took."""
            if progress.has_time(what, arms.took_s):
                began = time.monotonic()
                rows.append(await row())
                arms.took_s = time.monotonic() - began
                progress.keep(found())

        def found() -> Figures:
            return {"closed_loop": closed, "open_loop": opened, "decisions": bench.watch.decisions}

        for share in config.near_shares:
            await keep(closed, f"share_{share:g}", partial(arms.closed_loop, share))
        share = config.near_shares[len(config.near_shares) // 2]
        for rate in bench.config.rates or default_rates(closed):
            await keep(opened, f"rate_{rate:g}", partial(arms.open_loop, rate, share))
        return found()


def default_rates(closed: Sequence[Figures]) -> list[float]:
    """Requests a second: half and most of what stock vLLM completes where the fewest were shared."""
    if not closed:
        return []
    completed = closed[-1]["plain"]["completed_per_s"][0]
    return [round(share * completed, 2) for share in _RATES]


@dataclass(slots=True)
class _Arms:
    """Both arms and the popular prompts. The connector's events are read between sequences."""

    bench: Session[clients.Config]
    donors: Sequence[TokenIds]
    took_s: float = 0.0  # the last row

    @property
    def _clients(self) -> dict[str, Client]:
        return {"plain": self.bench.plain, "shared": self.bench.proxy}

    async def serve_donors(self) -> None:
        """To both arms."""
        donated = [Request(donor, 1, is_near=False) for donor in self.donors]
        for client in self._clients.values():
            await play(client, donated, concurrency=self.bench.config.concurrency)
        await self.bench.begin()

    async def closed_loop(self, near: float) -> Figures:
        requests, concurrency = (
            self._sequence(near, self.bench.config.requests),
            self.bench.config.concurrency,
        )
        both = await self._both(lambda client: play(client, requests, concurrency=concurrency))
        return {"near": near, **share_figures(both)}

    async def open_loop(self, rate: float, near: float) -> Figures:
        requests = self._sequence(near, max(2, round(_OPEN_REQUESTS * self.bench.config.requests)))
        arrivals = poisson_arrivals(self.bench.rng, len(requests), per_s=rate)
        both = await self._both(lambda client: play_open(client, requests, arrivals))
        return {"near": near, **open_figures(rate, {name: [own] for name, own in both.items()})}

    def _sequence(self, near: float, num_requests: int) -> list[Request]:
        config = self.bench.config
        return clients.new_sequence(self.bench.rng, config, self.donors, num_requests=num_requests, near=near)

    async def _both(self, serve: Callable[[Client], Awaitable[Load]]) -> dict[str, Load]:
        """One arm after the other. Each ends when all is stored, so that the next one does not pay for it."""
        found = {}
        for name, client in self._clients.items():
            found[name] = await serve(client)
            await self.bench.settle()
            await self.bench.watch.look()
        return found
