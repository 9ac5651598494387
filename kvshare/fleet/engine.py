"""
The vLLM engine: plans for replicas that compute. Knows which of them holds what, and sends requests there.

    dispatch  tokens + owner -> replica, ticket, salt, in `dispatcher`     before the request is sent
    running   counts it as in flight, and remembers what its ticket was    while its answer is relayed
    journals  tell what really happened, in `bookkeeping`                  afterwards

HTTP is `proxy/relay`'s business.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from typing import Any

from delta_tree import DeltaTree
from kvshare.background import Background
from kvshare.engines.base import Engine, EngineStatus, ModelCard
from kvshare.errors import ConfigError, NoReplicaError, RequestError
from kvshare.fleet.bookkeeping import Bookkeeper
from kvshare.fleet.dispatch import Dispatch, Flight, Order
from kvshare.fleet.dispatcher import Dispatcher
from kvshare.fleet.fleet import Fleet
from kvshare.fleet.follower import WatchTimes
from kvshare.fleet.keeping import VllmKeeper
from kvshare.fleet.pending import PendingTickets
from kvshare.fleet.replica import Replica
from kvshare.fleet.routing import LoadLimits
from kvshare.fleet.tier import ReplicaTier
from kvshare.fleet.upstream import Upstream
from kvshare.index_factory import ServedIndex
from kvshare.inspection import QUESTIONS
from kvshare.metadata import open_tree
from kvshare.settings import ReplicaSettings, Settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.planner import PlannerLimits
from kvshare.vllm_protocol.messages import PROTOCOL

log = logging.getLogger(__name__)

IDENTITY = f"vllm:{PROTOCOL}"  # of the store
_FIRST_ANSWERS_S = 3.0  # the start waits so long to know which replicas are up


class VllmEngine(Engine):
    """One model, served by one or several `vllm serve` with our connector."""

    def __init__(self, settings: Settings, connect: Callable[[ReplicaSettings], Upstream]) -> None:
        """Raises ConfigError if there are no replicas, or two of one name."""
        chosen = settings.vllm
        names = [replica.label for replica in chosen.replicas]
        if not names:
            raise ConfigError("vllm.replicas", "expected at least one; `kvshare serve --vllm-url URL`")
        if len(set(names)) != len(names):
            raise ConfigError("vllm.replicas", f"two of them are named alike: {', '.join(sorted(names))}")
        self._settings = settings
        self._created = int(time.time())
        self._limits = LoadLimits(chosen.max_inflight, chosen.max_imbalance)
        times = WatchTimes(chosen.health_interval_s, chosen.journal_wait_s, chosen.lost_after_s)
        self.fleet = Fleet([Replica(entry.label, connect(entry)) for entry in chosen.replicas], times)
        self._pending = PendingTickets(expiry_s=chosen.ticket_expiry_s)
        self._background = Background()
        self._running = False

    @property
    def card(self) -> ModelCard:
        models = self.fleet.models
        return ModelCard(
            models.names[0] if models is not None and models.names else "unknown until a replica answers",
            self._created,
            self.fleet.max_model_len,
        )

    @property
    def sharing(self) -> Sharing:
        """For tests: what this engine shares with."""
        return self._sharing

    async def start(self) -> None:
        async with AsyncExitStack() as opened:
            await self._open(opened)
            self._running = True
            self._opened = opened.pop_all()
        if not await self.fleet.all_answered(timeout_s=_FIRST_ANSWERS_S) or not self.fleet.serving():
            log.warning("not ready: no replica answers yet; they are asked on and on")
        self._background.spawn(self._settle_store())

    async def stop(self) -> None:
        if self._running:
            self._running = False
            await self._opened.aclose()

    async def dispatch(self, order: Order) -> Dispatch:
        """Plan a request and choose its replica. Raises NoReplicaError."""
        return await self._dispatcher.dispatch(order)

    def running(self, dispatch: Dispatch) -> AbstractContextManager[Flight]:
        """Counts the request at its replica, while inside; the relay notes there what it sees."""
        return self._dispatcher.running(dispatch)

    async def explain(self, order: Order) -> dict[str, Any]:
        """The plan this request would get, and where; a JSON-ready document. Nothing is sent."""
        return await self._dispatcher.explain(order)

    def note_unreachable(self, replica: Replica) -> None:
        """A request did not get through: no more are sent there until vLLM answers again."""
        replica.models = None
        self._sharing.counters[f"fallback:replica:{replica.name}"] += 1

    def note_unshared(self, reason: str) -> None:
        """A request that cannot be planned, and why."""
        self._sharing.counters[f"unshared:{reason}"] += 1

    async def tokenize(self, body: Mapping[str, Any]) -> list[int]:
        """By vLLM's own template and tokenizer. Raises NoReplicaError, UpstreamError."""
        serving = self.fleet.serving()
        if not serving:
            raise NoReplicaError
        return await serving[0].upstream.tokenize(body)

    def status(self) -> EngineStatus:
        serving, sharing = self.fleet.serving(), self.fleet.sharing()
        if not self._running:
            return EngineStatus(False, "starting or stopped", 0, 0, 0, 0, 0, 0, 0)
        stats = self._tree.stats()
        infos = [replica.info for replica in self.fleet.replicas if replica.info is not None]
        return EngineStatus(
            ready=bool(serving),
            detail=f"{len(serving)} of {len(self.fleet.replicas)} replicas serve, {len(sharing)} share",
            num_running=sum(replica.num_inflight for replica in self.fleet.replicas),
            num_waiting=0,
            num_nodes=stats.num_nodes,
            num_segments=stats.num_segments,
            kv_bytes=self._tier.num_bytes,
            kv_budget_bytes=sum(info.max_bytes for info in infos),
            max_depth=stats.max_depth,
            counters={**self._sharing.counters, "tickets:pending": len(self._pending)},
            replicas=tuple(replica.status(self._tier) for replica in self.fleet.replicas),
            index=self._index.status(),
        )

    async def inspect(self, what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        question = QUESTIONS.get(what)
        if question is None:
            raise RequestError(f"unknown question {what!r}; expected one of: {', '.join(sorted(QUESTIONS))}")
        answer = await self._books.off_loop(self._keeper.ask, question, arguments)
        await self._sharing.forget_evicted()
        document: dict[str, Any] = answer.document
        return document

    async def _open(self, opened: AsyncExitStack) -> None:
        """Open one part after the other; `opened` closes them in reverse, also where a later one fails."""
        settings = self._settings
        self._loop = asyncio.get_running_loop()
        self._tree = await asyncio.to_thread(self._open_tree)
        opened.callback(self._tree.close)
        self._index = ServedIndex(settings.index, settings.store)
        nominator = await self._index.open(())
        opened.push_async_callback(self._index.close)
        self._tier = ReplicaTier(self._on_drop)
        self._keeper = await asyncio.to_thread(
            lambda: VllmKeeper(self._tree, self._tier, min_tokens=settings.sharing.min_prompt_tokens)
        )
        self._sharing = Sharing(
            keeper=self._keeper,
            nominator=nominator,
            limits=PlannerLimits.from_settings(settings),
            cost=CostModel.from_settings(settings.cost, bytes_per_token=0),
            owns_index=settings.index.backend != "server",
        )
        opened.callback(self._sharing.close)
        self._dispatcher = Dispatcher(self._sharing, self.fleet, self._pending, self._limits)
        self._books = Bookkeeper(self._sharing, self._keeper, self._pending)
        opened.push_async_callback(self._books.close)
        opened.push_async_callback(self._background.cancel)
        opened.push_async_callback(self.fleet.stop)
        await self.fleet.watch(self._books)

    def _open_tree(self) -> DeltaTree:
        """What the last run knew; namespaces say which model and replica each prompt belongs to."""
        loss = "KV of earlier prompts that replicas still hold is given up; they are computed again"
        return open_tree(self._settings.store.path, identity=IDENTITY, loss=loss)

    async def _settle_store(self) -> None:
        """Wait for all replicas, but not forever; then let go of what none of them holds."""
        await self.fleet.all_heard(timeout_s=self._settings.vllm.lost_after_s)
        await self._books.settle()

    def _on_drop(self, name: str) -> None:
        """From any thread: the tree let go of segments that a replica still holds."""
        replica = next(entry for entry in self.fleet.replicas if entry.name == name)
        if self._running:
            self._loop.call_soon_threadsafe(
                lambda: self._background.spawn(self._books.send_drops(replica)) if self._running else None
            )
