"""
The story of one request's sharing: nominate, align, plan, fetch, and later keep what was computed.

`prepare` runs before prefill and never raises: whatever fails in here, the request is served unshared and the
failure is counted. `commit` runs when a request has ended, `remember` after that.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from delta_tree import (
    DeltaTree,
    DeltaTreeError,
    Node,
    NodeDraft,
    NodeId,
    Piece,
    PieceTable,
    Segment,
    SegmentId,
    Span,
    TokenIds,
    merge,
    new_segment_id,
)
from kvshare.cost import CostModel
from kvshare.engines.base import Prompt, SharingMode, SharingReport
from kvshare.kv.memory_tier import MemoryTier
from kvshare.kv.segment import SegmentKV
from kvshare.kv.sequence import SequenceKV
from kvshare.plan import NoPlan, Plan
from kvshare.planner import PlannerLimits, make_plan
from vector_index import Candidate, Nominator, PromptText

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """What sharing found for a prompt. Holds the segments' memory until the request has laid them out."""

    plan: Plan | NoPlan
    segments: Mapping[SegmentId, SegmentKV] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    stage_seconds: Mapping[str, float] = field(default_factory=dict)

    def report(self, num_tokens: int) -> SharingReport:
        """Tokens by source, for usage and metrics."""
        if isinstance(self.plan, NoPlan):
            return SharingReport(0, 0, num_tokens, 0, decision="full", reason=self.plan.reason)
        return SharingReport(
            num_exact=self.plan.exact_length,
            num_copied=self.plan.num_copied,
            num_recomputed=self.plan.num_recomputed,
            num_repaired=self.plan.num_repaired,
            decision=self.plan.decision,
            reason=self.plan.reason,
            donors=self.plan.donors,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """
    A finished sequence: its tokens, the plan it came from, and the KV of its first len(token_ids) slots.
    """

    namespace: str
    token_ids: TokenIds  # (T,) prompt and generated tokens whose KV is computed
    plan: Plan | NoPlan
    kv: SequenceKV


class Sharing:
    """
    Ties the delta tree, the KV tier and the index together for one model.

    The tree is the truth about prompts, the tier holds the bytes, the index only nominates.
    """

    def __init__(
        self,
        *,
        tree: DeltaTree,
        tier: MemoryTier,
        nominator: Nominator,
        limits: PlannerLimits,
        cost: CostModel,
    ) -> None:
        self.tree = tree
        self.tier = tier
        self.nominator = nominator
        self.limits = limits
        self.cost = cost
        self.counters: Counter[str] = Counter()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvshare-plan")
        self._commit_lock = threading.Lock()
        self._held: Counter[NodeId] = Counter()
        self._evicted: deque[tuple[str, int]] = deque()  # still in the index; see `remember`

    def close(self) -> None:
        self._executor.shutdown(wait=True, cancel_futures=True)

    async def prepare(self, namespace: str, prompt: Prompt, mode: SharingMode) -> Lookup:
        """Find and plan the reuse for a prompt. Fails open: any error is NoPlan with a reason."""
        if mode is SharingMode.OFF:
            return Lookup(NoPlan("off"))
        if prompt.num_tokens < self.limits.sharing.min_prompt_tokens:
            return Lookup(NoPlan("short_prompt"))
        began = time.perf_counter()
        try:
            candidates, stages = await self._nominate(namespace, prompt, mode)
            lookup = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._plan, namespace, prompt.token_ids, candidates, mode
            )
        except Exception as exc:
            log.warning("sharing failed, the request is served without it", exc_info=exc)
            self.counters["fallback:sharing:error"] += 1
            return Lookup(NoPlan("lookup_failed"))
        self.cost.observe_lookup(time.perf_counter() - began)
        return Lookup(lookup.plan, lookup.segments, candidates, {**stages, **lookup.stage_seconds})

    def hold(self, plan: Plan | NoPlan) -> None:
        """Keep a plan's donors from being evicted while the request runs."""
        if isinstance(plan, Plan):
            with self._commit_lock:
                self._held.update(plan.donors)
            for donor in plan.donors:
                self.tree.touch(donor)

    def release(self, plan: Plan | NoPlan) -> None:
        """Undo `hold`."""
        if isinstance(plan, Plan):
            with self._commit_lock:
                self._held.subtract(plan.donors)
                self._held += Counter()  # drops the zeros

    def commit(self, computed: Computed) -> Node | None:
        """
        Keep a finished sequence: new KV as segments, the prompt as a node. Blocking; call it off the loop.

        Returns: the node, or None where nothing was kept (too large, donor gone, store failing); never raises
        """
        try:
            with self._commit_lock:
                return self._commit(computed)
        except DeltaTreeError as exc:
            # A donor may have been evicted by an administrator in the meantime. Nothing was stored.
            log.warning("prompt not kept: %s", exc)
            self.counters["fallback:commit:refused"] += 1
        except Exception as exc:
            log.warning("prompt not kept: %s", type(exc).__name__, exc_info=exc)
            self.counters["fallback:commit:error"] += 1
        return None

    async def remember(self, node: Node, text: PromptText | None) -> None:
        """
        Index a node (without text only prefix and fingerprints), and take evicted ones out of the index.
        """
        evicted = [self._evicted.popleft() for _ in range(len(self._evicted))]
        await self.forget(evicted)
        await self.nominator.remember(node.node_id, node.namespace, node.token_ids, text)

    async def forget(self, nodes: Iterable[tuple[str, int]]) -> None:
        """Take nodes out of the index. Stale entries would be harmless: the tree no longer knows them."""
        by_namespace: dict[str, list[int]] = {}
        for namespace, node_id in nodes:
            by_namespace.setdefault(namespace, []).append(node_id)
        for namespace, node_ids in by_namespace.items():
            await self.nominator.forget(namespace, node_ids)

    async def _nominate(
        self, namespace: str, prompt: Prompt, mode: SharingMode
    ) -> tuple[tuple[Candidate, ...], dict[str, float]]:
        nomination = await self.nominator.nominate(
            namespace, prompt.token_ids, prompt.text, allow_dense=mode is SharingMode.APPROX
        )
        for failure in nomination.failures:
            self.counters[f"fallback:{failure.component}:{failure.reason}"] += 1
        return tuple(nomination.candidates), dict(nomination.stage_seconds)

    def _plan(
        self, namespace: str, token_ids: TokenIds, candidates: Sequence[Candidate], mode: SharingMode
    ) -> Lookup:
        """Align, plan and fetch. A donor whose KV is gone leaves the tree, and the rest is planned again."""
        stages: dict[str, float] = {}
        nodes = self._own_nodes(namespace, candidates)
        while True:
            began = time.perf_counter()
            plan = make_plan(
                token_ids,
                nodes,
                self.tree.segment,
                approximate=mode is SharingMode.APPROX,
                limits=self.limits,
                rates=self.cost.rates,
            )
            stages["plan"] = stages.get("plan", 0.0) + time.perf_counter() - began
            if isinstance(plan, NoPlan):
                return Lookup(plan, stage_seconds=stages)
            began = time.perf_counter()
            segments, missing = self._fetch(plan)
            stages["load"] = stages.get("load", 0.0) + time.perf_counter() - began
            if not missing:
                return Lookup(plan, segments, stage_seconds=stages)
            broken = {copy.donor for copy in plan.copies if copy.segment_id in missing}
            nodes = [node for node in nodes if node.node_id not in broken]
            self._discard(broken)
            if not nodes:
                return Lookup(NoPlan("kv_gone"), stage_seconds=stages)

    def _discard(self, broken: Iterable[NodeId]) -> None:
        """Prompts whose KV cannot be read leave the tree, pinned or not: there is nothing left to pin."""
        self.counters["fallback:tier:missing"] += 1
        with self._commit_lock:
            for node_id in broken:
                if (node := self.tree.get(node_id)) is None:
                    continue
                self.tree.unpin(node_id)
                self.tier.drop(self.tree.evict(node_id).freed_segments)
                self._evicted.append((node.namespace, node_id))

    def _own_nodes(self, namespace: str, candidates: Sequence[Candidate]) -> list[Node]:
        """The candidates' nodes. The index filtered by namespace already; the truth is checked again here."""
        nodes = []
        for candidate in candidates:
            node = self.tree.get(NodeId(candidate.prompt_id))
            if node is None:
                continue
            if node.namespace != namespace:
                self.counters["isolation_denials"] += 1
                log.error("a candidate of another namespace reached the planner and was dropped")
                continue
            nodes.append(node)
        return nodes

    def _fetch(self, plan: Plan) -> tuple[dict[SegmentId, SegmentKV], set[SegmentId]]:
        segments: dict[SegmentId, SegmentKV] = {}
        missing: set[SegmentId] = set()
        for segment_id in {copy.segment_id for copy in plan.copies}:
            segment = self.tier.get(segment_id, verify=True)
            if segment is None:
                missing.add(segment_id)
            else:
                segments[segment_id] = segment
        return segments, missing

    def _commit(self, computed: Computed) -> Node | None:
        num_tokens = len(computed.token_ids)
        if num_tokens < self.limits.sharing.min_prompt_tokens:
            return None
        spans = _computed_spans(computed.plan, num_tokens)
        num_bytes = sum(len(span) for span in spans) * computed.kv.geometry.bytes_per_token
        if not self._make_room(num_bytes):
            self.counters["fallback:commit:too_large"] += 1
            return None
        kept = [(span, computed.kv.cut(span)) for span in spans]
        segments = [_describe(computed, span, kv) for span, kv in kept]
        insertion = self.tree.insert(
            NodeDraft(
                namespace=computed.namespace,
                token_ids=computed.token_ids,
                parent=_parent(computed.plan),
                pieces=_piece_table(computed.plan, spans, segments),
                new_segments=tuple(segments),
                exact_length=_exact_length(computed.plan, num_tokens),
            )
        )
        freed = set(insertion.freed_segments)
        for segment, (_, kv) in zip(segments, kept, strict=True):
            if segment.segment_id not in freed:
                self.tier.put(segment.segment_id, kv, segment.checksum)
        self.tier.drop(freed)
        return insertion.node

    def _make_room(self, num_bytes: int) -> bool:
        """Evict the least recently used prompts until `num_bytes` fit; held and pinned ones stay."""
        if num_bytes > self.tier.max_bytes:
            return False
        if self.tier.num_bytes + num_bytes <= self.tier.max_bytes:
            return True
        for candidate in list(self.tree.eviction_candidates()):
            if candidate.node_id in self._held:
                continue
            eviction = self.tree.evict(candidate.node_id)
            self.tier.drop(eviction.freed_segments)
            self._evicted.append((candidate.namespace, candidate.node_id))
            self.counters["evictions"] += 1
            if self.tier.num_bytes + num_bytes <= self.tier.max_bytes:
                return True
        return False


