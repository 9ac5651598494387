"""
The fleet as an engine: starts and stops its parts, reports their status, answers administrators.

    router       chooses replica, ticket and salt of a request       before it is sent
    watchers     watch the health and the journal of each replica    all the time
    reconciler   applies journal events to tree and index            as they are reported
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from delta_tree import DeltaTree
from kvshare.addresses import is_own
from kvshare.background import Background
from kvshare.errors import ConfigError
from kvshare.fleet.client import ControlClient, ServedModels, VllmClient
from kvshare.fleet.format_guard import FormatGuard
from kvshare.fleet.in_flight import InFlight
from kvshare.fleet.known_disks import KnownDisks
from kvshare.fleet.reconciler import Reconciler
from kvshare.fleet.remote_tier import RemoteTier
from kvshare.fleet.rendering import Renderer
from kvshare.fleet.replica import Fleet, Replica
from kvshare.fleet.replica_keeper import ReplicaKeeper
from kvshare.fleet.routed_request import Incoming
from kvshare.fleet.router import Router
from kvshare.fleet.start_measurement import StartMeasurement
from kvshare.fleet.watcher import Watcher
from kvshare.metadata import open_tree
from kvshare.namespace import Owner
from kvshare.runtime import Forgotten, Runtime, ServedEngine, open_runtime
from kvshare.settings import ReplicaSettings, Settings, VllmSettings
from kvshare.sharing.arrivals import Arrivals
from kvshare.sharing.cost import CostModel
from kvshare.sharing.explain import explain_lookup
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.rates import BLOCKS, MEMORY
from kvshare.status import EngineStatus, ModelCard, ReplicaStatus
from kvshare.tenants import Tenants
from kvshare.vllm_protocol.messages import PROTOCOL
from kvshare.vllm_protocol.places import READ_PARTS

log = logging.getLogger(__name__)

IDENTITY = f"vllm:{PROTOCOL}"  # of the metadata store
_FIRST_ANSWERS_S = 3.0  # how long the start waits for the first answers of the replicas


@dataclass(frozen=True, slots=True, eq=False)
class FleetServer:
    """The parts that are open between start and stop."""

    runtime: Runtime[ReplicaKeeper]
    in_flight: InFlight
    renderer: Renderer
    router: Router
    reconciler: Reconciler
    watchers: Sequence[Watcher]
    measurement: StartMeasurement
    formats: FormatGuard
    disks: KnownDisks


class VllmEngine(ServedEngine[FleetServer]):
    """One model, served by one or more `vllm serve` with the KVShare connector."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError if there are no replicas, or two with the same name."""
        super().__init__()
        chosen = settings.vllm
        ranks = [rank for replica in chosen.replicas for rank in replica.ranks]
        names = [rank.label for rank in ranks]
        if not names:
            raise ConfigError("vllm.replicas", "expected at least one; add it, or give --vllm-url URL")
        if len(set(names)) != len(names):
            raise ConfigError("vllm.replicas", f"two of them are named alike: {', '.join(sorted(names))}")
        _refuse_own_address(settings)
        if settings.shared_tier.url is not None:
            raise ConfigError(
                "shared_tier.url",
                "it is a setting of the embedded engine, and the proxy reads no KV; expected null here. Give "
                "the store to each vLLM: kvshare vllm MODEL --shared-tier URL",
            )
        self._settings = settings
        self._created = int(time.time())
        self.fleet = Fleet(_replicas(chosen))
        self._background = Background()

    @property
    def card(self) -> ModelCard:
        models = self.fleet.models or ServedModels(())
        name = models.names[0] if models.names else "unknown until a replica answers"
        return ModelCard(name, self._created, models.max_model_len)

    async def start(self) -> None:
        server = await self._opened.enter_async_context(
            _open_server(self._settings, self.fleet, self.tenants)
        )
        self._running = server
        answers = [event for entry in server.watchers for event in (entry.asked_vllm, entry.asked_connector)]
        await _all_within(_FIRST_ANSWERS_S, answers)
        if not self.fleet.serving():
            log.warning("not ready: no replica serves yet; check vllm.replicas, this server keeps asking")
        self._background.spawn(self._evict_unclaimed(server))

    async def stop(self) -> None:
        self._running = None
        await self._background.cancel()
        await super().stop()

    async def settle(self) -> None:
        """Wait, in tests, until all reports are stored, indexed and embedded, and all drops are sent."""
        await self.server.runtime.settle()
        await self.server.reconciler.sending.settle()

    def digests_of(self, owner: Owner) -> Collection[str]:
        return {each.namespace(owner).digest for each in self.fleet.replicas if each.info is not None}

    async def explain(self, incoming: Incoming) -> dict[str, Any]:
        """Return the plan and the replica that this request would get; JSON-ready. Nothing is sent."""
        assert incoming.prompt is not None, "only tokenized requests can be explained"
        route = await self.server.router.find(incoming)
        document = await asyncio.to_thread(
            explain_lookup, self.sharing, incoming.prompt, route.lookup, incoming.mode
        )
        return {**document, "replica": None if route.replica is None else route.replica.name}

    def status(self) -> EngineStatus:
        if self._running is None:
            return EngineStatus(False, "starting or stopped")
        runtime, replicas = self._running.runtime, self.fleet.replicas
        serving, sharing = self.fleet.serving(), self.fleet.sharing()
        status = runtime.status()
        return replace(
            status,
            parts=(*(part for replica in replicas for part in replica.readings()), *status.parts),
            ready=bool(serving),
            detail=f"{len(serving)} of {len(replicas)} replicas serve, {len(sharing)} share",
            num_running=sum(replica.num_inflight for replica in replicas),
            kv_budget_bytes=sum(each.info.most_bytes for each in replicas if each.info is not None),
            num_pending_tickets=len(self._running.in_flight),
            replicas=tuple(_status(replica, runtime.keeper.tier) for replica in replicas),
        )

    async def _evict_unclaimed(self, server: FleetServer) -> None:
        """
        Wait until all replicas have said what they hold, at most `lost_after_s`, but for those that had a
        disk or a store as long as it takes; then evict prompts whose KV no replica holds.
        """
        connections = {watcher.name: watcher.has_listed for watcher in server.watchers}
        await _all_within(self._settings.vllm.lost_after_s, [*connections.values()])
        silent = [
            name for name in sorted(server.disks.names & connections.keys()) if not connections[name].is_set()
        ]
        if silent:
            log.warning(
                "waiting for replica %s, which had KV on a disk or in a store: until it has reported all "
                "that is there, prompts whose KV no replica holds stay. Start that vLLM, or remove it from "
                "vllm.replicas",
                ", ".join(silent),
            )
        await _all_within(math.inf, [connections[name] for name in silent])
        await server.runtime.evict(server.runtime.keeper.evict_unclaimed)


