"""A plan as a document: what `kvshare explain` and the admin route show. No token ids, no text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delta_tree import (
    DeltaTree,
    DeltaTreeError,
    Node,
    NodeId,
    Segment,
    SegmentId,
    TokenIds,
    common_prefix_length,
    compose,
)
from kvshare.cost import CostModel, Rates
from kvshare.errors import StoreError
from kvshare.metadata import METADATA_FILE
from kvshare.plan import NoPlan, Plan
from kvshare.planner import PlannerLimits, make_plan
from kvshare.served_model import find_model
from kvshare.settings import Settings
from kvshare.sharing import Lookup
from vector_index import Candidate, fingerprints


@dataclass(frozen=True, slots=True)
class Planning:
    """Under what a plan was made."""

    segment_of: Callable[[SegmentId], Segment]
    limits: PlannerLimits
    rates: Rates
    approximate: bool


def explanation(
    lookup: Lookup, token_ids: TokenIds, nodes: Sequence[Node], planning: Planning
) -> dict[str, Any]:
    """JSON-ready: the decision, every span of the prompt, and what became of every candidate."""
    plan = lookup.plan
    num_tokens = len(token_ids)
    report = lookup.report(num_tokens)
    estimate = (
        plan.estimate
        if isinstance(plan, Plan)
        else planning.rates.estimate(num_tokens=num_tokens, num_computed=num_tokens)
    )
    lookup_s = 0.0 if report.reason in ("off", "short_prompt") else estimate.lookup_s
    shared_s = lookup_s + (estimate.shared_s if isinstance(plan, Plan) else estimate.full_s)
    return {
        "decision": report.decision,
        "reason": report.reason,
        "num_tokens": num_tokens,
        "exact": report.num_exact,
        "copied": report.num_copied,
        "recomputed": report.num_recomputed,
        "repaired": report.num_repaired,
        "charged_budget": plan.charged_budget if isinstance(plan, Plan) else 1.0,
        "spans": _spans(plan, num_tokens),
        "donors": _donors(plan, lookup.candidates, _outcomes(token_ids, nodes, planning)),
        "estimate": {
            "full_s": estimate.full_s,
            "shared_s": shared_s,
            "saved_s": estimate.full_s - shared_s,
        },
        "stage_ms": {stage: 1e3 * seconds for stage, seconds in lookup.stage_seconds.items()},
    }


def explain_offline(
    store_path: Path, settings: Settings, messages_or_prompt: Sequence[Mapping[str, Any]] | str
) -> dict[str, Any]:
    """
    The plan a prompt would have got from the metadata of a stopped store, were its KV still there.

    Candidates are found by comparing fingerprints with every stored prompt of the largest namespace.
    Raises:  StoreError if the store cannot be read; ModelError, RequestError if the prompt cannot be encoded
    """
    from kvshare.engines.embedded.tokenizer import PromptEncoder  # imports transformers

    encoder = PromptEncoder.load(find_model(settings.model.path).path)
    if isinstance(messages_or_prompt, str):
        prompt = encoder.encode_text(messages_or_prompt)
    else:
        prompt = encoder.encode_chat(messages_or_prompt)
    try:
        tree = DeltaTree.open(store_path / METADATA_FILE, identity=None, read_only=True)
    except DeltaTreeError as exc:
        raise StoreError(str(exc)) from exc
    with tree:
        candidates = _by_fingerprints(tree, prompt.token_ids, settings)
        nodes = [tree.node(NodeId(candidate.prompt_id)) for candidate in candidates]
        limits = PlannerLimits.from_settings(settings)
        rates = CostModel.from_settings(settings.cost, bytes_per_token=0).rates
        planning = Planning(tree.segment, limits, rates, approximate=settings.sharing.mode == "approx")
        plan = make_plan(
            prompt.token_ids,
            nodes,
            tree.segment,
            approximate=planning.approximate,
            limits=limits,
            rates=rates,
        )
        return explanation(Lookup(plan, candidates=candidates), prompt.token_ids, nodes, planning)


def _by_fingerprints(tree: DeltaTree, token_ids: TokenIds, settings: Settings) -> tuple[Candidate, ...]:
    """The stored prompts that share most fingerprints, or the whole beginning, with this one."""
    sizes = Counter(node.namespace for node in tree.nodes())
    if not sizes:
        return ()
    namespace, _ = sizes.most_common(1)[0]
    index = settings.index

    def prints(ids: TokenIds) -> set[int]:
        return set(fingerprints(ids, kgram=index.kgram, window=index.window).tolist())

    wanted = prints(token_ids)
    scored = [
        (len(wanted & prints(node.token_ids)), common_prefix_length(node.token_ids, token_ids), node.node_id)
        for node in tree.nodes(namespace)
    ]
    best = sorted((entry for entry in scored if entry[0] or entry[1] >= index.block_size), reverse=True)
    return tuple(
        Candidate(int(node_id), ("fingerprint",), score / max(1, len(wanted)))
        for score, _, node_id in best[: index.max_candidates]
    )


def _outcomes(token_ids: TokenIds, nodes: Sequence[Node], planning: Planning) -> dict[int, str]:
    """What the composition says of every candidate, before any gate."""
    sharing = planning.limits.sharing
    composition = compose(
        token_ids,
        nodes,
        planning.segment_of,
        min_run=sharing.min_run,
        max_donors=sharing.max_donors,
        max_generation=sharing.max_generation,
        allow_approximate=planning.approximate,
    )
    return {int(report.node_id): report.reason for report in composition.reports}


def _spans(plan: Plan | NoPlan, num_tokens: int) -> list[dict[str, Any]]:
    """The prompt from left to right: exact, copied, placeholder, repair."""
    if isinstance(plan, NoPlan):
        return [_span(0, num_tokens, "placeholder")]
    spans = [
        _span(
            copy.target.start,
            copy.target.end,
            "exact" if copy.target.end <= plan.exact_length else "copied",
            donor=int(copy.donor),
            shift=copy.shift,
        )
        for copy in plan.copies
    ]
    for placeholder in plan.placeholders:
        start = placeholder.start
        for repair in plan.repairs:
            part = placeholder.intersection(repair)
            if not part:
                continue
            if part.start > start:
                spans.append(_span(start, part.start, "placeholder"))
            spans.append(_span(part.start, part.end, "repair"))
            start = part.end
        if start < placeholder.end:
            spans.append(_span(start, placeholder.end, "placeholder"))
    return sorted(spans, key=lambda span: int(span["start"]))


def _span(
    start: int, end: int, kind: str, *, donor: int | None = None, shift: int | None = None
) -> dict[str, Any]:
    return {"start": start, "end": end, "kind": kind, "donor": donor, "shift": shift}


def _donors(
    plan: Plan | NoPlan, candidates: Sequence[Candidate], outcomes: Mapping[int, str]
) -> list[dict[str, Any]]:
    used: Counter[int] = Counter()
    if isinstance(plan, Plan):
        for copy in plan.copies:
            used[int(copy.donor)] += copy.length
    return [
        {
            "node": candidate.prompt_id,
            "sources": sorted(candidate.sources),
            "score": candidate.score,
            "similarity": candidate.similarity,
            "tokens_used": used[candidate.prompt_id],
            "outcome": outcomes.get(candidate.prompt_id, "gone"),
        }
        for candidate in candidates
    ]
