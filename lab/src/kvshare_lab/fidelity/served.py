"""
Serves prompts by the embedded engine's parts, one after another, and compares answers with a full prefill.

A prompt goes through the engine's index, tree, planner and prefill, and is stored as the engine stores it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from kvshare.embedded.engine import EmbeddedEngine
from kvshare.kv.sequence import SequenceKV
from kvshare.requests import Prompt, SharingMode, SharingReport
from kvshare.sharing.memory_keeper import Computed
from kvshare.sharing.plan import NoPlan, Plan
from kvshare_lab.bench.direct import greedy, prefilled
from kvshare_lab.fidelity.measures import divergence
from kvshare_lab.fidelity.trial import NUM_FORCED


class FullAnswer(NamedTuple):
    """The greedy answer of a full prefill, and the logits (V,) that each of its tokens was chosen from."""

    tokens: Sequence[int]
    logits: Sequence[torch.Tensor]


class Served(NamedTuple):
    """One request. `measured`: KL and other figures if it was compared with a full answer, else empty."""

    report: SharingReport
    measured: Mapping[str, float]


async def serve(
    engine: EmbeddedEngine,
    prompt: Prompt,
    *,
    tenant: str = "bench",
    full: Callable[[], FullAnswer] | None = None,
) -> Served:
    """Plan, compute and store a prompt. `full`: computes what an approximate answer is compared with."""
    sharing, keeper, network = engine.sharing, engine.server.runtime.keeper, engine.server.shared_model
    namespace = engine.namespace(tenant=tenant, scope="tenant").digest
    lookup = await sharing.find_plan(namespace, prompt, SharingMode.APPROX)
    keeper.hold(lookup.plan)
    kv = network.new_sequence(prompt.num_tokens + NUM_FORCED)
    if isinstance(lookup.plan, Plan):
        with torch.inference_mode():
            kv.write_copies(lookup.plan.copies, lookup.segments)
    plan, logits = prefilled(network, prompt.token_ids, lookup.plan, kv)
    sharing.note_use(lookup)
    node = keeper.store(Computed(namespace, prompt.token_ids, plan, kv))
    if node is not None:
        await sharing.indexing.remember(node, prompt.text)
    keeper.release(lookup.plan)
    report = lookup.report(prompt.num_tokens)
    if full is None or report.decision != "approx":
        return Served(report, {})
    return Served(report, _compared(engine, prompt.num_tokens, kv, logits, full()))


def full_answer(engine: EmbeddedEngine, prompt: Prompt) -> FullAnswer:
    """The answer without any sharing, as long as a comparison needs it."""
    network, size, ends = engine.server.shared_model, prompt.num_tokens, engine.server.eos_token_ids
    kv = network.new_sequence(size + NUM_FORCED)
    _, first = prefilled(network, prompt.token_ids, NoPlan(), kv)
    return FullAnswer(*greedy(network, kv, size, first, limit=NUM_FORCED, ends=ends))


def _compared(
    engine: EmbeddedEngine, size: int, kv: SequenceKV, logits: torch.Tensor, full: FullAnswer
) -> Mapping[str, float]:
    """The shared arm's KV and first logits, compared with a full prefill, along that one's answer."""
    network = engine.server.shared_model
    places = enumerate(full.tokens[: NUM_FORCED - 1], size)
    found = [logits, *(network.next_logits(kv, place, token) for place, token in places)]
    both = min(len(full.logits), len(found))
    return divergence(
        torch.log_softmax(torch.stack(list(full.logits[:both])).float(), dim=-1),
        torch.log_softmax(torch.stack(found[:both]).float(), dim=-1),
    ).as_document()
