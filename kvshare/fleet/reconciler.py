"""
Applies the replicas' journals to the tree, the index and the requests in flight.

Blocking work runs in the runtime's writer thread, in the order of each journal. Background tasks update the
index, which may be a slow server: no journal waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from delta_tree import Node, SegmentId
from kvshare.background import Background
from kvshare.errors import UpstreamError
from kvshare.fleet.in_flight import InFlight
from kvshare.fleet.known_disks import KnownDisks
from kvshare.fleet.observation import observe
from kvshare.fleet.orphans import Orphans
from kvshare.fleet.replica import Fleet, Replica
from kvshare.fleet.replica_keeper import ReplicaKeeper
from kvshare.fleet.routed_request import RoutedRequest
from kvshare.fleet.start_measurement import StartMeasurement, fingerprint_of
from kvshare.reasons import Reason
from kvshare.requests import Decision
from kvshare.runtime import Runtime
from kvshare.sharing.calibration import log_calibration
from kvshare.sharing.limits import ModelTraits
from kvshare.sharing.plan import Plan
from kvshare.telemetry import TicketEvent
from kvshare.vllm_protocol.messages import Dropped, FinishedReport, JournalEvent, Prefilled
from kvshare.vllm_protocol.places import DiskProblem, Moved, OnDiskOnly
from kvshare.vllm_protocol.replica_info import ReplicaInfo

log = logging.getLogger(__name__)


class Reconciler:
    """Called by the watchers. Calls for one replica are sequential, in the order of its journal."""

    def __init__(
        self,
        runtime: Runtime[ReplicaKeeper],
        fleet: Fleet,
        in_flight: InFlight,
        measurement: StartMeasurement,
        disks: KnownDisks,
    ) -> None:
        self._runtime = runtime
        self._sharing = runtime.sharing
        self._keeper = runtime.keeper
        self._in_flight = in_flight
        self._measurement = measurement
        self._disks = disks
        self._control = runtime.control
        self._fingerprint: str | None = None  # of the model whose calibration is used
        self._orphans = Orphans(runtime)
        self._replicas = {replica.name: replica for replica in fleet.replicas}
        self._loop = asyncio.get_running_loop()
        self.sending = Background()  # drops
        self._is_closed = False
        self._keeper.tier.call_on_drop(self._on_drop)

    async def close(self) -> None:
        """
        Called after all watchers have stopped. The next run sends the drops that were not sent; until then a
        store keeps the segments that they name, at most until these expire.
        """
        self._is_closed = True
        self._keeper.tier.call_on_drop(None)
        await self.sending.cancel()

    async def resync(
        self,
        replica: Replica,
        held: Iterable[SegmentId],
        *,
        on_disk: Iterable[SegmentId] = (),
        is_new: bool,
    ) -> None:
        """
        Bring tree and index in line with what the connector holds: exactly these segments, some of them on
        disk only. `is_new`: its process was restarted.
        """
        replica.in_blocks.clear()
        if is_new:
            self._in_flight.forget_replica(replica.name)
        info = replica.info
        assert info is not None, "known with the connection"
        if info.shares:
            self._use_model_of(info)
        await asyncio.to_thread(self._disks.note, replica.name, has_disk=bool(info.max_disk_bytes))
        if info.max_disk_bytes:
            self._sharing.cost.know_disk()
        self._keeper.tier.note_places(replica.name, on_disk=on_disk, in_memory=held)
        claim = partial(self._keeper.claim, is_listing=info.is_listing)
        claimed = await self._runtime.evict(claim, replica.name, held, info.budget_bytes)
        if claimed:
            log.info("replica %s still holds the KV of %d prompts", replica.name, len(claimed))
            await self._sharing.indexing.remember_all(claimed)
        self._orphans.begin(replica.name, held)
        if info.shares:
            await self._know_costs()

    async def _know_costs(self) -> None:
        """Load the kept costs of the first sharing replica in the settings: there is one cost model."""
        known = self._sharing_infos()[0]
        await asyncio.to_thread(self._runtime.kept_costs.use, fingerprint_of(known))
        self._measurement.want()

    def _use_model_of(self, info: ReplicaInfo) -> None:
        """Use the replicas' common model. Plans have only what all sharing replicas can carry out."""
        infos = self._sharing_infos()
        model = ModelTraits(
            info.fingerprint,
            can_move_keys=all(one.can_move_keys for one in infos),
            can_probe=all(one.can_choose for one in infos),
            has_eight_bits=any(one.has_eight_bits for one in infos),
        )
        self._sharing.use_model(model, bytes_per_token=info.bytes_per_token)
        if info.fingerprint != self._fingerprint:
            self._fingerprint = info.fingerprint
            log_calibration(self._sharing.limits.calibration, info.fingerprint)

    def _sharing_infos(self) -> list[ReplicaInfo]:
        """Return the infos of the replicas that share, in the order of the settings."""
        infos = (each.info for each in self._replicas.values())
        return [info for info in infos if info is not None and info.shares]

    async def apply(self, replica: Replica, event: JournalEvent) -> None:
        if isinstance(event, Moved):
            replica.note_places(event)
        elif isinstance(event, OnDiskOnly):
            if event.num_bytes:
                await self._adopt(replica, dict(zip(event.came, event.num_bytes, strict=True)))
            self._keeper.tier.note_places(replica.name, on_disk=event.came, in_memory=event.left)
        elif isinstance(event, DiskProblem):
            replica.note_disk(event)
        elif isinstance(event, Dropped):
            replica.note_places(event)
            await self._runtime.write(self._keeper.forget, event.segment_ids, replica.name)
            self._update_index(self._forget_evicted())
        elif self._measurement.own_requests.take(event):
            return
        elif isinstance(event, Prefilled):
            await self._on_prefilled(replica, event)
        else:
            await self._on_finished(replica, event)

    async def evict_replica(self, replica: Replica) -> str:
        """
        Evict all prompts of a replica that has been silent for too long. Prompts stay that are on its disk,
        or may be in its store: it will report what is still there. So do those that another replica has found
        in this store.

        Returns: what happens to its prompts, in words
        """
        self._in_flight.forget_replica(replica.name)
        if replica.info is not None and replica.info.has_own_disk:
            return "its prompts stay, as it has a disk"
        if replica.info is not None and replica.info.max_disk_bytes and not self._has_partner(replica):
            return "its prompts stay, as they may be in its store"
        what = "its prompts are evicted"
        if self._has_partner(replica):
            what += " but for those that another replica has found in their store"
        await self._runtime.write(self._keeper.lose, replica.name)
        self._update_index(self._forget_evicted())
        return what

    async def _adopt(self, replica: Replica, num_bytes: Mapping[SegmentId, int]) -> None:
        """Take in segments found in a store, by bytes: prompts of the last run may be whole now."""
        self._orphans.note(replica.name, num_bytes)
        claimed = await self._runtime.evict(self._keeper.adopt, replica.name, num_bytes)
        if claimed:
            await self._sharing.indexing.remember_all(claimed)

    def _has_partner(self, replica: Replica) -> bool:
        others = (each for each in self._replicas.values() if each is not replica and each.is_connected)
        return replica.shares_store and any(each.holder == replica.holder for each in others)

    async def tidy(self, replica: Replica) -> None:
        self._keeper.telemetry.ticket(TicketEvent.EXPIRED, self._in_flight.expire())
        await self._orphans.tidy(replica.name)
        await self.send_drops(replica)

    async def send_drops(self, replica: Replica) -> None:
        """Tell a replica to drop the segments that no prompt uses any more."""
        tier, name = self._keeper.tier, replica.name
        for take, again, stays_shared in (
            (tier.take_dropped, tier.drop_again, False),
            (tier.take_orphans, tier.orphans_again, True),
        ):
            if dropped := take(name):
                try:
                    await replica.control.drop(dropped, stays_shared=stays_shared)
                except UpstreamError as exc:
                    again(name, dropped)
                    log.debug("replica %s: %d drops are sent later: %s", name, len(dropped), exc)

    async def _on_prefilled(self, replica: Replica, prefilled: Prefilled) -> None:
        """Store and index a prompt, without an embedding: that is computed once, with the answer."""
        request = self._in_flight.find(prefilled.ticket_id, replica.name)
        if request is None:  # its `FinishedReport` event is unknown as well
            await self._runtime.write(self._keeper.drop_reported, replica.name, prefilled)
            return
        request.note_prefilled()
        node = None
        try:
            held = self._in_flight.donors()
            node = await self._runtime.write(self._keeper.store_prompt, request, prefilled, held)
        finally:
            if node is None:
                self._in_flight.end_arrival(request)
        self._update_index(self._forget_evicted() if node is None else self._remember_prompt(node, request))

    async def _remember_prompt(self, node: Node, request: RoutedRequest) -> None:
        try:
            await self._sharing.indexing.remember(node, None)
        finally:
            self._in_flight.end_arrival(request, stored=True)

    async def _on_finished(self, replica: Replica, finished: FinishedReport) -> None:
        request = self._in_flight.take(finished.ticket_id, replica.name)
        if request is None:
            self._keeper.telemetry.ticket(TicketEvent.UNKNOWN)
            await self._runtime.write(self._keeper.drop_reported, replica.name, finished)
            return
        routed, prompt = request.routed, request.incoming.prompt
        assert routed.ticket is not None, "found by its ticket"
        assert prompt is not None, "it has a ticket"
        request.execution.finished = replace(finished, used=(), output_ids=(), stored=(), repaired=())
        self._count(request, finished)
        node = None
        try:
            held = self._in_flight.donors()
            node = await self._runtime.write(self._keeper.store, request, finished, held)
            known = (routed.ticket.namespace, prompt.token_ids, routed.plan)
            found = node or await self._runtime.write(self._keeper.find_stored, *known)
            request.execution.stored.node = None if found is None else int(found.node_id)
        finally:
            if node is None:
                self._in_flight.forget(request)
        self._update_index(self._forget_evicted() if node is None else self._remember(node, request))

    async def _remember(self, node: Node, request: RoutedRequest) -> None:
        prompt = request.incoming.prompt
        assert prompt is not None, "it had a ticket"
        try:
            if node.num_tokens >= prompt.num_tokens:
                await self._runtime.remember(node, prompt.text)
            else:  # shortened: the embedding of the whole text does not fit its beginning
                await self._sharing.indexing.remember(node, None)
        finally:
            self._in_flight.end_arrival(request, stored=True)  # not yet, if `_remember_prompt` still runs
            self._in_flight.forget(request)

    async def _forget_evicted(self) -> None:
        await self._sharing.indexing.forget_evicted()

    def _update_index(self, update: Coroutine[Any, Any, None]) -> None:
        self._runtime.background.spawn(update)

    def _on_drop(self, name: str) -> None:
        """Called from any thread: this replica holds segments that no prompt uses any more."""
        self._loop.call_soon_threadsafe(self._send_soon, self._replicas[name])

    def _send_soon(self, replica: Replica) -> None:
        if not self._is_closed:
            self.sending.spawn(self.send_drops(replica))

    def _count(self, request: RoutedRequest, finished: FinishedReport) -> None:
        """Count the planned and the actual decision, and update the cost rates from the measured times."""
        plan = request.routed.plan
        planned = plan.decision if isinstance(plan, Plan) else Decision.FULL
        reason = None if finished.reason is None else Reason.of(finished.reason)
        done, stages = Decision(finished.decision), finished.stage_seconds
        if request.is_only_compared:  # what vLLM had of it in its own prefix cache was not planned
            done = Decision.FULL
        else:
            self._keeper.telemetry.executed(planned, done, reason, stages)
            self._log_if_otherwise(request, planned, finished)
        if finished.num_answer_steps:
            steps, tokens = finished.num_answer_steps, finished.num_answer_tokens
            self._keeper.telemetry.answered(done, num_steps=steps, num_tokens=tokens)
            self._control.note_steps(request.treatment, tokens, steps)
        observe(self._sharing.cost, request.routed, request.progress, finished)

    @staticmethod
    def _log_if_otherwise(request: RoutedRequest, planned: Decision, finished: FinishedReport) -> None:
        if planned != finished.decision or finished.reason is not None:
            log.info(
                "request id=%s: planned %s, carried out as %s with %d tokens computed: %s",
                *(request.incoming.unique_id, planned, finished.decision),
                *(finished.num_computed, finished.reason),
            )
