"""
What the replicas' journals mean for tree, index and tickets. The audience of the followers.

Everything that blocks runs in one thread, in the order of each journal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from delta_tree import Node, SegmentId
from kvshare.background import Background, Embedding
from kvshare.errors import UpstreamError
from kvshare.fleet.keeping import VllmKeeper
from kvshare.fleet.pending import Pending, PendingTickets
from kvshare.fleet.replica import Replica
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import Plan
from kvshare.vllm_protocol.messages import Dropped, Finished, JournalEvent
from vector_index import PromptRecord

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_ORPHAN_GRACE_S = 30.0  # a segment may be held some time before the event that tells of it


class Bookkeeper:
    """Keeps tree, index and pending tickets in step with what the replicas tell."""

    def __init__(self, sharing: Sharing, keeper: VllmKeeper, pending: PendingTickets) -> None:
        self._sharing = sharing
        self._keeper = keeper
        self._pending = pending
        self._counters = keeper.counters
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvshare-books")
        self._indexing = Background()
        self._embedding = Embedding()
        self._orphans: dict[str, tuple[float, frozenset[SegmentId]]] = {}  # by replica: due when, which

    async def close(self) -> None:
        """Let what is being indexed finish. Nothing may be told any more."""
        await self._indexing.settle()
        await self._embedding.settle()
        self._executor.shutdown()

    async def off_loop(self, function: Callable[..., _T], *arguments: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    async def on_contact(self, replica: Replica, held: Iterable[SegmentId], *, is_new: bool) -> None:
        if is_new:
            self._pending.forget_replica(replica.name)
        assert replica.info is not None, "told with the contact"
        self._sharing.cost.set_bytes_per_token(replica.info.bytes_per_token)
        can_move_keys = replica.info.can_move_keys  # all replicas serve one model
        self._sharing.limits = replace(self._sharing.limits, can_move_keys=can_move_keys)
        claimed = await self.off_loop(self._keeper.claim, replica.name, held)
        await self._sharing.forget_evicted()
        if claimed:
            log.info("replica %s still holds the KV of %d prompts", replica.name, len(claimed))
            await self._sharing.nominator.remember_all(_records(claimed))
        orphans = await self.off_loop(self._keeper.orphans, replica.name)
        self._orphans[replica.name] = (time.monotonic() + _ORPHAN_GRACE_S, orphans)

    async def on_event(self, replica: Replica, event: JournalEvent) -> None:
        if isinstance(event, Dropped):
            await self.off_loop(self._keeper.forget, event.segment_ids)
            await self._sharing.forget_evicted()
        else:
            await self._on_finished(replica, event)

    async def on_lost(self, replica: Replica) -> None:
        self._pending.forget_replica(replica.name)
        await self.off_loop(self._keeper.lose, replica.name)
        await self._sharing.forget_evicted()

    async def on_round(self, replica: Replica) -> None:
        """Expire tickets, and let the replica drop what nobody refers to."""
        self._counters["tickets:expired"] += self._pending.expire()
        due, orphans = self._orphans.get(replica.name, (0.0, frozenset()))
        if orphans and time.monotonic() >= due:
            del self._orphans[replica.name]
            await self.off_loop(self._keeper.drop_unreferenced, orphans)
        await self.send_drops(replica)

    async def send_drops(self, replica: Replica) -> None:
        """Tell a replica which of its segments nobody refers to any more."""
        if dropped := self._keeper.tier.take_dropped(replica.name):
            try:
                await replica.upstream.drop(dropped)
            except UpstreamError as exc:  # they are orphans over there, until the next contact or eviction
                log.debug("replica %s was not told of %d segments: %s", replica.name, len(dropped), exc)

    async def settle(self) -> None:
        """No more replicas are waited for: what nobody claimed of the last run's prompts is gone."""
        await self.off_loop(self._keeper.settle)
        await self._sharing.forget_evicted()

    async def _on_finished(self, replica: Replica, finished: Finished) -> None:
        pending = self._pending.take(finished.request_id, replica.name)
        if pending is None:
            self._counters["tickets:unknown"] += 1
            await self.off_loop(self._refuse, replica.name, finished)
            return
        self._count(pending, finished)
        try:
            node = await self.off_loop(self._keep, pending, finished)
        except BaseException:
            self._pending.settle(pending)
            raise
        if node is None:
            self._pending.settle(pending)
        else:
            self._indexing.spawn(self._remember(node, pending))

    def _keep(self, pending: Pending, finished: Finished) -> Node | None:
        return self._keeper.keep(
            pending.replica,
            finished,
            namespace=pending.ticket.namespace,
            prompt=pending.prompt,
            plan=pending.plan,
        )

    def _refuse(self, replica: str, finished: Finished) -> None:
        """Whose prompt these are is not known any more: they can never be found."""
        self._keeper.tier.add(replica, {entry.segment_id: entry.num_bytes for entry in finished.stored})
        self._keeper.drop_unreferenced(entry.segment_id for entry in finished.stored)

    async def _remember(self, node: Node, pending: Pending) -> None:
        try:
            await self._sharing.remember(node, None)
        finally:
            self._pending.settle(pending)
        self._embedding.begin(self._sharing, node, pending.text)

    def _count(self, pending: Pending, finished: Finished) -> None:
        """What was planned against what became of it, and what that tells about the rates."""
        planned = pending.plan.decision if isinstance(pending.plan, Plan) else "full"
        self._counters[f"executed:{planned}:{finished.decision}:{finished.reason or ''}"] += 1
        if planned != finished.decision:
            log.info(
                "request %s: planned %s, computed %s (%s)",
                finished.request_id,
                planned,
                finished.decision,
                finished.reason,
            )
        cost, num_tokens = self._sharing.cost, len(pending.prompt)
        is_full = finished.decision == "full" and not finished.num_local
        if is_full and pending.first_byte_s is not None and pending.was_alone:  # it waited for nobody
            cost.observe_prefill(num_tokens, pending.first_byte_s)
        used = [pending.ticket.copies[index] for index in _known(pending, finished)]
        num_copied = sum(copy.length for copy in used)
        if "pass" in finished.stage_seconds and used and not finished.num_local:
            # The tail behind the last copy is computed in vLLM's own pass, whose time is not known.
            num_passed = max(copy.target.end for copy in used) - num_copied
            cost.observe_prefill(num_passed, finished.stage_seconds["pass"])
        if "lay" in finished.stage_seconds:
            cost.observe_load(num_copied * cost.rates.bytes_per_token, finished.stage_seconds["lay"])


def _known(pending: Pending, finished: Finished) -> list[int]:
    return [index for index in finished.used if index < len(pending.ticket.copies)]


def _records(nodes: Iterable[Node]) -> Iterable[PromptRecord]:
    return (PromptRecord(int(node.node_id), node.namespace, node.token_ids) for node in nodes)
