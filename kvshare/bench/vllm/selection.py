"""
`kvshare bench selection --engine vllm`: what choosing repairs costs beside computing as many tokens.

Tickets for the same prompts in turns, no proxy, to a random-weight Llama of about 100 M parameters:
    chosen       a probe pass, the choice, the repairs behind it
    unselected   as many tokens without a choice, at the starts of pieces; the time of laying is taken off
A time is that to the first token, as the client has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from delta_tree import Copy, Span, TokenIds, gaps
from kvshare.bench.fidelity.shelf import Shelf
from kvshare.bench.harness import median, rounds
from kvshare.bench.random_models import DEMO_VOCAB_SIZE
from kvshare.bench.selection import (
    ALWAYS_CHOOSE,
    ARMS,
    as_many,
    ordered,
    reordered,
    summary,
    token_counts,
)
from kvshare.bench.vllm.client import connected
from kvshare.bench.vllm.stack import EditedConfig, Pair, StackOptions, document, pair
from kvshare.bench.vllm.tickets import TicketWriter, copies_of
from kvshare.errors import ConfigError, EngineError
from kvshare.fleet.router import wire_order
from kvshare.settings import load_settings
from kvshare.sharing.plan import MOST_BEHIND, NoPlan, Plan, within
from kvshare.vllm_protocol.messages import Finished, WireCopy, WireOrder

_ROOM = 64  # tokens of context beyond the prompt


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    prompt_tokens: int = 4000
    repeats: int = 7


@dataclass(frozen=True, slots=True)
class _Times:
    """Of one request, seconds."""

    ttft_s: float
    stage_s: Mapping[str, float]

    @property
    def without_laying_s(self) -> float:
        return self.ttft_s - self.stage_s["lay"]


def run(config: Config) -> dict[str, Any]:
    """Medians of paired times over `repeats` prompts of each kind."""
    vllm = replace(config.vllm, max_model_len=config.prompt_tokens + _ROOM, kv_cache_gib=2)
    with pair(StackOptions(vllm=vllm, seed=config.seed)) as servers:
        return asyncio.run(measure(servers, config))


async def measure(servers: Pair, config: Config) -> dict[str, Any]:
    """The same over servers that run already."""
    rng = np.random.default_rng(config.seed)
    kinds: dict[str, Callable[[TokenIds], TokenIds]] = {
        "edited": lambda donor: config.edited(rng, donor),
        "reordered": lambda donor: reordered(donor, rng, DEMO_VOCAB_SIZE),
    }
    async with connected(servers.shared.url) as shared, servers.control() as control:
        tickets = TicketWriter(shared, control, "selection")
        if not (await tickets.check()).can_choose:
            raise EngineError("the connector cannot follow attention: place would decide")
        bench = _Selection(tickets, rng, config)
        measured = {name: await bench.measured(change) for name, change in kinds.items()}
    return {**document("selection", servers.options, config), **measured}


@dataclass(slots=True)
class _Selection:
    """Prompts that were kept, and requests over them."""

    tickets: TicketWriter
    rng: np.random.Generator
    config: Config

    async def measured(self, change: Callable[[TokenIds], TokenIds]) -> dict[str, Any]:
        """One kind of prompts, `repeats` pairs after one that warms up."""
        times: dict[str, list[_Times]] = {name: [] for name in ARMS}
        for counts, order in rounds(ARMS, self.config.repeats):
            donor = self.config.stranger(self.rng)
            kept, tokens = await self.tickets.keep(donor), change(donor)
            plan = _planned(donor, tokens)
            arms = {
                "chosen": (_copies(plan.copies, kept), wire_order(plan)),
                "unselected": (_copies(_outside(plan), kept), None),
            }
            for name in order:
                measured = await self._times(tokens, plan, *arms[name])
                if counts:
                    times[name].append(measured)
        return {
            **summary(
                [each.ttft_s for each in times["chosen"]],
                [each.without_laying_s for each in times["unselected"]],
            ),
            "tokens": token_counts(plan),
            "stage_ms": {name: _stages(found) for name, found in times.items()},
        }

    async def _times(
        self, tokens: TokenIds, plan: Plan, copies: Sequence[WireCopy], order: WireOrder | None
    ) -> _Times:
        """Of one request. Raises EngineError unless as much was computed as planned."""
        ticket = self.tickets.ticket(tokens, copies, exact_length=plan.exact_length, order=order)
        answer = await self.tickets.ask(tokens, ticket, max_tokens=1)
        finished = await self.tickets.finished(ticket)
        if finished.decision != "approx" or finished.reason is not None:
            raise EngineError(f"planned approx, computed {finished.decision}: {finished.reason}")
        planned = plan.num_computed if order is not None else sum(map(len, as_many(plan)))
        if finished.num_computed != planned:
            raise EngineError(f"planned {planned} tokens, computed {finished.num_computed}")
        return _Times(answer.ttft_s, finished.stage_seconds)


def _planned(donor: TokenIds, tokens: TokenIds) -> Plan:
    settings = load_settings(overrides=ALWAYS_CHOOSE)
    shelf = Shelf(settings.sharing)
    shelf.store(donor, None, NoPlan())
    plan = ordered(shelf.plan(tokens, settings, can_probe=True))
    if plan.num_tokens - plan.copies[-1].target.end > MOST_BEHIND:
        raise ConfigError(
            "--prompt-tokens", f"{MOST_BEHIND} tokens may follow the last copy, else place decides"
        )
    return plan


def _outside(plan: Plan) -> list[Copy]:
    """The parts of a plan's copies that are not computed where nothing is chosen."""
    return [part for free in gaps(as_many(plan), plan.num_tokens) for part in within(plan.copies, free)]


def _copies(copies: Iterable[Copy], kept: Finished) -> list[WireCopy]:
    """Out of the segments of a kept prompt, where each token was computed at its own place."""
    return [
        wire
        for copy in copies
        for wire in copies_of(
            kept, Span(copy.source_position, copy.source_position + copy.length), copy.target_start
        )
    ]


def _stages(times: Sequence[_Times]) -> dict[str, float]:
    """Medians, milliseconds."""
    return {name: 1e3 * median([each.stage_s[name] for each in times]) for name in ("lay", "pass")}
