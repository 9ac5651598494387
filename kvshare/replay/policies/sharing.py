"""
The `kvshare` policies: the sharing core of the servers (`kvshare/sharing/`) over the real index and tree,
with KV that has a size and no bytes.

Requests come one at a time, rates are never measured, and no decision depends on a clock.
"""

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Collection
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from delta_tree import EVICTION_QUEUES, DeltaTree, NodeId, SegmentId, Span, gaps, merge
from kvshare.logs.requests import Requester, any_of
from kvshare.replay.measures import COUNT_EDGES, histogram
from kvshare.replay.policies.base import CachePolicy, prompt_text, stored_tokens
from kvshare.replay.policies.sharing_options import LossFinder, SharingOptions
from kvshare.replay.policies.weightless import UNLIMITED, WeightlessKV, WeightlessSequence, WeightlessTier
from kvshare.replay.policies.weightless_stack import WeightlessStack
from kvshare.replay.requests import Outcome, TokenizedRequest
from kvshare.replay.results import Tree
from kvshare.requests import Prompt, SharingMode
from kvshare.sharing.cost import ASSUMED_EMBEDDING, CostModel
from kvshare.sharing.memory_keeper import Computed, MemoryKeeper
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import Rates
from kvshare.sharing.repair_choice import choose_by_place
from kvshare.telemetry import Component, FallbackReason
from vector_index import Nominator, QdrantEdgeIndex

