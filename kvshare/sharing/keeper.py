"""
The only writer of the tree: stores prompts as nodes, and evicts prompts to make room for new ones.

`PromptKeeper` has what both engines need. `sharing/memory_keeper.py` stores KV of this process;
`fleet/replica_keeper.py` stores what vLLM replicas report. All methods may be called from any thread; all but
queries may block on SQLite.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np

from delta_tree import (
    DeltaTree,
    DeltaTreeError,
    Insertion,
    MetadataStoreError,
    Node,
    NodeDraft,
    NodeId,
    SegmentId,
    TokenIds,
)
from kvshare.admin import Command, CommandResult, EvictionDocument, PinDocument, PinnedBytes
from kvshare.errors import KVShareError
from kvshare.kv.tier import Budget, Tier
from kvshare.metadata import problem_of
from kvshare.safe_logging import classes_and_places
from kvshare.sharing.budget import bytes_of, check_pins, copied_to_others, most_pinned
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.tenant_budget import budget_of, group_of
from kvshare.status import TierStatus
from kvshare.telemetry import Component, EvictionCause, FallbackReason, Telemetry
from kvshare.tenants import Tenants

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # to read an unreadable prompt again: a disk that hangs must not stop others from being stored

TierT = TypeVar("TierT", bound=Tier)
OnPurge = Callable[[Sequence[tuple[str, int]], Collection[SegmentId]], None]


class PromptKeeper(Generic[TierT]):
    """Stores and evicts nodes, lists the evicted ones for the index, and counts failures."""

    def __init__(self, tree: DeltaTree, tier: TierT, *, min_tokens: int) -> None:
        self.tree = tree
        self.tier = tier
        self.telemetry = Telemetry()
        self.tenants = Tenants()
        self._min_tokens = min_tokens
        self._writing = threading.RLock()  # held for milliseconds: never taken on the event loop
        self._evicted: deque[tuple[str, int]] = deque()
        self._shortened: dict[NodeId, Node] = {}
        self._num_unstored = 0  # prompts, since the store failed
        self.problem: str | None = None  # why no prompt is stored now; None: prompts are stored
        # Called with the nodes and segments that an administrator evicts, before the tier drops them.
        self.on_purge: OnPurge = lambda removed, freed: None

    def note_use(self, plan: Plan) -> None:
        """
        Record that a request uses this plan, so that its donors are evicted after others.

        Tokens that were copied to a different text count most; see `copied_to_others`.
        """
        copied, tokens_from = copied_to_others(plan), plan.num_from
        for donor in plan.donors:
            node = self.tree.get(donor)
            share = 1.0 if node is None else tokens_from[donor] / node.num_tokens
            self.tree.touch(donor, num_copied=copied[donor], share=share)

    def discard_unreadable(self, donors: Iterable[NodeId]) -> None:
        """Evict the donors, pinned or not, whose KV is still incomplete. Blocks."""
        with self._writing:
            for node_id in dict.fromkeys(donors):
                node = self.tree.get(node_id)
                if node is None or not self.tier.fetch(node.pieces.segment_ids, within_s=_LOOK_S).missing:
                    continue  # evicted, or stored again meanwhile
                self.tree.unpin(node_id)
                self._evict(node)

    def execute(self, command: Command) -> EvictionDocument | PinDocument:
        """
        Carry out an administrator's command, and drop the KV of what it evicts. Blocks.

        Raises:  RequestError if it names what is not stored, or if too much would be pinned
        """
        with self._writing:
            result: CommandResult[EvictionDocument] | CommandResult[PinDocument] = command.apply(
                self.tree, self.tenants
            )
            if result.to_pin:
                check_pins(self.tree, result.to_pin, self._budgets())
                self.tree.pin(*result.to_pin)
            self.on_purge(result.removed_nodes, result.freed_segments)
            self.tier.drop(result.freed_segments)
        self._evicted.extend(result.removed_nodes)
        return result.document

    def revoke(self, node_id: NodeId) -> None:
        """Evict a prompt that an administrator of another server has deleted, pinned or not. Blocks."""
        with self._writing:
            if (node := self.tree.get(node_id)) is not None:
                self.tree.unpin(node_id)
                self._evict(node)

    def pins(self) -> PinnedBytes:
        """Return the bytes of KV that pinned prompts use, and their limit, over all memories. Blocks."""
        with self._writing:
            pinned, budgets = self.tree.pinned(), self._budgets()
            return {
                "num_bytes": sum(bytes_of(self.tree, pinned, budget) for budget in budgets),
                "max_bytes": sum(most_pinned(budget) for budget in budgets),
            }

    def note_stored(self) -> None:
        """Note that a prompt was stored: a problem of the store, if there was one, is over."""
        if self._num_unstored:
            log.warning("prompts are stored again; %d were not stored meanwhile", self._num_unstored)
            self._num_unstored, self.problem = 0, None

    def close(self) -> None:
        """Release resources. The caller stores nothing after this."""

    def tiers(self) -> tuple[TierStatus, ...]:
        """Return the tiers of KV in this process."""
        return ()

    def find_stored(self, namespace: str, token_ids: TokenIds, plan: Plan | NoPlan) -> Node | None:
        """Return the node of these tokens, or a donor that begins with them with exact KV, or None."""
        known = self.tree.find(namespace, token_ids)
        if known is not None or isinstance(plan, NoPlan):
            return known
        return next((self.tree.get(donor) for donor in plan.donors if self._begins(donor, token_ids)), None)

    def note_evicted(self, namespace: str, node_id: int) -> None:
        """Record a node that the index has and the tree does not."""
        self._evicted.append((namespace, node_id))

    def take_evicted(self) -> list[tuple[str, int]]:
        """Return namespaces and ids of the nodes evicted since the last call, which the index still has."""
        return [self._evicted.popleft() for _ in range(len(self._evicted))]

    def take_shortened(self) -> list[Node]:
        """Return the nodes shortened since the last call, which the index still has in full length."""
        taken = (self._shortened.pop(node_id, None) for node_id in list(self._shortened))
        return [node for node in taken if node is not None]

    def _budgets(self) -> Collection[Budget]:
        """Return every memory that holds segments; none for a tree without an engine."""
        return ()

    def _insert(self, draft: NodeDraft, *, memory: str | None = None) -> Insertion:
        """Store a node. If the tree raises, drop the draft's segments and raise the error again."""
        owner = self.tenants.owner_of(draft.namespace)
        groups = () if memory is None else (memory,)
        try:
            insertion = self.tree.insert(
                draft, groups=groups if owner is None else (*groups, group_of(owner.tenant))
            )
        except BaseException:
            self.tier.drop(segment.segment_id for segment in draft.new_segments)
            raise
        self.note_stored()
        self.tier.drop(insertion.freed_segments)
        return insertion

    def _fail_open(self, act: Callable[[], Node | None]) -> Node | None:
        """Return the result of `act`; None if it fails, which is counted and logged. Never raises."""
        try:
            return act()
        except (DeltaTreeError, KVShareError) as exc:
            # An administrator may have evicted a donor meanwhile, or a replica's report is wrong.
            self._count_unstored(exc)
        except Exception as exc:  # noqa: BLE001  logged, without its message
            log.warning("a prompt is not stored: %s", classes_and_places(exc))
            self.telemetry.fallback(Component.STORE, FallbackReason.ERROR)
        return None

    def _count_unstored(self, exc: Exception) -> None:
        """Count a prompt that was not stored. A failing store fails for all prompts, so it is logged once."""
        self.telemetry.fallback(Component.STORE, FallbackReason.REFUSED)
        if not isinstance(exc, MetadataStoreError):
            log.warning("a prompt is not stored: %s", exc)
            return
        self._num_unstored += 1
        self.problem = problem_of(exc)
        if self._num_unstored == 1:
            log.warning(
                "prompts are not stored until the store can be written: %s. Look at the space and the "
                "permissions there; no restart is needed",
                exc,
            )

    def _is_wanted(self, namespace: str, token_ids: TokenIds) -> bool:
        """
        Return whether a sequence should become a node: it is long enough, and no node has its tokens with
        exact KV. If such a node exists, it counts as used.
        """
        if len(token_ids) < self._min_tokens:
            return False
        stored = self.tree.find(namespace, token_ids)
        if stored is None or stored.exact_length != len(token_ids):
            return True
        self.tree.touch(stored.node_id)
        return False

    def _begins(self, node_id: NodeId | None, token_ids: TokenIds) -> bool:
        """Return whether a node exists, begins with these tokens and has their exact KV."""
        node = None if node_id is None else self.tree.get(node_id)
        if node is None or node.exact_length < len(token_ids):
            return False
        return np.array_equal(node.token_ids[: len(token_ids)], token_ids)

    def _make_room(
        self,
        num_bytes: int,
        budget: Budget,
        held: Collection[NodeId],
        scopes: Collection[str] | None = None,
        tenant: str | None = None,
    ) -> bool:
        """
        Evict prompts until `num_bytes` fit, in the tree's order (`DeltaTree.next_to_evict`).

        Held and pinned prompts are never evicted. The last one is only shortened if a useful prefix remains.
        `scopes`: the group that has this budget, of a memory or a tenant; None: there is one memory for all.
        `tenant`: whose quota it is, if it is one.
        Returns: whether `num_bytes` fit
        """
        if budget.num_bytes + num_bytes <= budget.max_bytes:
            return True
        if bytes_of(self.tree, self.tree.pinned().union(held), budget) + num_bytes > budget.max_bytes:
            self.telemetry.fallback(Component.STORE, FallbackReason.NO_ROOM)
            return False  # evicting all others would not be enough, so none is evicted
        without = self._not_to_evict(held, budget)
        while (candidate := self.tree.next_to_evict(scopes, without=without)) is not None:
            excess = budget.num_bytes + num_bytes - budget.max_bytes
            # A tenant's own evictions say nothing of what others leave.
            self.tree.age(candidate.node_id, scopes, raises_floor=tenant is None)
            if num_left := self._useful_prefix(candidate, excess, budget):
                self.tier.drop(self.tree.shorten(candidate.node_id, num_left, lazily=True).freed_segments)
                self._shortened[candidate.node_id] = self.tree.node(candidate.node_id)
                cause = EvictionCause.END
            else:
                self._evict(candidate)
                cause = EvictionCause.CAPACITY if tenant is None else EvictionCause.QUOTA
            self.telemetry.evicted(cause, for_quota_of=tenant)
            if budget.num_bytes + num_bytes <= budget.max_bytes:
                return True
        self.telemetry.fallback(Component.STORE, FallbackReason.NO_ROOM)
        return False

    def _fits_tenant(self, namespace: str, num_bytes: int, held: Collection[NodeId]) -> bool:
        """Return whether the tenant may have so many more bytes. Evicts its own prompts if necessary."""
        budget = budget_of(self.tree, self.tenants, namespace)
        if budget is None:
            return True
        return self._make_room(num_bytes, budget, held, (group_of(budget.tenant),), budget.tenant)

    def _not_to_evict(self, held: Collection[NodeId], budget: Budget) -> Container[NodeId]:
        """Return the prompts that stay when this budget needs room."""
        return held

    def _useful_prefix(self, node: Node, num_bytes: int, budget: Budget) -> int:
        """
        Return to how many tokens a node can be shortened to free `num_bytes`; 0 if it must be evicted.

        The prefix must be long enough to be looked up, and have a segment that no other node uses: shared
        segments stay anyway. At least an eighth of the tokens is cut off: the prefix is indexed again.
        """
        most_left = node.num_tokens - node.num_tokens // 8
        rows = node.pieces.rows()
        first_use = {segment_id: start for start, segment_id, _, _ in reversed(rows)}
        unshared = {entry for entry in first_use if self.tree.reference_count(entry) == 1 and entry in budget}
        num_left = node.num_tokens
        for start, segment_id, _, _ in reversed(rows):
            num_left = start
            if segment_id in unshared and first_use[segment_id] == start:
                unshared.discard(segment_id)
                num_bytes -= self.tree.segment(segment_id).num_bytes
            if (num_bytes <= 0 and num_left <= most_left) or num_left < self._min_tokens:
                break
        if num_bytes > 0 or not unshared or num_left < self._min_tokens:
            return 0
        return 0 if self.tree.find(node.namespace, node.token_ids[:num_left]) is not None else num_left

    def _evict(self, node: Node) -> None:
        # Written to disk together with the next prompt: one transaction instead of two.
        self.tier.drop(self.tree.evict(node.node_id, lazily=True).freed_segments)
        self._shortened.pop(node.node_id, None)
        self._evicted.append((node.namespace, int(node.node_id)))
