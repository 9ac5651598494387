"""
The `kvshare` arms: the real nominator over Qdrant Edge, the real delta tree and planner; only the KV is
missing.

Follows `kvshare/sharing.py` step by step, one request at a time and without a clock in any decision.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from delta_tree import Node, NodeId, Span, gaps, merge
from kvshare.cost import Rates
from kvshare.drafting import FinishedSequence
from kvshare.plan import NoPlan, Plan
from kvshare.planner import PlannerLimits, make_plan
from kvshare.replay.arms.base import Arm, Workbench, stored_tokens
from kvshare.replay.arms.books import Books
from kvshare.replay.arms.losses import Losses, SecondLook
from kvshare.replay.arms.meanings import prompt_text
from kvshare.replay.arms.sharing_options import SharingOptions
from kvshare.replay.requests import Asker, Outcome, TokenizedRequest, any_of
from vector_index import Nomination, Nominator, QdrantEdgeIndex

_MAINTAIN_EVERY = 1000  # requests between two flushes of the index


@dataclass(frozen=True, slots=True)
class _Found:
    plan: Plan | NoPlan
    nodes: tuple[Node, ...]
    nomination: Nomination | None
    lookup_s: float = 0.0
    plan_s: float = 0.0


class SharingArm(Arm):
    """KVShare with some options. Those that look at meaning need a workbench with meanings."""

    family = "kvshare"

    def __init__(
        self,
        name: str,
        bench: Workbench,
        capacity_tokens: int | None = None,
        *,
        sharing: SharingOptions | None = None,
    ) -> None:
        super().__init__(name, bench, capacity_tokens)
        self.sharing = sharing or SharingOptions()
        if self.sharing.uses_meaning and bench.meanings is None:
            raise ValueError(f"{name} needs embeddings")
        settings, per_token = bench.settings, bench.bytes_per_token
        self._limits = self.sharing.limits(settings)
        self._rates = Rates(
            bench.prefill_tokens_per_s, settings.cost.prior_load_bytes_per_s, bytes_per_token=per_token
        )
        self._books = Books(
            bytes_per_token=per_token,
            max_bytes=None if capacity_tokens is None else capacity_tokens * per_token,
            min_tokens=self._limits.sharing.min_prompt_tokens,
            seed=bench.seed,
        )
        explains = bench.explain_losses and not self.sharing.open_gates
        self._second_look = SecondLook(self.sharing, settings, self._books.tree.segment) if explains else None
        self._owners: dict[NodeId, Asker] = {}
        self._num_observed = 0
        self._open_index()

    def _open_index(self) -> None:
        settings = self.sharing.nominator(self.bench.settings)
        embedder = self.bench.meanings if self.sharing.uses_meaning else None
        self._folder = tempfile.TemporaryDirectory(prefix="kvshare-replay-")
        self._index = QdrantEdgeIndex(settings.schema(embedder), Path(self._folder.name))
        self._nominator = Nominator(self._index, embedder=embedder, settings=settings)
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._index.open())

    @property
    def options(self) -> dict[str, Any]:
        return self.sharing.as_document()

    def observe(self, request: TokenizedRequest) -> Outcome:
        return self._loop.run_until_complete(self._observe(request))

    def close(self) -> None:
        self._nominator.close()
        self._loop.run_until_complete(self._index.close())
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        self._folder.cleanup()

    async def _observe(self, request: TokenizedRequest) -> Outcome:
        found = await self._look_up(request)
        plan = found.plan
        donors = plan.donors if isinstance(plan, Plan) else ()
        cross_user = any_of(request.logged.asker.is_other(self._owners[donor]) for donor in donors)
        losses = self._losses(request, found)
        self._books.touch(donors)
        await self._remember(request, plan)
        return replace(
            _outcome(plan, with_repairs=self.sharing.open_gates),
            num_donors=len(donors),
            cross_user=cross_user,
            lookup_s=found.lookup_s,
            plan_s=found.plan_s,
            num_stored_bytes=self._books.num_bytes,
            distance=_distance(found.nomination),
            details={
                "num_refused": losses.num_refused,
                "num_refused_generation": losses.num_generation,
                "embedded": _was_embedded(request, found.nomination),
                "num_candidates": len(found.nodes),
                "num_failures": len(found.nomination.failures) if found.nomination else 0,
            },
        )

    async def _look_up(self, request: TokenizedRequest) -> _Found:
        limits = self._limits
        if request.num_tokens < limits.sharing.min_prompt_tokens:
            return _Found(NoPlan("short_prompt"), (), None)
        prefill_s = request.num_tokens / self._rates.prefill_tokens_per_s
        dense = self.sharing.uses_meaning and prefill_s >= limits.dense_min_prefill_s
        began = time.perf_counter()
        nomination = await self._nominator.nominate(
            request.logged.namespace,
            request.token_ids,
            prompt_text(request) if dense else None,
            allow_dense=dense,
        )
        nominated = time.perf_counter()
        nodes = self._own_nodes(request.logged.namespace, nomination)
        plan = self._make_plan(request, nodes, limits)
        return _Found(
            plan, nodes, nomination, lookup_s=nominated - began, plan_s=time.perf_counter() - nominated
        )

    def _own_nodes(self, namespace: str, nomination: Nomination) -> tuple[Node, ...]:
        nodes = (self._books.tree.get(NodeId(c.prompt_id)) for c in nomination.candidates)
        return tuple(node for node in nodes if node is not None and node.namespace == namespace)

    def _make_plan(
        self, request: TokenizedRequest, nodes: tuple[Node, ...], limits: PlannerLimits
    ) -> Plan | NoPlan:
        return make_plan(
            request.token_ids,
            nodes,
            self._books.tree.segment,
            approximate=True,
            limits=limits,
            rates=self._rates,
        )

    def _losses(self, request: TokenizedRequest, found: _Found) -> Losses:
        if self._second_look is None:
            return Losses()
        return self._second_look.losses(
            found.plan, found.nodes, lambda limits: self._make_plan(request, found.nodes, limits)
        )

    async def _remember(self, request: TokenizedRequest, plan: Plan | NoPlan) -> None:
        logged = request.logged
        finished = FinishedSequence(logged.namespace, stored_tokens(request), plan)
        node = self._books.keep(finished)
        for namespace, node_id in self._books.take_evicted():
            self._owners.pop(node_id, None)
            await self._nominator.forget(namespace, [node_id])
        if node is not None:
            self._owners[node.node_id] = logged.asker
            text = prompt_text(request) if self.sharing.uses_meaning else None
            await self._nominator.remember(node.node_id, node.namespace, node.token_ids, text)
        self._num_observed += 1
        if self._num_observed % _MAINTAIN_EVERY == 0:
            await self._index.maintain()

    def describe_tree(self) -> dict[str, Any]:
        tree = self._books.tree
        stats = tree.stats()
        depths: dict[NodeId, int] = {}
        for node in tree.nodes():  # parents come before their children, unless they were evicted
            depths[node.node_id] = 1 if node.parent is None else depths.get(node.parent, 0) + 1
        children = Counter(node.parent for node in tree.nodes() if node.parent is not None)
        return {
            "depths": list(depths.values()),
            "children": [children.get(node_id, 0) for node_id in depths],
            "num_nodes": stats.num_nodes,
            "num_roots": stats.num_roots,
            "num_segments": stats.num_segments,
            "num_prompt_tokens": stats.num_tokens,
            "num_stored_tokens": stats.num_stored_tokens,
        }


def _outcome(plan: Plan | NoPlan, *, with_repairs: bool = False) -> Outcome:
    """
    What a plan reuses. `with_repairs`: and what it computes though a donor had it, but for the last token.

    Even with no repair asked for, the planner computes scraps of a few tokens again.
    """
    if isinstance(plan, NoPlan):
        return Outcome(reason=plan.reason)
    hits = gaps(plan.placeholders, plan.num_tokens)
    num_repaired = plan.num_repaired
    if with_repairs:
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


def _was_embedded(request: TokenizedRequest, nomination: Nomination | None) -> bool:
    """Whether the look-up needed the text's embedding; a text without a word has none."""
    return nomination is not None and "meaning" in nomination.stage_seconds and bool(request.text.strip())


def _distance(nomination: Nomination | None) -> float | None:
    found = [c.similarity for c in nomination.candidates if c.similarity is not None] if nomination else []
    return max(0.0, 1.0 - max(found)) if found else None