_MAINTAIN_EVERY = 1000  # requests between two flushes of the index
_FAILURES = (
    (Component.SHARING, FallbackReason.ERROR),
    (Component.STORE, FallbackReason.ERROR),
    (Component.STORE, FallbackReason.REFUSED),
)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Inline(Executor):
    """Runs a function in the caller's thread: another one would cost more than most plans."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@dataclass(eq=False, kw_only=True)
class SharingPolicy(CachePolicy):
    """
    KVShare with these options. Where it searches by embedding, the context must have embeddings.

    `stack`: of tiers, instead of memory of `capacity_tokens`. `eviction`: a word of `store.eviction`; None:
    as config.yaml says.
    """

    family = "kvshare"

    sharing_options: SharingOptions
    stack: WeightlessStack | None = None
    eviction: str | None = None

    def __post_init__(self) -> None:
        context, options, capacity_tokens = self.context, self.sharing_options, self.capacity_tokens
        if options.uses_embedding and context.embeddings is None:
            raise ValueError(f"{self.name} needs embeddings")
        settings, per_token = context.settings, context.bytes_per_token
        limits = options.limits(settings)
        self._kv = WeightlessSequence(per_token)
        # Counted, so that ties are broken the same way in every run.
        ids, ticks, segment_ids = (itertools.count(1) for _ in range(3))
        new_id, clock = lambda: NodeId(next(ids)), lambda: float(next(ticks))
        max_bytes = UNLIMITED if capacity_tokens is None else capacity_tokens * per_token
        self._keeper: MemoryKeeper[WeightlessKV] = MemoryKeeper(
            DeltaTree.open(None, identity=None, clock=clock, new_id=new_id),
            self.stack or WeightlessTier(max_bytes),
            min_tokens=limits.sharing.min_prompt_tokens,
            new_id=lambda: SegmentId(next(segment_ids)),
        )
        self.tree.evict_by(EVICTION_QUEUES[self.eviction or settings.store.eviction])
        index_settings = options.nominator(settings)
        embedder = context.embeddings if options.uses_embedding else None
        self._folder = tempfile.TemporaryDirectory(prefix="kvshare-replay-")
        self._index = QdrantEdgeIndex(index_settings.schema(embedder), Path(self._folder.name))
        self._nominator = Nominator(self._index, embedder=embedder, settings=index_settings)
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._runner.run(self._index.open())
        load_bytes_per_s = settings.cost.prior_load_bytes_per_s
        rates = Rates.linear(context.prefill_tokens_per_s, load_bytes_per_s, bytes_per_token=per_token)
        rates = replace(rates, embedding=ASSUMED_EMBEDDING)
        cost = CostModel(rates, learns=False)  # what this machine measures must not change a result
        self._sharing = Sharing(
            keeper=self._keeper, nominator=self._nominator, limits=limits, cost=cost, executor=_Inline()
        )
        explains = context.explain_losses and not options.open_gates
        self._loss_finder = LossFinder(options, settings, self.tree.segment) if explains else None
        self._owners: dict[NodeId, Requester] = {}
        self._num_observed = 0

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self.sharing_options).items() if value is not None}

    @property
    def keeper(self) -> MemoryKeeper[WeightlessKV]:
        return self._keeper

    @property
    def tree(self) -> DeltaTree:
        return self._keeper.tree

    def observe(self, request: TokenizedRequest) -> Outcome:
        return self._runner.run(self._observe(request))

    def close(self) -> None:
        self._nominator.close()
        self._sharing.close()
        self._runner.run(self._index.close())
        self._runner.close()
        self._folder.cleanup()

    async def _observe(self, request: TokenizedRequest) -> Outcome:
        namespace = request.logged.namespace
        lookup = await self._sharing.find_plan(
            namespace,
            Prompt(request.token_ids, prompt_text(request)),
            SharingMode.APPROX if self.sharing_options.nominate != "prefix" else SharingMode.EXACT,
            by_embedding=self.sharing_options.uses_embedding,
        )
        plan = _with_repairs_chosen(lookup.plan)
        from_disk = frozenset[SegmentId]() if self.stack is None else self.stack.take_read()
        donors = plan.donors if isinstance(plan, Plan) else ()
        cross_user = any_of(request.logged.requester.is_other(self._owners[donor]) for donor in donors)
        num_refused = num_generation = 0
        if self._loss_finder is not None:
            nodes = self._sharing.own_nodes(namespace, lookup.candidates)
            rates = self._sharing.cost.rates
            num_refused, num_generation = self._loss_finder.losses(request.token_ids, plan, nodes, rates)
        self._keeper.hold(lookup.plan)
        self._sharing.note_use(lookup)
        await self._remember(request, plan)
        self._keeper.release(lookup.plan)
        self._check_counters()
        plan_s = sum(lookup.stage_seconds.get(stage, 0.0) for stage in ("plan", "fetch"))
        similarities = [one.similarity for one in lookup.candidates if one.similarity is not None]
        return replace(
            _outcome(plan, counts_repaired=self.sharing_options.open_gates, from_disk=from_disk),
            num_donors=len(donors),
            cross_user=cross_user,
            lookup_s=max(0.0, lookup.seconds - plan_s),
            plan_s=plan_s,
            num_stored_bytes=self._keeper.tier.num_bytes,
            distance=max(0.0, 1.0 - max(similarities)) if similarities else None,
            embedded="embedding" in lookup.stage_seconds and bool(request.text.strip()),
            num_refused=num_refused,
            num_refused_generation=num_generation,
        )

    def _check_counters(self) -> None:
        """A server goes on without what failed; a replay would give wrong figures."""
        counted = self._sharing.telemetry.counts().fallbacks
        failed = [" ".join(failure) for failure in _FAILURES if failure in counted]
        if failed:
            raise RuntimeError(f"{self.name}: {', '.join(failed)}; the log above has the error")

    async def _remember(self, request: TokenizedRequest, plan: Plan | NoPlan) -> None:
        """Store the prompt, then its answer, as the engines do; then index them."""
        logged = request.logged
        computed = Computed(logged.namespace, stored_tokens(request), plan, self._kv)
        prompt = replace(computed, token_ids=computed.token_ids[: request.num_tokens])
        stored = self._keeper.store_prompt(prompt)
        node = self._keeper.complete(stored, computed, num_prompt=request.num_tokens)
        for _, node_id in await self._sharing.indexing.forget_evicted():
            self._owners.pop(NodeId(node_id), None)
        if node is not None:
            self._owners[node.node_id] = logged.requester
            text = prompt_text(request) if self.sharing_options.uses_embedding else None
            await self._sharing.indexing.remember(node, text)
        self._num_observed += 1
        if self._num_observed % _MAINTAIN_EVERY == 0:
            await self._index.maintain()

    def describe_tree(self) -> Tree:
        stats = self.tree.stats()
        node_ids = [node.node_id for node in self.tree.nodes()]
        return Tree(
            depth=histogram(COUNT_EDGES, [1 + len(self.tree.ancestors(node_id)) for node_id in node_ids]),
            children=histogram(COUNT_EDGES, [len(self.tree.children(node_id)) for node_id in node_ids]),
            num_nodes=stats.num_nodes,
            num_roots=stats.num_roots,
            num_segments=stats.num_segments,
            num_prompt_tokens=stats.num_tokens,
            num_stored_tokens=stats.num_stored_tokens,
        )


def _with_repairs_chosen(plan: Plan | NoPlan) -> Plan | NoPlan:
    """Stand for an engine that chooses repairs by what it computes: as many, at starts of pieces."""
    if isinstance(plan, NoPlan) or plan.order is None:
        return plan
    choice = choose_by_place(
        plan.order, plan.placeholders, num_tokens=plan.num_tokens, first_approximate=plan.first_approximate
    )
    return plan.with_repairs(choice.repairs)


def _outcome(plan: Plan | NoPlan, *, counts_repaired: bool, from_disk: Collection[SegmentId]) -> Outcome:
    """
    Return what a plan reuses. `counts_repaired`: all repaired tokens but the last count as reused. Even where
    no repair is configured the planner computes scraps of a few tokens again, and these are not repairs.
    """
    if isinstance(plan, NoPlan):
        return Outcome(reason=plan.reason)
    hits, num_repaired = gaps(plan.placeholders, plan.num_tokens), plan.num_repaired
    if counts_repaired:
        all_but_last = Span(0, plan.num_tokens - 1)
        hits = merge([*hits, *(span.intersection(all_but_last) for span in plan.repairs)])
        num_repaired = sum(span.end == plan.num_tokens for span in plan.repairs)
    read = [
        span.intersection(copy.target)
        for copy in plan.copies
        if copy.segment_id in from_disk
        for span in hits
    ]
    exact = Span(0, plan.exact_length)
    return Outcome(
        hits=hits,
        num_exact=plan.exact_length,
        num_from_disk=sum(map(len, read)),
        num_exact_from_disk=sum(len(span.intersection(exact)) for span in read),
        num_repaired=num_repaired,
        shifts=tuple(copy.shift for copy in plan.copies),
        reason=plan.reason,
    )
