"""
The base of both engines: the open parts of a running server (store, index, planner, tasks after
answers), and the base class that opens and closes them.

Only the writer thread changes the tree: it stores prompts, records uses, evicts, and answers administrators,
in order of arrival. The event loop never blocks on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, TypeVarTuple, cast

from delta_tree import EVICTION_QUEUES, DeltaTree, Node
from kvshare.admin import (
    Command,
    ControlDocument,
    DiffDocument,
    DiffQuestion,
    EvictionDocument,
    NodeDocument,
    NodeQuestion,
    PinDocument,
    ServerStats,
    StatsQuestion,
    StoreQuestion,
    TierDocument,
    TreeDocument,
    TreeQuestion,
)
from kvshare.background import Background, EmbeddingBacklog, repeated, saved_often
from kvshare.engine import Engine
from kvshare.errors import ShuttingDownError
from kvshare.kept_tree import KeptTree
from kvshare.part_problems import PartProblem
from kvshare.parts import PartReading, ServedPart
from kvshare.served_index import ServedIndex
from kvshare.settings import Settings
from kvshare.sharing.control import Controller
from kvshare.sharing.cost import CostModel
from kvshare.sharing.keeper import PromptKeeper
from kvshare.sharing.kept_costs import KeptCosts
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.tenant_budget import bytes_by_tenant, group_tenants
from kvshare.status import EngineStatus
from kvshare.telemetry import Component, FallbackReason
from kvshare.tenants import Tenants
from vector_index import PromptText

_T = TypeVar("_T")
_Arguments = TypeVarTuple("_Arguments")
KeeperT = TypeVar("KeeperT", bound=PromptKeeper[Any])

_LOOK_EVERY_S = 5.0  # whether what could not be written can be now
_KEPT_S = 60.0  # so often what was measured is written, if there is anything new

Forgotten = Sequence[tuple[str, int]]  # namespaces and node ids


@dataclass(frozen=True, slots=True, eq=False)
class Runtime(Generic[KeeperT]):
    """
    `keeper` writes the tree, `sharing` makes plans, `index` nominates candidates, `control` reduces what does
    not pay.
    """

    keeper: KeeperT
    index: ServedIndex
    sharing: Sharing
    control: Controller
    writer: ThreadPoolExecutor
    background: Background  # stores and indexes prompts and answers
    embedding: EmbeddingBacklog  # indexes stored prompts by embedding
    kept_costs: KeptCosts  # the engine says of which machine and model
    kept_tree: KeptTree

    async def write(self, function: Callable[[*_Arguments], _T], *arguments: *_Arguments) -> _T:
        """Call a function that changes tree or tier in the writer thread. Does not update the index."""
        return await asyncio.get_running_loop().run_in_executor(self.writer, function, *arguments)

    async def evict(self, function: Callable[[*_Arguments], _T], *arguments: *_Arguments) -> _T:
        """Return the same for a function that evicts prompts; then remove those from the index."""
        result = await self.write(function, *arguments)
        await self.sharing.indexing.forget_evicted()
        return result

    async def remember(self, node: Node, text: PromptText) -> None:
        """Index a new node by its tokens now, and by embedding later unless embedding lags behind."""
        await self.sharing.indexing.remember(node, None)
        if self.embedding.has_room():
            self.embedding.spawn(self.sharing.indexing.remember(node, text))
        else:
            self.sharing.telemetry.fallback(Component.EMBEDDER, FallbackReason.BACKLOG)

    async def index_stored(self) -> None:
        """Index what the store had at the start, without embeddings; what was used last comes first."""
        nodes = sorted(self.sharing.tree.nodes(), key=lambda node: -node.last_used_at)
        await self.sharing.indexing.remember_all(nodes)

    async def ask(self, question: StoreQuestion[_T]) -> _T:
        """Answer an administrator's question in the writer thread: nothing changes meanwhile."""
        return await self.write(question.answer, self.sharing.tree, self.keeper.tenants)

    async def stats(self, question: StatsQuestion) -> ServerStats:
        stored = await self.ask(question)
        pins = await self.write(self.keeper.pins)
        control = cast(ControlDocument, asdict(self.control.status()))
        tiers = [cast(TierDocument, asdict(tier)) for tier in self.keeper.tiers()]
        costs = self.sharing.costs()
        return {**stored, "costs": costs, "control": control, "pins": pins, "tiers": tiers}

    def status(self) -> EngineStatus:
        """Return what is stored, in constant time, without a lock. The engine adds the running requests."""
        stats = self.sharing.tree.stats()
        return EngineStatus(
            ready=True,
            detail="ok",
            num_nodes=stats.num_nodes,
            num_segments=stats.num_segments,
            kv_bytes=self.keeper.tier.num_bytes,
            max_depth=stats.max_depth,
            counts=self.sharing.telemetry.counts(),
            num_embedding=len(self.embedding),
            index=self.index.status(),
            control=self.control.status(),
            tiers=self.keeper.tiers(),
            parts=tuple(self._parts()),
            tenant_bytes=partial(bytes_by_tenant, self.sharing.tree),
        )

    def _parts(self) -> Iterator[PartReading]:
        """Yield the states of the parts that requests can do without, except those that the engine adds."""
        yield from self.index.parts()
        if self.index.embedder is not None:
            is_full = self.embedding.is_behind
            yield PartReading(ServedPart.BACKLOG, PartProblem.BACKLOG_FULL if is_full else None)
        yield self.kept_tree.reading(self.keeper.problem)
        yield from (tier.reading() for tier in self.keeper.tiers() if tier.name == "disk")
        yield self.control.status().reading()
        for part, problem, cause in (
            (ServedPart.COSTS, PartProblem.COSTS_NOT_WRITTEN, self.kept_costs.problem),
            (ServedPart.TENANTS, PartProblem.TENANTS_NOT_WRITTEN, self.keeper.tenants.problem),
        ):
            yield PartReading(part, None if cause is None else problem, cause or "")

    async def settle(self) -> None:
        """Wait until all finished requests are stored and indexed."""
        await self.background.settle()
        await self.embedding.settle()


