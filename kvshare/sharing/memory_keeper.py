"""
Stores prompts and answers in host memory: cuts their KV into segments and makes room for them.

The embedded engine stores tensors, a replay only byte counts. No answer waits until it is stored. All methods
may be called from any thread; those that block say so.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar, cast

from delta_tree import (
    DeltaTree,
    Node,
    NodeDraft,
    NodeId,
    Segment,
    SegmentId,
    Span,
    TokenIds,
    new_segment_id,
    segment_tokens,
    split,
)
from kvshare.kv.tier import Budget, Tier
from kvshare.sharing.keeper import PromptKeeper
from kvshare.sharing.node_draft import StoredSpan, computed_spans, draft_node, find_parent, segments_of
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.tenant_budget import budget_of
from kvshare.status import TierStatus
from kvshare.telemetry import Component, FallbackReason


class Retained(Protocol):
    """KV of one span of a sequence; in a replay only its size."""

    @property
    def num_bytes(self) -> int: ...

    def checksum(self) -> int: ...


KVT = TypeVar("KVT", bound=Retained)
KVT_co = TypeVar("KVT_co", bound=Retained, covariant=True)
KVT_contra = TypeVar("KVT_contra", bound=Retained, contravariant=True)


class SequenceBuffer(Protocol[KVT_co]):
    """The KV of a finished sequence, which can be cut into segments."""

    @property
    def bytes_per_token(self) -> int: ...

    @property
    def is_whole(self) -> bool:
        """Return whether every slot holds KV, even copied slots to which no later token attends."""

    def cut(self, span: Span) -> KVT_co: ...


class HostTier(Tier, Budget, Protocol[KVT_contra]):
    """
    A tier in the memory of this process, maybe with others below it.

    `num_bytes` and `max_bytes` are those of the memory. Prompts are evicted until each of `budgets` has room.
    """

    @property
    def budgets(self) -> Collection[Budget]: ...

    def put(self, segment: Segment, kv: KVT_contra) -> None: ...

    def close(self) -> None:
        """Release the tier. The caller puts and fetches nothing after this."""

    def status(self) -> tuple[TierStatus, ...]:
        """Return the status of this tier and those below it."""


@dataclass(frozen=True, slots=True, eq=False)
class Computed(Generic[KVT]):
    """A finished sequence: its tokens, its plan, and the KV of its tokens."""

    namespace: str
    token_ids: TokenIds  # (T,) prompt and generated tokens whose KV is computed
    plan: Plan | NoPlan
    kv: SequenceBuffer[KVT]


class MemoryKeeper(PromptKeeper[HostTier[KVT]], Generic[KVT]):
    """
    Stores the KV of this process. The only writer of tree and tier.

    Donors of running requests are held: they are not evicted to make room, only by an administrator.
    """

    def __init__(
        self,
        tree: DeltaTree,
        tier: HostTier[KVT],
        *,
        min_tokens: int,
        new_id: Callable[[], SegmentId] = new_segment_id,
    ) -> None:
        super().__init__(tree, tier, min_tokens=min_tokens)
        self._new_id = new_id
        self._held: Counter[NodeId] = Counter()
        self._held_lock = threading.Lock()

    def hold(self, plan: Plan | NoPlan) -> None:
        """Protect a plan's donors from eviction while the request runs."""
        if isinstance(plan, Plan):
            with self._held_lock:
                self._held.update(plan.donors)

    def release(self, plan: Plan | NoPlan) -> None:
        """Undo `hold`."""
        if isinstance(plan, Plan):
            with self._held_lock:
                self._held.subtract(plan.donors)
                self._held += Counter()  # drops the zeros

    def store(self, computed: Computed[KVT]) -> Node | None:
        """
        Store a finished sequence: its new KV as segments, the sequence as a node. Blocks.

        Returns: the node if it is new; None if it was stored already, or is not stored (too large, donor
        evicted, store failing). Never raises.
        """
        return self._fail_open(lambda: self._store(computed))

    def store_prompt(self, computed: Computed[KVT]) -> Node | None:
        """
        Store a prompt whose answer is still generated; `complete` must follow. Blocks.

        A prompt that is the beginning of a donor is not stored: it can be copied from the donor.
        """
        return None if self._is_in_donor(computed) else self.store(computed)

    def _is_in_donor(self, computed: Computed[KVT]) -> bool:
        return self._begins(find_parent(computed.plan, self.tree.get), computed.token_ids)

    def complete(self, prompt: Node | None, computed: Computed[KVT], *, num_prompt: int) -> Node | None:
        """
        Store the answer of a sequence after its prompt of `num_prompt` tokens. Blocks.

        `prompt`: what `store_prompt` returned.
        Returns: the node as it is now; None if nothing new is stored. Never raises.
        """
        if prompt is not None:
            now = self._fail_open(lambda: self._lengthen(prompt, computed)) or self.tree.get(prompt.node_id)
            return now or self.store(computed)  # evicted meanwhile: stored again from its own KV
        tokens = computed.token_ids[:num_prompt]
        known = self.tree.find(computed.namespace, tokens)
        is_known = known is not None and known.exact_length == num_prompt
        is_short = len(tokens) < self._min_tokens
        if is_short or is_known or self._is_in_donor(replace(computed, token_ids=tokens)):
            return self.store(computed)
        return None  # the prompt was not stored, and would not be now

    def adopt(self, draft: NodeDraft, *, room: Budget, hold: Callable[[], object]) -> Node | None:
        """
        Store a prompt whose KV another server has computed, where there is `room` for it. Blocks.

        `hold`: makes the tier hold the draft's segments. Returns: the node if it is new. Never raises.
        """
        return self._fail_open(lambda: self._adopt(draft, room, hold))

    def _adopt(self, draft: NodeDraft, room: Budget, hold: Callable[[], object]) -> Node | None:
        num_bytes = sum(segment.num_bytes for segment in draft.new_segments)
        with self._held_lock:
            held = frozenset(self._held)
        with self._writing:
            stored = self.tree.find(draft.namespace, draft.token_ids)
            tenant = budget_of(self.tree, self.tenants, draft.namespace)
            is_over = tenant is not None and tenant.num_bytes + num_bytes > tenant.max_bytes
            is_known = stored is not None and stored.exact_length >= draft.exact_length
            if is_over or is_known or not self._make_room(num_bytes, room, held):
                return None
            hold()
            insertion = self._insert(draft)
            return insertion.node if insertion.created else None

    def close(self) -> None:
        """Close the tier. Blocks while it writes what it has in memory only."""
        self.tier.close()

    def tiers(self) -> tuple[TierStatus, ...]:
        return self.tier.status()

    def _budgets(self) -> Collection[Budget]:
        return self.tier.budgets

    def _not_to_evict(self, held: Collection[NodeId], budget: Budget) -> Container[NodeId]:
        """Return held prompts, and those without a segment in the budget: evicting those frees no room."""
        return _HeldOrElsewhere(held, self.tree, budget)

    def _lengthen(self, node: Node, computed: Computed[KVT]) -> Node | None:
        """Add the answer; None if it adds nothing, has no room, or its prompt was evicted or shortened."""
        added = Span(node.num_tokens, len(computed.token_ids))
        is_known = self.tree.find(computed.namespace, computed.token_ids) is not None
        if not added or is_known or not self._is_as_it_was(node):
            return None
        spans = split([added], self._segment_tokens(computed))
        retained = [computed.kv.cut(span) for span in spans]
        plan: Plan | NoPlan = NoPlan() if node.exact_length == node.num_tokens else computed.plan
        segments = segments_of(plan, self._stored_spans(spans, retained), computed.namespace)
        with self._writing:
            if not self._is_as_it_was(node) or not self._has_room(
                node.namespace, retained, also_held=node.node_id
            ):
                return None
            self._put(segments, retained)
            try:
                return self.tree.lengthen(node.node_id, computed.token_ids, segments)
            except BaseException:
                self.tier.drop(segment.segment_id for segment in segments)
                raise

    def _is_as_it_was(self, node: Node) -> bool:
        now = self.tree.get(node.node_id)
        return now is not None and now.num_tokens == node.num_tokens

    def _store(self, computed: Computed[KVT]) -> Node | None:
        if not self._is_wanted(computed.namespace, computed.token_ids):
            return None
        num_computed = sum(len(span) for span in self._spans(computed))
        if num_computed * computed.kv.bytes_per_token > self.tier.max_bytes:
            self.telemetry.fallback(Component.STORE, FallbackReason.TOO_LARGE)
            return None
        draft, retained = self._drafted(computed)
        plan = computed.plan
        with self._writing:
            if isinstance(plan, Plan) and any(copy.segment_id not in self.tier for copy in plan.copies):
                if plan.first_approximate < plan.num_tokens or not computed.kv.is_whole:
                    self.telemetry.fallback(Component.STORE, FallbackReason.DONOR_GONE)
                    return None
                # All KV in the slots is exact, copied or not: store all of it.
                draft, retained = self._drafted(replace(computed, plan=NoPlan()))
            if not self._has_room(computed.namespace, retained):
                return None
            # KV before the node, so that no reader finds a node without KV.
            self._put(draft.new_segments, retained)
            insertion = self._insert(draft)
            return insertion.node if insertion.created else None

    def _drafted(self, computed: Computed[KVT]) -> tuple[NodeDraft, list[KVT]]:
        """Return the node of a finished sequence, and the KV of its new segments."""
        retained = [computed.kv.cut(span) for span in self._spans(computed)]
        draft = draft_node(
            computed.token_ids,
            computed.plan,
            self._stored_spans(self._spans(computed), retained),
            namespace=computed.namespace,
            parent=find_parent(computed.plan, self.tree.get),
        )
        return draft, retained

    def _stored_spans(self, spans: Sequence[Span], retained: Sequence[KVT]) -> list[StoredSpan]:
        return [
            StoredSpan(self._new_id(), span, kv.num_bytes, kv.checksum())
            for span, kv in zip(spans, retained, strict=True)
        ]

    def _spans(self, computed: Computed[KVT]) -> tuple[Span, ...]:
        """Return the computed spans, cut into segments; the other tokens were copied."""
        return computed_spans(computed.plan, len(computed.token_ids), self._segment_tokens(computed))

    def _segment_tokens(self, computed: Computed[KVT]) -> int:
        return segment_tokens(self.tier.max_bytes // computed.kv.bytes_per_token)

    def _has_room(self, namespace: str, retained: Sequence[KVT], *, also_held: NodeId | None = None) -> bool:
        """Return whether the KV fits. Evicts other prompts if necessary."""
        with self._held_lock:
            held = frozenset(self._held) if also_held is None else frozenset({*self._held, also_held})
        num_bytes = sum(kv.num_bytes for kv in retained)
        if not self._fits_tenant(namespace, num_bytes, held):
            return False
        return all(self._make_room(num_bytes, budget, held) for budget in self.tier.budgets)

    def _put(self, segments: Sequence[Segment], retained: Sequence[KVT]) -> None:
        for segment, kv in zip(segments, retained, strict=True):
            self.tier.put(segment, kv)


class _HeldOrElsewhere(Container[NodeId]):
    """The nodes that are held, those without a segment in a budget, and those that are gone."""

    def __init__(self, held: Collection[NodeId], tree: DeltaTree, budget: Budget) -> None:
        self._held, self._tree, self._budget = held, tree, budget

    def __contains__(self, node_id: object) -> bool:
        node = self._tree.get(cast(NodeId, node_id))
        if node is None or node_id in self._held:
            return True
        return not any(entry in self._budget for entry in node.pieces.segment_ids)
