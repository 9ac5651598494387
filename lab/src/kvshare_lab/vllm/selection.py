"""
`kvshare bench selection --engine vllm`: what choosing repairs costs beside computing as many tokens.

Tickets for the same prompts in turns, without a proxy, to a random-weight Llama of about 100 M parameters:
    chosen       a probe pass, the choice, then the repairs
    unselected   as many tokens without a choice, at the starts of pieces; the time to write copies is
                 subtracted
Times are those to the first token, at the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from delta_tree import Copy, Span, TokenIds, gaps
from kvshare.errors import ConfigError, EngineError
from kvshare.fleet.tickets import wire_order
from kvshare.sharing.plan import MAX_TAIL_TOKENS, NoPlan, within
from kvshare.vllm_protocol.messages import FinishedReport, WireOrder
from kvshare_lab.bench.figures import by_name
from kvshare_lab.bench.harness import median, rounds
from kvshare_lab.bench.random_models import DEMO_VOCAB_SIZE
from kvshare_lab.bench.selection import ARMS, SETTINGS, Recipient, reordered, summary
from kvshare_lab.fidelity.stored_prompts import StoredPrompts
from kvshare_lab.vllm.client import Answer
from kvshare_lab.vllm.session import Session, run_benchmark
from kvshare_lab.vllm.stack import EditedConfig, pair
from kvshare_lab.vllm.tickets import TicketWriter, copies_of


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    prompt_tokens: int = 4000
    repeats: int = 7


async def measure(bench: Session[Config]) -> dict[str, Any]:
    """Medians of paired times over `repeats` prompts of each kind."""
    kinds: Mapping[str, Callable[[TokenIds], TokenIds]] = {
        "edited": bench.edited,
        "reordered": lambda donor: reordered(donor, bench.rng, DEMO_VOCAB_SIZE),
    }
    tickets = TicketWriter(bench.shared, bench.watch, "selection")
    if not (await tickets.check()).can_choose:
        raise EngineError("the connector does not see attention, so it cannot choose repairs")
    return {name: await _measured(bench, tickets, change) for name, change in kinds.items()}


async def _measured(
    bench: Session[Config], tickets: TicketWriter, change: Callable[[TokenIds], TokenIds]
) -> dict[str, Any]:
    """One kind of prompts, `repeats` pairs after one that warms up."""
    found: dict[str, list[tuple[Answer, FinishedReport]]] = {name: [] for name in ARMS}
    for counts, order in rounds(ARMS, bench.config.repeats):
        donor = bench.unrelated()
        stored, recipient = await tickets.store(donor), _planned(donor, change(donor))
        for name in order:
            served = await _served(tickets, stored, recipient, is_chosen=name == "chosen")
            if counts:
                found[name].append(served)
    chosen_s = [answer.ttft_s for answer, _ in found["chosen"]]
    unselected_s = [answer.ttft_s - report.stage_seconds["lay"] for answer, report in found["unselected"]]
    stages = {name: by_name([report.stage_seconds for _, report in own]) for name, own in found.items()}
    return {
        **summary(chosen_s, unselected_s),
        "tokens": recipient.token_counts,
        "stage_ms": {
            name: {stage: 1e3 * median(own[stage]) for stage in ("lay", "pass")}
            for name, own in stages.items()
        },
    }


async def _served(
    tickets: TicketWriter, stored: FinishedReport, recipient: Recipient, *, is_chosen: bool
) -> tuple[Answer, FinishedReport]:
    """One request. Raises EngineError unless as many tokens were computed as planned."""
    plan, spans = recipient.plan, recipient.unselected
    copies: Sequence[Copy] = plan.copies
    order: WireOrder | None = wire_order(plan)
    planned = plan.num_computed
    if not is_chosen:
        copies = [part for free in gaps(spans, plan.num_tokens) for part in within(plan.copies, free)]
        order, planned = None, sum(map(len, spans))
    wired = [
        wire
        for copy in copies
        for wire in copies_of(
            stored, Span(copy.source_position, copy.source_position + copy.length), copy.target_start
        )
    ]
    exact_length = plan.exact_length
    answer, finished = await tickets.ask(recipient.tokens, wired, exact_length=exact_length, order=order)
    found = (finished.decision, finished.reason, finished.num_computed)
    if found != ("approx", None, planned):
        raise EngineError(
            f"expected approx with {planned} tokens computed; decision, reason, tokens: {found}"
        )
    return answer, finished


def _planned(donor: TokenIds, tokens: TokenIds) -> Recipient:
    prompts = StoredPrompts(SETTINGS.sharing)
    prompts.store(donor, None, NoPlan())
    recipient = Recipient.of(prompts, tokens)
    num_tail = len(tokens) - recipient.plan.copies[-1].target.end
    if num_tail > MAX_TAIL_TOKENS:
        problem = f"{num_tail} tokens follow the last copy; repairs are chosen with at most {MAX_TAIL_TOKENS}"
        raise ConfigError("--prompt-tokens", problem)
    return recipient


run = partial(run_benchmark, "selection", measure, start=pair)