@asynccontextmanager
async def open_runtime(
    settings: Settings,
    *,
    open_tree: Callable[[], tuple[DeltaTree, Forgotten]],
    new_keeper: Callable[[DeltaTree], KeeperT],
    identity: str,
    limits: PlannerLimits,
    cost: CostModel,
    tenants: Tenants,
    recover: Callable[[DeltaTree], None] = lambda tree: None,
) -> AsyncIterator[Runtime[KeeperT]]:
    """
    Open the parts in order. They are closed in reverse order, also if a later part fails to open.

    `open_tree` returns the tree, and the prompts to remove from the index. `identity`: of the store.
    `recover`: opens what could not be opened before, as far as it can be now; in the writer's thread.
    Raises:  ConfigError; StoreError if another process has the store open
    """
    async with AsyncExitStack() as opened:
        writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvshare-writer")
        opened.callback(writer.shutdown)
        loop = asyncio.get_running_loop()
        tree, forgotten = await loop.run_in_executor(writer, open_tree)
        opened.push_async_callback(loop.run_in_executor, writer, tree.close)
        await loop.run_in_executor(writer, tree.evict_by, EVICTION_QUEUES[settings.store.eviction])
        index = ServedIndex(settings.index, settings.store)
        nominator = await index.open(forgotten)
        opened.push_async_callback(index.close)
        keeper = await loop.run_in_executor(writer, new_keeper, tree)
        keeper.tenants = tenants
        await loop.run_in_executor(writer, tenants.load, settings.store.path)
        opened.push_async_callback(loop.run_in_executor, writer, keeper.close)
        sharing = Sharing(
            keeper=keeper,
            nominator=nominator,
            limits=limits,
            cost=cost,
            owns_index=settings.index.backend != "server",
            writer=writer,
        )
        opened.callback(sharing.close)
        control = Controller(
            settings.control,
            full_s=lambda num_tokens: cost.rates.full_s(num_tokens),
            break_even=lambda: sharing.shortest_that_pays,
        )
        kept_costs = KeptCosts(settings.store.path, cost)

        kept_tree = KeptTree(tree, settings.store.path, identity=identity)
        runtime = Runtime(
            *(keeper, index, sharing, control, writer),
            *(Background(), EmbeddingBacklog(), kept_costs, kept_tree),
        )
        index.refill = runtime.index_stored
        await opened.enter_async_context(_kept(runtime, settings.store.path, recover))
        opened.push_async_callback(runtime.settle)
        yield runtime


@asynccontextmanager
async def _kept(
    runtime: Runtime[Any], folder: str | None, recover: Callable[[DeltaTree], None]
) -> AsyncIterator[None]:
    """While inside, what outlives the process is written now and then; what could not be is tried again."""
    tree, tenants = runtime.sharing.tree, runtime.keeper.tenants

    def save() -> None:
        runtime.kept_costs.save()
        tenants.forget_all_but(tree.namespaces())
        tenants.save(folder)

    def look() -> None:
        if runtime.kept_tree.look():
            runtime.keeper.note_stored()
        recover(tree)
        group_tenants(tree, tenants)

    await runtime.write(look)
    async with (
        saved_often(save, every_s=_KEPT_S),
        repeated(partial(runtime.write, look), every_s=_LOOK_EVERY_S),
    ):
        yield


class Server(Protocol):
    """The parts of a started engine."""

    @property
    def runtime(self) -> Runtime[Any]: ...


ServerT = TypeVar("ServerT", bound=Server)


class ServedEngine(Engine, Generic[ServerT]):
    """An engine whose `start` opens a server, in `_opened`, and sets `_running` to it."""

    def __init__(self) -> None:
        super().__init__()
        self._running: ServerT | None = None
        self._opened = AsyncExitStack()

    @property
    def server(self) -> ServerT:
        """Return the parts of the engine. Raises ShuttingDownError before start and after stop."""
        if self._running is None:
            raise ShuttingDownError("the engine is not running")
        return self._running

    @property
    def sharing(self) -> Sharing:
        return self.server.runtime.sharing

    async def stop(self) -> None:
        self._running = None
        await self._opened.aclose()

    async def stats(self, question: StatsQuestion) -> ServerStats:
        return await self.server.runtime.stats(question)

    async def tree(self, question: TreeQuestion) -> TreeDocument:
        return await self.server.runtime.ask(question)

    async def node(self, question: NodeQuestion) -> NodeDocument:
        return await self.server.runtime.ask(question)

    async def diff(self, question: DiffQuestion) -> DiffDocument:
        return await self.server.runtime.ask(question)

    async def execute(self, command: Command) -> EvictionDocument | PinDocument:
        runtime = self.server.runtime
        return await runtime.evict(runtime.keeper.execute, command)
