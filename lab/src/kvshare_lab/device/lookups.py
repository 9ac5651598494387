"""
The proxy's lookups in a simulation: the product's sharing core, which is given the donor of each prompt in
place of an index, and in place of the seconds that this machine takes what the profile says.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np

from delta_tree import Node, TokenIds
from kvshare.fleet.replica_keeper import ReplicaKeeper
from kvshare.requests import Prompt, SharingMode
from kvshare.settings import Settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import Plan
from kvshare.sharing.rates import BLOCKS, MEMORY, Queue
from kvshare.sharing.waits import Waits
from kvshare.vllm_protocol.places import READ_PARTS
from kvshare_lab.device.profile import Costs, Model
from vector_index import Candidate, Nomination, Nominator, PromptText

_T = TypeVar("_T")
_RELATIVES = 4


class _Here(Executor):
    """Calls in the thread that asks."""

    def submit(self, work: Callable[..., _T], /, *given: Any, **named: Any) -> Future[_T]:
        future: Future[_T] = Future()
        try:
            future.set_result(work(*given, **named))
        except Exception as exc:  # noqa: BLE001  raised where the result is asked for
            future.set_exception(exc)
        return future


class _Given:
    """In place of the `Nominator`: it nominates the donors that it is given, and counts a search's time."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.donors: list[Node] = []
        self.on_embedded: Callable[[int, float], None] = lambda num_tokens, seconds: None
        self.seconds = 0.0  # of the last search; 0 if there was none

    async def nominate(
        self,
        namespace: str,
        token_ids: TokenIds,
        text: PromptText | None,
        *,
        allow_dense: bool,
        allow_passages: bool,
    ) -> Nomination:
        """
        By passages, where the product searches for them; by embedding, too, where it would do so and there is
        no donor. What equal beginnings share is left to vLLM's own prefix cache.
        """
        stages: dict[str, float] = {}
        if allow_passages:
            stages["fingerprint"] = self.costs.search_s(len(token_ids))
        if allow_dense and not self.donors:
            stages["embedding"] = self.costs.embed_s
        self.seconds = sum(stages.values())
        found = (_candidate(donor, token_ids) for donor in self.donors if allow_passages)
        return Nomination(tuple(found), 0, stages, ())

    async def remember(self, *_: object) -> tuple[()]:
        return ()

    async def forget(self, *_: object) -> tuple[()]:
        return ()


def _candidate(donor: Node, token_ids: TokenIds) -> Candidate:
    length = min(len(donor.token_ids), len(token_ids))
    equal = np.count_nonzero(donor.token_ids[:length] == token_ids[:length])
    return Candidate(int(donor.node_id), ("fingerprint",), max(equal / len(token_ids), 1e-3))


def costs_of(settings: Settings, model: Model, *, clock: Callable[[], float], has_disk: bool) -> CostModel:
    """As the proxy's, which learns by the simulation's clock."""
    cost = CostModel.from_settings(
        settings.cost,
        bytes_per_token=model.bytes_per_token,
        num_extra_passes=1,
        computes_ahead=True,
        read_parts=READ_PARTS,
        places=(MEMORY, BLOCKS),
    )
    cost.waits = Waits(clock=clock)
    if has_disk:
        cost.know_disk()
    return cost


class Lookups:
    """`sharing`: the product's, over this keeper's tree."""

    def __init__(
        self, keeper: ReplicaKeeper, costs: Costs, *, limits: PlannerLimits, cost: CostModel, namespace: str
    ) -> None:
        self._given, self._namespace = _Given(costs), namespace
        here = _Here()
        self.sharing = Sharing(
            keeper=keeper,
            nominator=cast(Nominator, self._given),
            limits=limits,
            cost=cost,
            executor=here,
            writer=here,
        )
        self.host_s = 0.0  # of this machine's CPU
        self._families: dict[bytes, deque[TokenIds]] = {}  # prompts that copied from a donor, by its tokens
        self._loop = asyncio.new_event_loop()

    def close(self) -> None:
        self._loop.close()

    def find(self, prompt: Prompt, donor: TokenIds | None, mode: SharingMode, queue: Queue) -> Lookup:
        """What the proxy finds, whose use is noted. `seconds` are those of the simulated host."""
        self._given.donors = [] if donor is None else self._stored_family(donor)
        self._given.seconds = 0.0
        began = time.process_time()
        found = self._loop.run_until_complete(
            self.sharing.find_plan(self._namespace, prompt, mode, queue=queue)
        )
        self.host_s += time.process_time() - began
        is_planned = found.candidates and "plan" in found.stage_seconds
        planning_s = self._given.costs.planning_s(prompt.num_tokens) if is_planned else 0.0
        stages = {**found.stage_seconds, "plan": planning_s} if is_planned else found.stage_seconds
        lookup = replace(found, seconds=self._given.seconds + planning_s, stage_seconds=stages)
        self.sharing.note_use(lookup)
        if donor is not None and isinstance(lookup.plan, Plan) and lookup.plan.donors:
            self._families[donor.tobytes()].append(prompt.token_ids)
        return lookup

    def note_stored(self, node: Node) -> None:
        """Its text is embedded beside what else the host does, which measures what that takes."""
        self._given.on_embedded(node.num_tokens, self._given.costs.embed_s)

    def _stored_family(self, donor: TokenIds) -> list[Node]:
        """The donor; where it was evicted, the last prompts that were like it and are stored."""
        tree, family = self.sharing.tree, self._families.setdefault(donor.tobytes(), deque(maxlen=_RELATIVES))
        if (node := tree.find(self._namespace, donor)) is not None:
            return [node]
        found = (tree.find(self._namespace, relative) for relative in family)
        return [node for node in found if node is not None]
