"""
The steps of sharing for one request: nominate, align, plan, fetch; later, index what was stored.

`find_plan` runs before prefill and never raises: if a step fails, the request is served unshared and the
failure is counted. It changes neither tree nor index, so `explain` calls it, too. `note_use` records that a
request uses its result. The engine's keeper stores prompt and answer; `Indexing.remember` indexes them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial

from delta_tree import Node, NodeId, UnknownSegmentError
from kvshare.admin import Costs
from kvshare.reasons import Reason
from kvshare.requests import Prompt, SharingMode
from kvshare.safe_logging import classes_and_places
from kvshare.sharing.cost import CostModel
from kvshare.sharing.fetching import Fetching
from kvshare.sharing.indexing import Indexing
from kvshare.sharing.keeper import PromptKeeper, TierT
from kvshare.sharing.limits import ModelTraits, PlannerLimits
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import make_plan
from kvshare.sharing.rates import IDLE, Queue
from kvshare.sharing.worth import Search, Worth
from kvshare.telemetry import Component, FallbackReason
from vector_index import Candidate, Nomination, Nominator

log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
_LONG_PROMPT_TOKENS = 8192  # longer prompts have their own thread: 45,000 tokens take 25 ms, 2,000 two
_Planner = Callable[[Sequence[Node]], Plan | NoPlan]


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
        `executor`: makes the plans; by default one thread, and a second one for long prompts.
        `writer`: records uses; by default the executor. A writer also computes which prompts are worth a
        lookup after rates have changed; by default the next request does.
        """
        self.keeper = keeper
        self.tree, self.tier, self.telemetry = keeper.tree, keeper.tier, keeper.telemetry
        self.nominator = nominator
        nominator.on_embedded = cost.observe_embedding
        self.indexing = Indexing(keeper, nominator)
        self._limits = limits
        self.cost = cost
        self._owns_index = owns_index
        self._executor = executor or ThreadPoolExecutor(1, thread_name_prefix="kvshare-plan")
        self._long_executor = executor or ThreadPoolExecutor(1, thread_name_prefix="kvshare-plan-long")
        self._writer = writer or self._executor
        self._worth = Worth(cost, later=None if writer is None else partial(_submit, writer))
        self.fetching = Fetching(keeper.tier, cost, keeper.telemetry)

    @property
    def limits(self) -> PlannerLimits:
        """Return the limits of plans for the model that is served now."""
        return self._limits

    def use_model(self, model: ModelTraits, *, bytes_per_token: int) -> None:
        """
        Plan for this model from now on: its calibration, the size of its KV, and what its engine can do.

        For an engine that gets to know its model after the start, or changes it. Plans in progress keep the
        limits with which they began.
        """
        self.cost.set_bytes_per_token(bytes_per_token)
        self._limits = self._limits.of_model(model)

    def close(self) -> None:
        """Wait for plans in progress. Later requests are served unshared."""
        self._executor.shutdown(wait=True)
        self._long_executor.shutdown(wait=True)

    async def find_plan(
        self,
        namespace: str,
        prompt: Prompt,
        mode: SharingMode,
        *,
        max_deviation: float | None = None,
        by_embedding: bool = True,
        queue: Queue = IDLE,
    ) -> Lookup:
        """
        Nominate, plan and fetch for a prompt. Changes only counters and the measured rate of the disk. Never
        raises: after an error the plan is a NoPlan with a reason.

        `max_deviation`: the request's limit, if that is lower than the limit of the settings.
        `by_embedding`: also search by embedding, if that takes little of what it can save.
        `queue`: the work that the engine does before this prompt.
        """
        if not self.may_share(prompt, mode):
            unshared = Reason.SHORT_PROMPT if self._limits.can_share else Reason.MODEL_UNSHARED
            return Lookup(NoPlan(Reason.OFF if mode is SharingMode.OFF else unshared))
        search = self._worth.search(prompt.num_tokens, self._limits)
        if search is Search.NOTHING:
            return Lookup(NoPlan(Reason.DOES_NOT_PAY))
        limits = self._limits.deviating_at_most(max_deviation)
        make = partial(self._make_plan, prompt, mode, queue, limits)
        began = time.perf_counter()
        try:
            nomination = await self._nominate(namespace, prompt, mode, search, by_embedding=by_embedding)
            if search is Search.PREFIX and not nomination.candidates:
                return Lookup(NoPlan(Reason.DOES_NOT_PAY))
            lookup = await self._planned(namespace, prompt, nomination, make)
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

    def costs(self) -> Costs:
        """Return the rates that price plans now."""
        return self.cost.document(self._limits.threshold)

    def note_use(self, lookup: Lookup) -> Future[None]:
        """
        Record that a request uses this lookup: mark its donors as used and remove what cannot be used.

        Runs in the writer's thread; the request does not wait for it. Never raises.
        """
        return _submit(self._writer, partial(self._note_use, lookup) if lookup.namespace else None)

    def _note_use(self, lookup: Lookup) -> None:
        self._worth.learn(lookup)
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
        """Return whether to look a prompt up at all: mode and model permit it, and it is long enough."""
        is_long = prompt.num_tokens >= self._limits.sharing.min_prompt_tokens
        return self._limits.can_share and mode is not SharingMode.OFF and is_long

    @property
    def shortest_that_pays(self) -> float:
        """Return the tokens of the shortest prompt for which a lookup pays; infinite if none does."""
        return self._worth.shortest(self._limits)

    async def _planned(
        self, namespace: str, prompt: Prompt, nomination: Nomination, make: _Planner
    ) -> Lookup:
        candidates = nomination.candidates
        pays = candidates and self._worth.planning(prompt.num_tokens, nomination, self._limits)
        if not pays:
            return Lookup(
                NoPlan(self._worth.unplanned(nomination, self._limits.sharing.min_run)),
                candidates=candidates,
                namespace=namespace,
                num_tokens=prompt.num_tokens,
            )
        return await asyncio.get_running_loop().run_in_executor(
            self._long_executor if prompt.num_tokens > _LONG_PROMPT_TOKENS else self._executor,
            partial(self._plan, namespace, prompt.num_tokens, candidates, make),
        )

    async def _nominate(
        self, namespace: str, prompt: Prompt, mode: SharingMode, search: Search, *, by_embedding: bool
    ) -> Nomination:
        embeds = by_embedding and mode is SharingMode.APPROX
        embeds = embeds and self._worth.embedding(prompt.num_tokens, self._limits)
        nomination = await self.nominator.nominate(
            namespace,
            prompt.token_ids,
            prompt.text,
            allow_dense=embeds,
            allow_passages=search is Search.PASSAGES,
        )
        self.indexing.count(nomination.failures)
        return nomination

    def _plan(
        self, namespace: str, num_tokens: int, candidates: Sequence[Candidate], make: _Planner
    ) -> Lookup:
        """
        Align, plan and fetch. If donors are evicted or stored again meanwhile, or KV is missing or late, plan
        again, at most twice: without donors whose KV is missing, or with those in memory.
        """
        stages = {"plan": 0.0, "fetch": 0.0}
        nodes = self.own_nodes(namespace, candidates)
        lookup = Lookup(
            NoPlan(Reason.KV_GONE),
            candidates=tuple(candidates),
            stage_seconds=stages,
            namespace=namespace,
            num_tokens=num_tokens,
            unknown=tuple(c.prompt_id for c in candidates if self.tree.get(NodeId(c.prompt_id)) is None),
        )
        for attempt in range(_MAX_ATTEMPTS):
            if attempt and not nodes:
                break
            began = time.perf_counter()
            try:
                plan = make(nodes)
            except UnknownSegmentError:
                nodes = self.own_nodes(namespace, candidates, without=lookup.unreadable)
                continue
            finally:
                stages["plan"] += time.perf_counter() - began
            if isinstance(plan, NoPlan):
                return replace(lookup, plan=plan)
            fetched = self.fetching.fetch(plan, self._limits.threshold, stages)
            if fetched.late:  # copy only from donors in memory
                nodes, lookup = self.fetching.near(nodes), replace(lookup, plan=NoPlan(Reason.KV_LATE))
                continue
            if not fetched.missing:
                return replace(lookup, plan=plan, segments=fetched.segments, reads=fetched.reads)
            self.telemetry.fallback(Component.TIER, FallbackReason.MISSING)
            unreadable = (copy.donor for copy in plan.copies if copy.segment_id in fetched.missing)
            lookup = replace(lookup, unreadable=tuple(dict.fromkeys([*lookup.unreadable, *unreadable])))
            nodes = self.own_nodes(namespace, candidates, without=lookup.unreadable)
        return lookup

    def _make_plan(
        self,
        prompt: Prompt,
        mode: SharingMode,
        queue: Queue,
        limits: PlannerLimits,
        nodes: Sequence[Node],
    ) -> Plan | NoPlan:
        queue, is_approximate = queue.reading(self.tier.on_disk), mode is SharingMode.APPROX

        def planned(donors: Sequence[Node]) -> Plan | NoPlan:
            make = partial(make_plan, prompt.token_ids, donors, self.tree.segment, media=prompt.media)
            return self._worth.plan(
                lambda within, now: make(approximate=is_approximate, limits=within, rates=now), limits, queue
            )

        return self.fetching.fastest(planned, nodes)

    def own_nodes(
        self, namespace: str, candidates: Sequence[Candidate], *, without: Collection[NodeId] = ()
    ) -> list[Node]:
        """Return the candidates' nodes, except `without`. Candidates of other namespaces are dropped."""
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


def _submit(writer: Executor, work: Callable[[], None] | None) -> Future[None]:
    nothing: Future[None] = Future()
    nothing.set_result(None)
    with suppress(RuntimeError):  # the server stops and the writer is closed
        return nothing if work is None else writer.submit(work)
    return nothing
