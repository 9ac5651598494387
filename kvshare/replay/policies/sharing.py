"""
The `kvshare` policies: the sharing core of the servers (`kvshare/sharing/`) over the real index and tree,
with KV that has a size and no bytes.

Requests come one at a time, rates are never measured, and no decision depends on a clock.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from delta_tree import DeltaTree, NodeId, SegmentId, Span, gaps, merge
from kvshare.replay.counts import COUNT_EDGES, histogram
from kvshare.replay.policies.base import CachePolicy, prompt_text, stored_tokens
from kvshare.replay.policies.losses import Losses, LossFinder
from kvshare.replay.policies.sharing_options import SharingOptions
from kvshare.replay.policies.weightless import WeightlessKV, WeightlessSequence, WeightlessTier
from kvshare.replay.requests import Outcome, Requester, TokenizedRequest, any_of
from kvshare.replay.results import Tree
from kvshare.requests import Prompt, SharingMode
from kvshare.sharing.cost import CostModel, Rates
from kvshare.sharing.memory_keeper import Computed, MemoryKeeper
from kvshare.sharing.pipeline import Lookup, Sharing
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.selection import choose_by_place
from kvshare.telemetry import Component, FallbackReason
from vector_index import Nominator, QdrantEdgeIndex

_MAINTAIN_EVERY = 1000  # requests between two flushes of the index
_FAILURES = (
    (Component.SHARING, FallbackReason.ERROR),
    (Component.COMMIT, FallbackReason.ERROR),
    (Component.COMMIT, FallbackReason.REFUSED),
)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class _Inline(Executor):
    """Runs a function in the caller's thread: a replay needs no others."""

    def submit(self, fn: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as exc:  # noqa: BLE001  the future's caller gets it
            future.set_exception(exc)
        return future


def _tree() -> DeltaTree:
    """With counted ids and times, so that ties are broken the same way in every run."""
    ids, ticks = itertools.count(1), itertools.count(1)
    return DeltaTree.open(
        None, identity=None, clock=lambda: float(next(ticks)), new_id=lambda: NodeId(next(ids))
    )


@dataclass(eq=False, kw_only=True)
class SharingPolicy(CachePolicy):
    """KVShare with these options. Where it searches by embedding, the context must have embeddings."""

    family = "kvshare"

    sharing: SharingOptions

    def __post_init__(self) -> None:
        context, sharing, capacity_tokens = self.context, self.sharing, self.capacity_tokens
        if sharing.uses_embedding and context.embeddings is None:
            raise ValueError(f"{self.name} needs embeddings")
        settings, per_token = context.settings, context.bytes_per_token
        limits = sharing.limits(settings)
        self._kv = WeightlessSequence(per_token)
        segment_ids = itertools.count(1)
        self._keeper: MemoryKeeper[WeightlessKV] = MemoryKeeper(
            _tree(),
            WeightlessTier(None if capacity_tokens is None else capacity_tokens * per_token),
            min_tokens=limits.sharing.min_prompt_tokens,
            new_id=lambda: SegmentId(next(segment_ids)),
        )
        self._loop = asyncio.new_event_loop()
        self._open_index()
        self._core = Sharing(
            keeper=self._keeper,
            nominator=self._nominator,
            limits=limits,
            cost=CostModel(
                Rates(
                    context.prefill_tokens_per_s,
                    settings.cost.prior_load_bytes_per_s,
                    bytes_per_token=per_token,
                ),
                smoothing=0.0,  # what this machine measures must not change a result
            ),
            executor=_Inline(),
        )
        explains = context.explain_losses and not sharing.open_gates
        self._loss_finder = LossFinder(sharing, settings, self.tree.segment) if explains else None
        self._owners: dict[NodeId, Requester] = {}
        self._num_observed = 0

    def _open_index(self) -> None:
        settings = self.sharing.nominator(self.context.settings)
        embedder = self.context.embeddings if self.sharing.uses_embedding else None
        self._folder = tempfile.TemporaryDirectory(prefix="kvshare-replay-")
        self._index = QdrantEdgeIndex(settings.schema(embedder), Path(self._folder.name))
        self._nominator = Nominator(self._index, embedder=embedder, settings=settings)
        self._loop.run_until_complete(self._index.open())

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self.sharing).items() if value is not None}

    @property
    def tree(self) -> DeltaTree:
        """What is stored now."""
        return self._keeper.tree

    def observe(self, request: TokenizedRequest) -> Outcome:
        return self._loop.run_until_complete(self._observe(request))

    def close(self) -> None:
        self._nominator.close()
        self._core.close()
        self._loop.run_until_complete(self._index.close())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._folder.cleanup()

    async def _observe(self, request: TokenizedRequest) -> Outcome:
        namespace = request.logged.namespace
        lookup = await self._core.find_plan(
            namespace,
            Prompt(request.token_ids, prompt_text(request)),
            SharingMode.APPROX,
            by_embedding=self.sharing.uses_embedding,
        )
        plan = _with_repairs_chosen(lookup.plan)
        donors = plan.donors if isinstance(plan, Plan) else ()
        cross_user = any_of(request.logged.requester.is_other(self._owners[donor]) for donor in donors)
        losses = Losses()
        if self._loss_finder is not None:
            nodes = self._core.own_nodes(namespace, lookup.candidates)
            losses = self._loss_finder.losses(request.token_ids, plan, nodes, self._core.cost.rates)
        self._keeper.hold(lookup.plan)
        self._core.note_use(lookup)
        await self._remember(request, plan)
        self._keeper.release(lookup.plan)
        self._check_counters()
        plan_s = sum(lookup.stage_seconds.get(stage, 0.0) for stage in ("plan", "load"))
        return replace(
            _outcome(plan, counts_repaired=self.sharing.open_gates),
            num_donors=len(donors),
            cross_user=cross_user,
            lookup_s=max(0.0, lookup.seconds - plan_s),
            plan_s=plan_s,
            num_stored_bytes=self._keeper.tier.num_bytes,
            distance=_distance(lookup),
            embedded="meaning" in lookup.stage_seconds and bool(request.text.strip()),
            num_refused=losses.num_refused,
            num_refused_generation=losses.num_generation,
        )

    def _check_counters(self) -> None:
        """A server goes on without what failed; a replay would give wrong figures."""
        counted = self._core.telemetry.counts().fallbacks
        failed = [" ".join(failure) for failure in _FAILURES if failure in counted]
        if failed:
            raise RuntimeError(f"{self.name}: {', '.join(failed)}; the log above has the error")

    async def _remember(self, request: TokenizedRequest, plan: Plan | NoPlan) -> None:
        """Store the prompt, then its answer, as the engines do; then index them."""
        logged = request.logged
        computed = Computed(logged.namespace, stored_tokens(request), plan, self._kv)
        prompt = replace(computed, token_ids=computed.token_ids[: request.num_tokens])
        committed = self._keeper.commit_prompt(prompt)
        node = self._keeper.complete(committed, computed, num_prompt=request.num_tokens)
        for _, node_id in await self._core.forget_evicted():
            self._owners.pop(NodeId(node_id), None)
        if node is not None:
            self._owners[node.node_id] = logged.requester
            await self._core.remember(node, prompt_text(request) if self.sharing.uses_embedding else None)
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
    """
    An engine chooses repairs by what the model computes; without a model: as many, at the starts of pieces.
    """
    if isinstance(plan, NoPlan) or plan.order is None:
        return plan
    choice = choose_by_place(
        plan.order,
        plan.placeholders,
        num_tokens=plan.num_tokens,
        first_approximate=plan.first_approximate,
    )
    return plan.with_repairs(choice.repairs)


def _outcome(plan: Plan | NoPlan, *, counts_repaired: bool) -> Outcome:
    """
    What a plan reuses. `counts_repaired`: all repaired tokens but the last count as reused, too.

    Without any repair asked for, the planner still computes scraps of a few tokens again.
    """
    if isinstance(plan, NoPlan):
        return Outcome(reason=plan.reason)
    hits, num_repaired = gaps(plan.placeholders, plan.num_tokens), plan.num_repaired
    if counts_repaired:
        all_but_last = Span(0, plan.num_tokens - 1)
        hits = merge([*hits, *(span.intersection(all_but_last) for span in plan.repairs)])
        num_repaired = sum(span.end == plan.num_tokens for span in plan.repairs)
    return Outcome(
        hits=hits,
        num_exact=plan.exact_length,
        num_repaired=num_repaired,
        shifts=tuple(copy.shift for copy in plan.copies),
        reason=plan.reason,
    )


def _distance(lookup: Lookup) -> float | None:
    found = [c.similarity for c in lookup.candidates if c.similarity is not None]
    return max(0.0, 1.0 - max(found)) if found else None
