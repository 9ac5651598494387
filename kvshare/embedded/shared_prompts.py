"""
Exchanges prompts with other servers through a shared store, so that each finds what any of them has stored.

    note       a prompt was stored: its record is written once the store has all its segments
    reported   prompts of others become nodes, and are indexed; their KV is read when a plan needs it
    purged     an administrator has evicted prompts: they are deleted in the store, and by the other servers
    renewed    prompts that are used here are kept from expiring in the store

No request waits for the exchange. While the store cannot be reached, this server goes on alone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice
from typing import Final

from delta_tree import DeltaTreeError, Node, NodeId, Segment, SegmentId, UnknownSegmentError
from kvshare.background import Background
from kvshare.embedded.exchange_state import ExchangedNames, ExchangeProblem
from kvshare.kv.sequence import SegmentKV
from kvshare.runtime import Runtime
from kvshare.sharing.memory_keeper import MemoryKeeper
from kvshare.tiers.disk_and_shared import DiskAndShared
from kvshare.tiers.shared_backend import BackendError
from kvshare.tiers.shared_prompts import PromptExchange, Reported, SharedPrompt
from kvshare.tiers.shared_tier import SharedTier
from kvshare.tiers.shares import Share
from kvshare.tiers.tier_stack import TierStack

log = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 0.5
_FLUSH_S: Final = 5.0
_MOST_WAITING: Final = 10_000  # prompts that others are to be informed of
_RENEWALS: Final = 4  # in the time after which a value expires
_BATCH: Final = 256  # keys

Served = Runtime[MemoryKeeper[SegmentKV]]


class SharedPrompts:
    """One per server. Runs on the event loop; calls that block run in threads."""

    def __init__(
        self, exchange: PromptExchange, tier: SharedTier, keeper: MemoryKeeper[SegmentKV], *, below: object
    ) -> None:
        """`below`: the tier below memory, of which the shared one is all or a part."""
        self._exchange, self._tier, self._keeper, self._below = exchange, tier, keeper, below
        self._waiting: OrderedDict[NodeId, None] = OrderedDict()  # prompts stored here and not reported yet
        self._names = ExchangedNames()
        self._has_named = False  # whether the prompts that were on disk at the start have names
        self._to_revoke: dict[str, None] = {}  # prompts that others deleted, and whose eviction failed here
        self._asking = threading.Lock()  # cancelling a task does not end its thread, which uses the store
        self._purged: list[tuple[str | None, tuple[Segment, ...]]] = []  # to be deleted in the store
        self._renewed_at = time.monotonic()
        self._problem = ExchangeProblem()
        # Evicting a segment that is on this server's own disk, too, makes no room in the shared tier.
        self._room = Share(tier.max_bytes, lambda: tier.num_bytes, tier.takes_room)
        keeper.on_purge = self._note_purged

    @property
    def num_waiting(self) -> int:
        """Return the number of prompts of which others are still to be informed."""
        return len(self._waiting)

    def note(self, node: Node) -> None:
        self._waiting[node.node_id] = None
        while len(self._waiting) > _MOST_WAITING:
            self._waiting.popitem(last=False)

    @asynccontextmanager
    async def running(self, runtime: Served) -> AsyncIterator[None]:
        """Exchange prompts inside the context; at its end, report the last stored ones, for some seconds."""
        exchanging = Background()
        exchanging.spawn(self._run(runtime))
        try:
            yield
        finally:
            await exchanging.cancel()
            await runtime.background.settle()
            await self._flush()

    async def _run(self, runtime: Served) -> None:
        while True:
            has_more = False
            try:
                has_more = await self._turn(runtime)
                self._problem.note_fault(None)
            except Exception as exc:  # noqa: BLE001  logged, without its message; one fault must not end it
                self._problem.note_fault(exc)
            if not has_more:
                await asyncio.sleep(_LOOK_EVERY_S)

    def _name_all(self) -> None:
        """Name the prompts from disk: others may have deleted them while this server was away."""
        for node in self._keeper.tree.nodes():
            self._names.remember(node.node_id, self._exchange.name_of(node.namespace, node.token_ids))
        self._has_named = True

    async def _flush(self) -> None:
        until = time.monotonic() + _FLUSH_S
        while (self._waiting or self._purged) and time.monotonic() < until:
            try:
                await asyncio.to_thread(self._delete_purged)
                await asyncio.to_thread(self._publish)
            except BackendError:
                return
            await asyncio.sleep(0.02)

    async def _turn(self, runtime: Served) -> bool:
        """Exchange once: delete, take in, publish, renew. Returns whether there may be more to do at once."""
        if not self._has_named:
            await asyncio.to_thread(self._name_all)
        try:
            await asyncio.to_thread(self._delete_purged)
            if await asyncio.to_thread(self._exchange.has_lost):
                await runtime.write(self._forget_lost)
            reported = await asyncio.to_thread(self._exchange.reported)
            await self._take_in([*(Reported(name, None) for name in self._to_revoke), *reported], runtime)
            await asyncio.to_thread(self._publish)
            await asyncio.to_thread(self._renew)
        except BackendError as exc:
            self._problem.note(exc)
            return False
        self._problem.note(None)
        return bool(reported)

    async def _take_in(self, reported: Sequence[Reported], runtime: Served) -> None:
        """Take in reports one at a time, so that the writer stores ending requests in between."""
        nodes = []
        for report in reported:
            if report.prompt is None:
                await self._revoke(report.name, runtime)
            elif (node := await runtime.write(self._adopt, report.name, report.prompt)) is not None:
                nodes.append(node)
        if reported:
            await runtime.sharing.indexing.forget_evicted()
        if nodes:
            await runtime.sharing.indexing.remember_all(nodes)

    async def _revoke(self, name: str, runtime: Served) -> None:
        if (node_id := self._names.node_of(name)) is not None:
            try:
                await runtime.evict(self._evict_revoked, node_id)
            except DeltaTreeError as exc:
                if name not in self._to_revoke:
                    log.warning(
                        "what another server deleted stays for now; the deletion is tried again: %s", exc
                    )
                self._to_revoke[name] = None
                return
            self._names.forget(node_id)
        self._to_revoke.pop(name, None)

    def _evict_revoked(self, node_id: NodeId) -> None:
        """Evict a revoked prompt, and note its freed segments for deletion. In the writer's thread."""
        node = self._keeper.tree.get(node_id)
        segments = () if node is None else self._tier.known(node.pieces.segment_ids)
        self._keeper.revoke(node_id)
        if freed := tuple(each for each in segments if not self._is_known(each.segment_id)):
            self._purged.append((None, freed))

    def _adopt(self, name: str, prompt: SharedPrompt) -> Node | None:
        """Store another server's prompt. Returns the node if it is new. In the writer's thread."""
        num_bytes = sum(segment.num_bytes for segment in prompt.segments)
        has_room = self._tier.num_bytes + num_bytes <= self._tier.max_bytes
        if not has_room and not self._exchange.is_caught_up:
            self._exchange.stop_looking_back()
            return None
        tree = self._keeper.tree
        draft = prompt.draft(entry for entry in prompt.pieces.segment_ids if self._is_known(entry))
        if prompt.owner is not None:
            self._keeper.tenants.note_named(prompt.namespace, prompt.owner)
        node = self._keeper.adopt(draft, room=self._room, hold=lambda: self._tier.adopt(draft.new_segments))
        stored = node or tree.find(prompt.namespace, prompt.token_ids)
        if stored is not None:
            self._names.remember(stored.node_id, name)
        return node

    def _publish(self) -> None:
        """Write the records of prompts whose segments are all in the store. Raises BackendError."""
        with self._asking:
            for node_id in list(self._waiting):
                node = self._keeper.tree.get(node_id)
                segments = () if node is None else self._segments_of(node)
                if node is None or not segments:
                    self._waiting.pop(node_id, None)  # evicted, or not exact: others compute it themselves
                    continue
                new = [segment for segment in segments if segment.segment_id not in self._tier]
                if all(self._is_there(segment) for segment in segments):
                    self._publish_one(node, segments)
                if self._keeper.tree.get(node_id) is None:  # evicted meanwhile: delete what was written
                    orphans = [each for each in new if not self._is_known(each.segment_id)]
                    self._tier.drop(each.segment_id for each in orphans)
                    self._tier.remove(orphans)

    def _publish_one(self, node: Node, segments: Sequence[Segment]) -> None:
        """Write a record. Its name is noted before, so that a purge meanwhile deletes the record, too."""
        name = self._exchange.name_of(node.namespace, node.token_ids)
        self._names.remember(node.node_id, name)
        if self._keeper.tree.get(node.node_id) is None:
            self._names.forget(node.node_id)
            return
        prompt = SharedPrompt.of(node, segments, self._keeper.tenants.owner_of(node.namespace))
        self._exchange.publish(prompt)
        self._waiting.pop(node.node_id, None)

    def _segments_of(self, node: Node) -> Sequence[Segment]:
        """Return the segments of a node; none if it is not exact, or the store does not take them."""
        if node.exact_length < node.num_tokens:
            return ()
        try:
            segments = [self._keeper.tree.segment(entry) for entry in node.pieces.segment_ids]
        except UnknownSegmentError:
            return ()  # evicted meanwhile
        return segments if all(map(self._tier.takes, segments)) else ()

    def _is_known(self, segment_id: SegmentId) -> bool:
        try:
            self._keeper.tree.segment(segment_id)
        except UnknownSegmentError:
            return False
        return True

    def _is_there(self, segment: Segment) -> bool:
        if isinstance(self._below, DiskAndShared):
            return self._below.share_again(segment.segment_id)
        return segment.segment_id in self._tier

    def _note_purged(self, removed: Sequence[tuple[str, int]], freed: Collection[SegmentId]) -> None:
        """Note purged prompts for deletion, before the tier forgets the segments. In the writer's thread."""
        segments = tuple(self._tier.known(freed))
        names = [self._names.forget(NodeId(node_id)) for _, node_id in removed]
        self._purged += [(name, ()) for name in names if name is not None]
        if segments:
            self._purged.append((None, segments))

    def _delete_purged(self) -> None:
        """Delete purged prompts in the store. Raises BackendError; the next turn tries again."""
        with self._asking:
            while self._purged:
                name, segments = self._purged[0]
                if name is not None:
                    self._exchange.revoke([name])
                self._tier.remove(segments)
                self._purged.pop(0)

    def _forget_lost(self) -> None:
        """
        Handle a store that has lost its content, in the writer's thread: write again what memory has. Prompts
        that need the store are evicted when they are used.
        """
        log.warning("the shared store has lost its data: prompts whose KV was only there are computed again")
        self._tier.drop(segment.segment_id for segment in self._keeper.tree.segments())
        stack = self._keeper.tier
        if isinstance(stack, TierStack) and not isinstance(self._below, DiskAndShared):
            stack.write_again()
            for node in self._keeper.tree.nodes():
                if all(entry in stack for entry in node.pieces.segment_ids):
                    self.note(node)

    def _renew(self) -> None:
        """Renew the prompts that were used recently, this server's and others'. Raises BackendError."""
        keep_s = self._tier.store.keep_s
        if time.monotonic() - self._renewed_at < keep_s / _RENEWALS:
            return
        since = time.time() - 2 * keep_s / _RENEWALS
        keys = self._in_use(since)
        while batch := list(islice(keys, _BATCH)):
            self._tier.store.renew(batch)
        self._renewed_at = time.monotonic()

    def _in_use(self, since: float) -> Iterator[str]:
        for node_id, name in self._names.all():
            node = self._keeper.tree.get(node_id)
            if node is None:
                self._names.forget(node_id)
            elif node.last_used_at >= since:
                yield name
                for segment in self._tier.known(node.pieces.segment_ids):
                    yield self._tier.store.segment_key(segment)
