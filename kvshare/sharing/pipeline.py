"""
The steps of sharing for one request: nominate, align, plan, fetch; later, index what was stored.

`find_plan` runs before prefill and never raises: if a step fails, the request is served unshared and the
failure is counted. `find_plan` changes nothing, so `explain` calls it too. `note_use` records that a request
uses the result. The engine's keeper stores prompt and answer, each when computed; `remember` indexes them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from delta_tree import Node, NodeId, SegmentId, TokenIds, UnknownSegmentError
from kvshare.reasons import Reason
from kvshare.requests import Decision, Prompt, SharingMode, SharingReport
from kvshare.safe_logging import classes_and_places
from kvshare.sharing.cost import CostModel
from kvshare.sharing.keeper import PromptKeeper, TierT
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import PlannerLimits, make_plan
from kvshare.telemetry import Component, FallbackReason
from vector_index import Candidate, Failure, Nomination, Nominator, PromptText

if TYPE_CHECKING:
    from kvshare.kv.sequence import SegmentKV  # imports torch

log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
_CHANGED = 0.1  # share of a prompt that is computed, in the reported break-even
# Longer prompts are planned on a second thread: 45,000 tokens take some 25 ms, 2,000 one or two.
_LONG_PROMPT_TOKENS = 8192


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """
    The result of `find_plan`. `segments` holds the KV in memory until it is written to the request's slots.

    `unreadable`: donors with missing KV. `unknown`: prompts that only the index has. `note_use` removes both.
    """

    plan: Plan | NoPlan
    segments: Mapping[SegmentId, SegmentKV] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    namespace: str = ""
    seconds: float = 0.0  # all stages, and waiting between them
    num_failures: int = 0  # parts of the nominator that failed
    unreadable: tuple[NodeId, ...] = ()
    unknown: tuple[int, ...] = ()

    def report(self, num_tokens: int) -> SharingReport:
        """How many tokens come from where, for usage and metrics."""
        plan = self.plan
        if isinstance(plan, Plan):
            counts = plan.exact_length, plan.num_copied, plan.num_recomputed, plan.num_repaired
            decision, donors, first_difference = plan.decision, plan.donors, plan.placeholders[0].start
        else:
            counts, decision, donors, first_difference = (0, 0, num_tokens, 0), Decision.FULL, (), 0
        return SharingReport(*counts, decision, plan.reason, donors, plan.prediction, first_difference)

    def after_waiting(self, seconds: float | None) -> Lookup:
        """The same with the wait for similar prompts as one of its stages; None: it did not wait."""
        if seconds is None:
            return self
        return replace(self, stage_seconds={**self.stage_seconds, "wait": seconds})


class Sharing:
    """
    Plans prompts of one model with the delta tree, the KV tier and the index.

    The tree decides which prompts exist, the tier holds the bytes, the index only nominates candidates.
    """

    def __init__(
        self,
        *,
        keeper: PromptKeeper[TierT],
        nominator: Nominator,
        limits: PlannerLimits,
        cost: CostModel,
        owns_index: bool = True,
        executor: Executor | None = None,
        writer: Executor | None = None,
    ) -> None:
        """
        `owns_index`: no other server writes to the index, so entries that the tree does not have are removed.
        `executor`: where plans are made; by default one thread, and a second one for long prompts.
        `writer`: where uses are recorded; by default where plans are made.
        """
        self.keeper = keeper
        self.tree = keeper.tree
        self.tier = keeper.tier
        self.telemetry = keeper.telemetry
        self.nominator = nominator
        self.limits = limits
        self.cost = cost
        self._owns_index = owns_index
        self._executor = executor or ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvshare-plan")
        self._long_executor = executor or ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="kvshare-plan-long"
        )
        self._writer = writer or self._executor

    def close(self) -> None:
        """Wait for plans in progress. Later requests are served unshared."""
        self._executor.shutdown(wait=True)
        self._long_executor.shutdown(wait=True)

    async def find_plan(
        self, namespace: str, prompt: Prompt, mode: SharingMode, *, by_embedding: bool = True
    ) -> Lookup:
        """
        Nominate, plan and fetch for a prompt. Changes only the counters of failures. Never raises: an error
        gives NoPlan with a reason.

        `by_embedding`: also search by embedding, if the prefill is long enough.
        """
        if not self.may_share(prompt, mode):
            unshared = Reason.SHORT_PROMPT if self.limits.can_share else Reason.MODEL_UNSHARED
            return Lookup(NoPlan(Reason.OFF if mode is SharingMode.OFF else unshared))
        began = time.perf_counter()
        try:
            nomination = await self._nominate(namespace, prompt, mode, by_embedding=by_embedding)
            is_long = prompt.num_tokens > _LONG_PROMPT_TOKENS
            lookup = await asyncio.get_running_loop().run_in_executor(
                self._long_executor if is_long else self._executor,
                self._plan,
                namespace,
                prompt.token_ids,
                nomination.candidates,
                mode,
            )
        except Exception as exc:  # noqa: BLE001  logged, without its message
            what = classes_and_places(exc)
            log.warning("planning failed, the request is served unshared; please report this: %s", what)
            self.telemetry.fallback(Component.SHARING, FallbackReason.ERROR)
            return Lookup(NoPlan(Reason.LOOKUP_FAILED))
        return replace(
            lookup,
            stage_seconds={**nomination.stage_seconds, **lookup.stage_seconds},
            num_failures=len(nomination.failures),
            seconds=time.perf_counter() - began,
        )

    def costs(self) -> dict[str, Any]:
        """
        JSON-ready: the rates, which of them were measured, and the shortest prompt for which a plan pays that
        computes a tenth of it.
        """
        rates = self.cost.rates
        return {
            **asdict(rates),
            "measured": sorted(self.cost.measured),
            "break_even_tokens": rates.break_even(computed=_CHANGED, min_saved_s=self.limits.min_saved_s),
        }

    def note_use(self, lookup: Lookup) -> Future[None]:
        """
        Record that a request uses this lookup: mark its donors as used and remove what cannot be used.

        Runs in the writer's thread; the request does not wait for it. Never raises.
        """
        if lookup.namespace:
            self.cost.observe_lookup(lookup.seconds)
        if isinstance(lookup.plan, Plan) or lookup.unreadable or lookup.unknown:
            with suppress(RuntimeError):  # the server stops and the writer is closed
                return self._writer.submit(self._note_use, lookup)
        nothing: Future[None] = Future()
        nothing.set_result(None)
        return nothing

    def _note_use(self, lookup: Lookup) -> None:
        try:
            if isinstance(lookup.plan, Plan):
                self.keeper.note_use(lookup.plan)
            self.keeper.discard_unreadable(lookup.unreadable)
        except Exception as exc:  # noqa: BLE001  logged, without its message
            log.warning(
                "donors could not be marked as used; requests are not affected: %s", classes_and_places(exc)
            )
            self.telemetry.fallback(Component.SHARING, FallbackReason.ERROR)
        if self._owns_index:
            for prompt_id in lookup.unknown:
                self.keeper.note_evicted(lookup.namespace, prompt_id)

    def may_share(self, prompt: Prompt, mode: SharingMode) -> bool:
        """Whether a prompt is looked up at all: mode and model permit it, and it is long enough."""
        is_long = prompt.num_tokens >= self.limits.sharing.min_prompt_tokens
        return self.limits.can_share and mode is not SharingMode.OFF and is_long

    async def remember(self, node: Node, text: PromptText | None) -> None:
        """Remove evicted nodes from the index, and add a node; without `text` it gets no embedding."""
        await self.forget_evicted()
        await self._index(node, text)

    async def _index(self, node: Node, text: PromptText | None) -> None:
        stored = self.tree.get(node.node_id)
        if stored is None:
            return
        if stored.num_tokens < node.num_tokens:  # shortened while the text waited to be embedded
            text = None
        self._count(await self.nominator.remember(node.node_id, node.namespace, stored.token_ids, text))
        now = self.tree.get(node.node_id)
        if now is None:  # evicted while it was indexed: removed again
            await self.forget([(node.namespace, node.node_id)])
        elif now.num_tokens < stored.num_tokens:
            await self._index(now, None)

    async def forget_evicted(self) -> list[tuple[str, int]]:
        """
        Remove evicted prompts from the index, and index shortened ones again.

        Returns: namespace and id of the evicted prompts
        """
        evicted = self.keeper.take_evicted()
        await self.forget(evicted)
        for node in self.keeper.take_shortened():
            # Without an embedding: that of the whole prompt does not fit its beginning.
            await self._index(node, None)
        return evicted

    async def forget(self, nodes: Iterable[tuple[str, int]]) -> None:
        """Remove nodes from the index. Stale entries are never used, but they displace usable donors."""
        by_namespace: dict[str, list[int]] = {}
        for namespace, node_id in nodes:
            by_namespace.setdefault(namespace, []).append(node_id)
        for namespace, node_ids in by_namespace.items():
            self._count(await self.nominator.forget(namespace, node_ids))

    def _count(self, failures: Iterable[Failure]) -> None:
        """Count the parts of the index that failed in a search or in indexing a prompt."""
        for failure in failures:
            self.telemetry.fallback(Component(failure.component), FallbackReason(failure.reason))

    async def _nominate(
        self, namespace: str, prompt: Prompt, mode: SharingMode, *, by_embedding: bool
    ) -> Nomination:
        prefill_s = prompt.num_tokens / self.cost.rates.prefill_tokens_per_s
        pays = by_embedding and prefill_s >= self.limits.dense_min_prefill_s
        nomination = await self.nominator.nominate(
            namespace, prompt.token_ids, prompt.text, allow_dense=pays and mode is SharingMode.APPROX
        )
        self._count(nomination.failures)
        return nomination

    def _plan(
        self, namespace: str, token_ids: TokenIds, candidates: Sequence[Candidate], mode: SharingMode
    ) -> Lookup:
        """
        Align, plan and fetch.

        If donors are evicted or stored again meanwhile, this plans again, twice at most, without donors whose
        KV is missing.
        """
        stages = {"plan": 0.0, "load": 0.0}
        nodes = self.own_nodes(namespace, candidates)
        found = Lookup(
            NoPlan(Reason.KV_GONE),
            candidates=tuple(candidates),
            stage_seconds=stages,
            namespace=namespace,
            unknown=tuple(c.prompt_id for c in candidates if self.tree.get(NodeId(c.prompt_id)) is None),
        )
        for attempt in range(_MAX_ATTEMPTS):
            if attempt and not nodes:
                break
            began = time.perf_counter()
            try:
                plan = make_plan(
                    token_ids,
                    nodes,
                    self.tree.segment,
                    approximate=mode is SharingMode.APPROX,
                    limits=self.limits,
                    rates=self.cost.rates,
                )
            except UnknownSegmentError:
                nodes = self.own_nodes(namespace, candidates, without=found.unreadable)
                continue
            finally:
                stages["plan"] += time.perf_counter() - began
            if isinstance(plan, NoPlan):
                return replace(found, plan=plan)
            began = time.perf_counter()
            fetched = self.tier.fetch({copy.segment_id for copy in plan.copies})
            stages["load"] += time.perf_counter() - began
            if not fetched.missing:
                return replace(found, plan=plan, segments=fetched.segments)
            self.telemetry.fallback(Component.TIER, FallbackReason.MISSING)
            unreadable = (copy.donor for copy in plan.copies if copy.segment_id in fetched.missing)
            found = replace(found, unreadable=tuple(dict.fromkeys([*found.unreadable, *unreadable])))
            nodes = self.own_nodes(namespace, candidates, without=found.unreadable)
        return found

    def own_nodes(
        self, namespace: str, candidates: Sequence[Candidate], *, without: Collection[NodeId] = ()
    ) -> list[Node]:
        """The candidates' nodes, except `without`. Candidates of other namespaces are dropped."""
        nodes = []
        for candidate in candidates:
            node = self.tree.get(NodeId(candidate.prompt_id))
            if node is None or node.node_id in without:
                continue
            if node.namespace != namespace:
                self.telemetry.isolation_denied()
                log.error("a candidate of another namespace was dropped: please report this as a bug")
                continue
            nodes.append(node)
        return nodes