def _refuse_own_address(settings: Settings) -> None:
    """
    Raises ConfigError where a replica's address is that of this server, as far as addresses tell.

    What they do not tell, as through another machine's port, the first answer does: `WrongServerError`.
    """
    server = settings.server
    ports = {port for port in (server.port, server.admin_port) if port}
    for number, replica in enumerate(settings.vllm.replicas):
        at = f"vllm.replicas.{number}"
        if is_own(replica.url, server.host, ports):
            raise ConfigError(
                f"{at}.url",
                f"{replica.url} is this server itself; expected the address of a vLLM (--vllm-url)",
            )
        for rank in replica.ranks:
            if is_own(rank.control, server.host, ports):
                which = "" if replica.control_url else ", the port after vLLM's, as no other is given,"
                raise ConfigError(
                    f"{at}.control_url",
                    f"{rank.control}{which} is this server itself; expected the address that `kvshare vllm` "
                    "says its connector answers on (--vllm-control-url), or set another server.port (--port)",
                )


@asynccontextmanager
async def _open_server(settings: Settings, fleet: Fleet, tenants: Tenants) -> AsyncIterator[FleetServer]:
    """Open the parts in order. They are closed in reverse order, also if a later part fails to open."""

    chosen = settings.vllm
    async with AsyncExitStack() as opened:
        runtime = await opened.enter_async_context(_runtime(settings, fleet, tenants))
        for replica in fleet.replicas:
            await opened.enter_async_context(replica.vllm)
            await opened.enter_async_context(replica.control)
        in_flight = InFlight(Arrivals(min_run=settings.sharing.min_run), expiry_s=chosen.ticket_expiry_s)
        router = Router(runtime.sharing, runtime.control, fleet, in_flight, chosen, tier=runtime.keeper.tier)
        measurement = StartMeasurement(runtime, fleet, is_on=settings.cost.measure_at_start)
        disks = await asyncio.to_thread(KnownDisks, settings.store.path)
        reconciler = Reconciler(runtime, fleet, in_flight, measurement, disks)
        opened.push_async_callback(reconciler.close)
        watchers = [Watcher(replica, fleet, reconciler, chosen) for replica in fleet.replicas]
        watching = Background()
        opened.push_async_callback(watching.cancel)
        watching.spawn(measurement.run())
        for watcher in watchers:
            watching.spawn(watcher.watch_health())
            watching.spawn(watcher.watch_journal())
        formats = FormatGuard(fleet)
        opened.callback(formats.close)
        yield FleetServer(
            runtime, in_flight, Renderer(fleet), router, reconciler, watchers, measurement, formats, disks
        )