def _computed_spans(plan: Plan | NoPlan, num_tokens: int) -> tuple[Span, ...]:
    """What was computed for this sequence: the placeholders, and everything that was generated."""
    if isinstance(plan, NoPlan):
        return (Span(0, num_tokens),)
    spans = [Span(span.start, min(span.end, num_tokens)) for span in plan.placeholders]
    return merge([*spans, Span(min(plan.num_tokens, num_tokens), num_tokens)])


def _exact_length(plan: Plan | NoPlan, num_tokens: int) -> int:
    """Everything before the first approximate copy was computed after exact KV only."""
    if isinstance(plan, NoPlan) or plan.first_approximate >= plan.num_tokens:
        return num_tokens
    return plan.first_approximate


def _describe(computed: Computed, span: Span, kv: SegmentKV) -> Segment:
    plan = computed.plan
    exact = isinstance(plan, NoPlan) or span.start < plan.first_approximate
    prefix = computed.token_ids[: span.start]
    return Segment(
        segment_id=new_segment_id(),
        namespace=computed.namespace,
        first_position=span.start,
        num_tokens=len(span),
        prefix_hash=hashlib.sha256(prefix.astype("<i4").tobytes()).digest()[:16],
        generation=0 if exact else plan.generation if isinstance(plan, Plan) else 0,
        num_bytes=kv.num_bytes,
        checksum=kv.checksum(),
    )


def _piece_table(plan: Plan | NoPlan, spans: Sequence[Span], segments: Sequence[Segment]) -> PieceTable:
    parts = [
        (span.start, Piece(segment.segment_id, 0, len(span)))
        for span, segment in zip(spans, segments, strict=True)
    ]
    if isinstance(plan, Plan):
        parts += [
            (copy.target_start, Piece(copy.segment_id, copy.offset, copy.length)) for copy in plan.copies
        ]
    return PieceTable(piece for _, piece in sorted(parts, key=lambda part: part[0]))


def _parent(plan: Plan | NoPlan) -> NodeId | None:
    """The donor that gave most."""
    if isinstance(plan, NoPlan):
        return None
    given: Counter[NodeId] = Counter()
    for copy in plan.copies:
        given[copy.donor] += copy.length
    return given.most_common(1)[0][0] if given else None
