"""
The story of one request's sharing: nominate, align, plan, fetch, and later keep what was computed.

`find_plan` runs before prefill and never raises: whatever fails, the request is served unshared and
the failure is counted. It changes nothing, so `explain` calls it, too; `note_use` says that a request is
served by what was found. When it has ended, the keeper of the engine stores it and `remember` indexes it.
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
from kvshare.sharing.keeper import Keeper, TierT
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import PlannerLimits, make_plan
from kvshare.telemetry import Component, FallbackReason
from vector_index import Candidate, Failure, Nomination, Nominator, PromptText

if TYPE_CHECKING:
    from kvshare.kv.segment import SegmentKV  # imports torch

log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
# Longer prompts are planned on a thread of their own: 45,000 tokens take some 25 ms, 2,000 one or two.
_CHANGED = 0.1  # of the prompt that the break-even is given for
_LONG_PROMPT_TOKENS = 8192


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """
    What sharing found for a prompt. Holds the segments' memory, if it is here, until it is laid out.

    `unreadable` are donors whose KV is not all there, `unknown` prompts that only the index knows: `note_use`
    takes them out.
    """

    plan: Plan | NoPlan
    segments: Mapping[SegmentId, SegmentKV] = field(default_factory=dict)
    candidates: tuple[Candidate, ...] = ()
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    namespace: str = ""
    seconds: float = 0.0  # all stages and the waits between them
    num_failures: int = 0  # of the nominator's parts
    unreadable: tuple[NodeId, ...] = ()
    unknown: tuple[int, ...] = ()

    def after_waiting(self, seconds: float) -> Lookup:
        """The same, with the time that was waited for a prompt like this one."""
        return replace(self, stage_seconds={**self.stage_seconds, "wait": seconds})

    def report(self, num_tokens: int) -> SharingReport:
        """Tokens by source, for usage and metrics."""
        if isinstance(self.plan, NoPlan):
            refused = self.plan
            return SharingReport(
                num_exact=0,
                num_copied=0,
                num_recomputed=num_tokens,
                num_repaired=0,
                decision=Decision.FULL,
                reason=refused.reason,
                prediction=refused.prediction,
                first_difference=0,
            )
        return SharingReport(
            num_exact=self.plan.exact_length,
            num_copied=self.plan.num_copied,
            num_recomputed=self.plan.num_recomputed,
            num_repaired=self.plan.num_repaired,
            decision=self.plan.decision,
            reason=self.plan.reason,
            donors=self.plan.donors,
            prediction=self.plan.prediction,
            first_difference=self.plan.placeholders[0].start,
        )


class Sharing:
    """
    Ties the delta tree, the KV tier and the index together for one model.

    The tree is the truth about prompts, the tier holds the bytes, the index only nominates.
    """

    def __init__(
        self,
        *,
        keeper: Keeper[TierT],
        nominator: Nominator,
        limits: PlannerLimits,
        cost: CostModel,
        owns_index: bool = True,
        executor: Executor | None = None,
        writer: Executor | None = None,
    ) -> None:
        """
        `owns_index`: nobody else writes to the index, so what the tree does not know may be taken out.

        Plans are made in `executor`, by default in a thread of their own, long prompts in another. Uses are
        noted in `writer`, by default where plans are made.
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
        """Let plans in progress finish; later ones fail open."""
        self._executor.shutdown(wait=True)
        self._long_executor.shutdown(wait=True)

    async def find_plan(
        self, namespace: str, prompt: Prompt, mode: SharingMode, *, by_meaning: bool = True
    ) -> Lookup:
        """
        Nominate, plan and fetch for a prompt. Changes nothing but counters of failures; `note_use` does.

        Fails open: any error is NoPlan with a reason.
        """
        if not self.wants(prompt, mode):
            return Lookup(NoPlan(self._unwanted(mode)))
        began = time.perf_counter()
        try:
            nomination = await self._nominate(namespace, prompt, mode, by_meaning=by_meaning)
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
            log.warning("sharing failed, the request is served without it: %s", classes_and_places(exc))
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
        The rates, JSON-ready, which of them were measured, and from how many tokens on a plan pays that
        computes a tenth.
        """
        rates = self.cost.rates
        return {
            **asdict(rates),
            "measured": sorted(self.cost.measured),
            "break_even_tokens": rates.break_even(computed=_CHANGED, min_saved_s=self.limits.min_saved_s),
        }

    def note_use(self, lookup: Lookup) -> Future[None]:
        """
        A request is served by this lookup: its donors were used now, and what cannot be used leaves.

        Done in the writer's thread; the request does not wait for it. Never raises.
        """
        if lookup.namespace:
            self.cost.observe_lookup(lookup.seconds)
        if isinstance(lookup.plan, Plan) or lookup.unreadable or lookup.unknown:
            with suppress(RuntimeError):  # closed: nothing is planned any more
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
            log.warning("the use of a plan was not noted: %s", classes_and_places(exc))
            self.telemetry.fallback(Component.SHARING, FallbackReason.ERROR)
        if self._owns_index:
            for prompt_id in lookup.unknown:
                self.keeper.note_evicted(lookup.namespace, prompt_id)

    def wants(self, prompt: Prompt, mode: SharingMode) -> bool:
        """Whether anything is looked up for a prompt at all."""
        is_long = prompt.num_tokens >= self.limits.sharing.min_prompt_tokens
        return self.limits.can_share and mode is not SharingMode.OFF and is_long

    def _unwanted(self, mode: SharingMode) -> Reason:
        """Why nothing was looked up."""
        if mode is SharingMode.OFF:
            return Reason.OFF
        return Reason.SHORT_PROMPT if self.limits.can_share else Reason.MODEL_UNSHARED

    async def remember(self, node: Node, text: PromptText | None) -> None:
        """
        Index a node (without text only prefix and fingerprints), and take evicted ones out of the index.
        """
        await self.forget_evicted()
        await self._index(node, text)

    async def _index(self, node: Node, text: PromptText | None) -> None:
        stored = self.tree.get(node.node_id)
        if stored is None:
            return
        if stored.num_tokens < node.num_tokens:  # it lost its end, while the text waited to be embedded
            text = None
        self._count(await self.nominator.remember(node.node_id, node.namespace, stored.token_ids, text))
        now = self.tree.get(node.node_id)
        if now is None:  # evicted while it was embedded: it must not come back
            await self.forget([(node.namespace, node.node_id)])
        elif now.num_tokens < stored.num_tokens:
            await self._index(now, None)

    async def forget_evicted(self) -> list[tuple[str, int]]:
        """
        Take what left the tree out of the index, whole prompts and ends of prompts.

        Returns: the whole prompts that left, by namespace and id
        """
        evicted = self.keeper.take_evicted()
        await self.forget(evicted)
        for node in self.keeper.take_shortened():
            # Without the meaning of the whole, which is not that of its beginning.
            await self._index(node, None)
        return evicted

    async def forget(self, nodes: Iterable[tuple[str, int]]) -> None:
        """Take nodes out of the index. Stale entries are never used, but they crowd out living donors."""
        by_namespace: dict[str, list[int]] = {}
        for namespace, node_id in nodes:
            by_namespace.setdefault(namespace, []).append(node_id)
        for namespace, node_ids in by_namespace.items():
            self._count(await self.nominator.forget(namespace, node_ids))

    def _count(self, failures: Iterable[Failure]) -> None:
        """Count the parts of the index that failed: a search without candidates, a prompt indexed in part."""
        for failure in failures:
            self.telemetry.fallback(Component(failure.component), FallbackReason(failure.reason))

    async def _nominate(
        self, namespace: str, prompt: Prompt, mode: SharingMode, *, by_meaning: bool
    ) -> Nomination:
        prefill_s = prompt.num_tokens / self.cost.rates.prefill_tokens_per_s
        pays = by_meaning and prefill_s >= self.limits.dense_min_prefill_s
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

        Donors may be evicted, or get better KV, while this runs; then the rest is planned again, without
        donors whose KV is really gone.
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
                plan = self._make_plan(token_ids, nodes, mode)
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

    def _make_plan(self, token_ids: TokenIds, nodes: Sequence[Node], mode: SharingMode) -> Plan | NoPlan:
        return make_plan(
            token_ids,
            nodes,
            self.tree.segment,
            approximate=mode is SharingMode.APPROX,
            limits=self.limits,
            rates=self.cost.rates,
        )

    def own_nodes(
        self, namespace: str, candidates: Sequence[Candidate], *, without: Collection[NodeId] = ()
    ) -> list[Node]:
        """
        The candidates' nodes but for some. The index filtered by namespace; the truth is checked again here.
        """
        nodes = []
        for candidate in candidates:
            node = self.tree.get(NodeId(candidate.prompt_id))
            if node is None or node.node_id in without:
                continue
            if node.namespace != namespace:
                self.telemetry.isolation_denied()
                log.error("a candidate of another namespace reached the planner and was dropped")
                continue
            nodes.append(node)
        return nodes