def _runtime(
    settings: Settings, fleet: Fleet, tenants: Tenants
) -> AbstractAsyncContextManager[Runtime[ReplicaKeeper]]:
    def new_tree() -> tuple[DeltaTree, Forgotten]:
        """Return the prompts of the last run. Their namespaces contain model and replica."""
        loss = "KV of earlier prompts in the replicas is dropped, and such prompts are computed again"
        return open_tree(settings.store.path, identity=IDENTITY, loss=loss), ()

    def new_keeper(tree: DeltaTree) -> ReplicaKeeper:
        tier = RemoteTier(replica.name for replica in fleet.replicas)
        return ReplicaKeeper(tree, tier, min_tokens=settings.sharing.min_prompt_tokens)

    return open_runtime(
        settings,
        open_tree=new_tree,
        new_keeper=new_keeper,
        identity=IDENTITY,
        # The model is known once a replica is connected.
        limits=PlannerLimits.from_settings(settings, can_probe=True),
        # An approximate plan has a pass of the connector before that of vLLM.
        cost=CostModel.from_settings(
            settings.cost,
            bytes_per_token=0,
            num_extra_passes=1,
            computes_ahead=True,
            read_parts=READ_PARTS,
            places=(MEMORY, BLOCKS),
        ),
        tenants=tenants,
    )


async def _all_within(timeout_s: float, events: Sequence[asyncio.Event]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(None if math.isinf(timeout_s) else timeout_s):
            for event in events:
                await event.wait()


def _replicas(settings: VllmSettings) -> list[Replica]:
    """Make the replicas. One without a name gets a number as its public name, as its label is its address."""
    return [
        _replica(rank, settings, f"{entry.name or number}{rank.label.removeprefix(entry.label)}")
        for number, entry in enumerate(settings.replicas, start=1)
        for rank in entry.ranks
    ]


def _replica(entry: ReplicaSettings, settings: VllmSettings, public_name: str) -> Replica:
    control = ControlClient(entry.control, timeout_s=settings.control_timeout_s, proxy=secrets.token_hex(8))
    return Replica(entry.label, VllmClient(entry.url, settings), control, public_name=public_name)


def _status(replica: Replica, tier: RemoteTier) -> ReplicaStatus:
    memory = tier.memories[replica.name]
    return ReplicaStatus(
        name=replica.name,
        serves=replica.serves,
        shares=replica.shares,
        num_inflight=replica.num_inflight,
        num_segments=len(memory.segments),
        kv_bytes=memory.num_bytes,
    )
