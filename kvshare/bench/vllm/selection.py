"""
`kvshare bench selection --engine vllm`: what choosing repairs costs beside computing as many tokens.

Tickets for the same prompts in turns, without a proxy, to a random-weight Llama of about 100 M parameters:
    chosen       a probe pass, the choice, then the repairs
    unselected   as many tokens without a choice, at the starts of pieces; the time to write copies is
                 subtracted
Times are those to the first token, at the client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from delta_tree import Copy, Span, TokenIds, gaps
from kvshare.bench.fidelity.stored_prompts import StoredPrompts
from kvshare.bench.figures import by_name
from kvshare.bench.harness import median, rounds
from kvshare.bench.random_models import DEMO_VOCAB_SIZE
from kvshare.bench.selection import ARMS, SETTINGS, Recipient, reordered, summary
from kvshare.bench.vllm.client import connected
from kvshare.bench.vllm.session import run_benchmark
from kvshare.bench.vllm.stack import EditedConfig, Pair, pair
from kvshare.bench.vllm.tickets import TicketWriter, copies_of
from kvshare.errors import ConfigError, EngineError
from kvshare.fleet.router import wire_order
from kvshare.sharing.plan import MOST_BEHIND, NoPlan, within
from kvshare.vllm_protocol.messages import Finished, WireCopy, WireOrder


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    prompt_tokens: int = 4000
    repeats: int = 7


class _Times(NamedTuple):
    """Of one request, seconds."""

    ttft_s: float
    stage_s: Mapping[str, float]


def run(config: Config) -> dict[str, Any]:
    """Medians of paired times over `repeats` prompts of each kind."""
    return run_benchmark("selection", config, measure, pair)


async def measure(servers: Pair, config: Config) -> dict[str, Any]:
    """The same over servers that run already, without the head of the document."""
    rng = np.random.default_rng(config.seed)
    kinds: Mapping[str, Callable[[TokenIds], TokenIds]] = {
        "edited": lambda donor: config.edited(rng, donor),
        "reordered": lambda donor: reordered(donor, rng, DEMO_VOCAB_SIZE),
    }
    async with connected(servers.shared.url) as shared, servers.control() as control:
        tickets = TicketWriter(shared, control, "selection")
        if not (await tickets.check()).can_choose:
            raise EngineError("the connector does not see attention, so it cannot choose repairs")
        return {
            name: await _measured(tickets, lambda: config.unrelated(rng), change, config.repeats)
            for name, change in kinds.items()
        }


async def _measured(
    tickets: TicketWriter,
    draw: Callable[[], TokenIds],
    change: Callable[[TokenIds], TokenIds],
    repeats: int,
) -> dict[str, Any]:
    """One kind of prompts, `repeats` pairs after one that warms up."""
    times: dict[str, list[_Times]] = {name: [] for name in ARMS}
    for counts, order in rounds(ARMS, repeats):
        donor = draw()
        stored, recipient = await tickets.store(donor), _planned(donor, change(donor))
        for name in order:
            measured = await _times(tickets, stored, recipient, is_chosen=name == "chosen")
            if counts:
                times[name].append(measured)
    without_writing = [each.ttft_s - each.stage_s["lay"] for each in times["unselected"]]
    return {
        **summary([each.ttft_s for each in times["chosen"]], without_writing),
        "tokens": recipient.token_counts,
        "stage_ms": {name: _stages(found) for name, found in times.items()},
    }


async def _times(tickets: TicketWriter, stored: Finished, recipient: Recipient, *, is_chosen: bool) -> _Times:
    """Of one request. Raises EngineError unless as many tokens were computed as planned."""
    plan, spans = recipient.plan, recipient.unselected
    copies: Sequence[Copy] = plan.copies
    order: WireOrder | None = wire_order(plan)
    planned = plan.num_computed
    if not is_chosen:
        copies = [part for free in gaps(spans, plan.num_tokens) for part in within(plan.copies, free)]
        order, planned = None, sum(map(len, spans))
    ticket = tickets.ticket(
        recipient.tokens, _wired(copies, stored), exact_length=plan.exact_length, order=order
    )
    answer = await tickets.ask(recipient.tokens, ticket, max_tokens=1)
    finished = await tickets.finished(ticket)
    found = (finished.decision, finished.reason, finished.num_computed)
    if found != ("approx", None, planned):
        raise EngineError(
            f"expected approx with {planned} tokens computed; decision, reason, tokens: {found}"
        )
    return _Times(answer.ttft_s, finished.stage_seconds)


def _planned(donor: TokenIds, tokens: TokenIds) -> Recipient:
    prompts = StoredPrompts(SETTINGS.sharing)
    prompts.store(donor, None, NoPlan())
    recipient = Recipient.of(prompts, tokens)
    num_behind = len(tokens) - recipient.plan.copies[-1].target.end
    if num_behind > MOST_BEHIND:
        problem = f"{num_behind} tokens follow the last copy; repairs are chosen with at most {MOST_BEHIND}"
        raise ConfigError("--prompt-tokens", problem)
    return recipient


def _wired(copies: Iterable[Copy], stored: Finished) -> list[WireCopy]:
    """From the segments of a stored prompt, each of whose tokens was computed in place."""
    return [
        wire
        for copy in copies
        for wire in copies_of(
            stored, Span(copy.source_position, copy.source_position + copy.length), copy.target_start
        )
    ]


def _stages(times: Sequence[_Times]) -> dict[str, float]:
    """Medians, milliseconds."""
    stages = by_name([each.stage_s for each in times])
    return {name: 1e3 * median(stages[name]) for name in ("lay", "pass")}
