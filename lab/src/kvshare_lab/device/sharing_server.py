"""
vLLM with the connector, behind the proxy, in a simulated benchmark. The connector's two sides, the plans, the
tickets and what is learned of costs are the product's.

Not here: HTTP, tokenizing and the index, whose time is a constant of the profile. The proxy is given which
prompt is the donor; what similar prompts an index would find is not simulated.
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch
from vllm.config import VllmConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash

from delta_tree import DeltaTree, NodeId, TokenIds
from kvshare.fleet.client import ControlClient, VllmClient
from kvshare.fleet.observation import observe
from kvshare.fleet.remote_tier import RemoteTier
from kvshare.fleet.replica import Replica
from kvshare.fleet.replica_keeper import ReplicaKeeper
from kvshare.fleet.routed_request import Incoming, Routed, RoutedRequest
from kvshare.fleet.tickets import ticket_for
from kvshare.namespace import Owner
from kvshare.requests import Prompt, SharingMode
from kvshare.settings import Settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.vllm_connector.config import ConnectorSettings
from kvshare.vllm_connector.connector import KVShareConnector
from kvshare.vllm_connector.worker.ranks import num_ranks
from kvshare.vllm_protocol.messages import Dropped, FinishedReport, JournalEvent, Prefilled, budget_of
from kvshare_lab.device.clock import Clock
from kvshare_lab.device.engine import Answer
from kvshare_lab.device.gpu import SimulatedGpu
from kvshare_lab.device.lookups import Lookups
from kvshare_lab.device.profile import Profile
from kvshare_lab.device.ranks import alike_ranks
from kvshare_lab.device.servers import Server
from kvshare_lab.device.vllm_config import vllm_config
from kvshare_lab.device.worker import SimulatedWorker, virtual_threads
from vector_index import PromptText

_NAMESPACE = "simulated"
_OWNER = Owner("", "private")
_REPLICA = "simulated"


class SharingServer(Server):
    """vLLM with the connector, behind the proxy: its plans, its tree, its tickets and what it learns."""

    def __init__(
        self,
        profile: Profile,
        config: VllmConfig,
        gpu: SimulatedGpu,
        settings: Settings,
        *,
        chooses: bool = True,
    ) -> None:
        """Unless it `chooses`, as many tokens are repaired by place as a choice computes in all."""
        self._chooses = chooses
        super().__init__(profile, config, gpu)
        connector, worker = self.scheduler.connector, self.engine.worker
        assert isinstance(connector, KVShareConnector), "it is configured"
        assert worker is not None, "this class makes one"
        assert worker.handshake is not None, "it is simulated"
        connector.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): worker.handshake for rank in range(num_ranks())}
        )
        assert connector._scheduler_side is not None, "the role of a scheduler"
        self._connector = connector._scheduler_side
        self._num_read = 0
        self._tier = RemoteTier([_REPLICA])
        self._tier.memories[_REPLICA].max_bytes = budget_of(num_ranks() * profile.model.kv_bytes)
        self._keeper = ReplicaKeeper(
            DeltaTree.open(None, identity="bench"), self._tier, min_tokens=settings.sharing.min_prompt_tokens
        )
        self.cost = CostModel.from_settings(
            settings.cost, bytes_per_token=profile.model.bytes_per_token, num_extra_passes=1
        )
        limits = PlannerLimits.from_settings(settings, can_probe=True)
        self._lookups = Lookups(
            self._keeper, profile.costs, limits=limits, cost=self.cost, namespace=_NAMESPACE
        )
        # Nothing is asked of its clients.
        self._replica = Replica(_REPLICA, cast(VllmClient, None), cast(ControlClient, None))
        self._sent: dict[str, _Sent] = {}
        self._prefilling: list[_Sent] = []  # as far as the proxy knows
        self._in_flight: set[str] = set()  # tickets that are not reported
        self._unstored: deque[tuple[float, JournalEvent]] = deque()  # and when each is stored
        self._stored_at = 0.0  # when the proxy's writer has done what it was given
        self.reports: dict[str, FinishedReport] = {}

    @property
    def host_s(self) -> dict[str, float]:
        worker = self.engine.worker
        tables_s = worker.streams.tables_s if worker is not None else 0.0
        return {**super().host_s, "planning": self._lookups.host_s, "tables": tables_s}

    def send(
        self,
        prompt: TokenIds,
        *,
        max_tokens: int,
        at: float,
        donor: TokenIds | None = None,
        mode: SharingMode = SharingMode.APPROX,
    ) -> Answer:
        """To the proxy, which has stored the `donor`; without one it finds none."""
        if mode is SharingMode.OFF:
            return self.send_straight(prompt, max_tokens=max_tokens, at=at)
        answer = Answer(self._new_id(), at)
        self.engine.at(at, partial(self._route, answer, prompt, max_tokens, donor, mode))
        return answer

    def close(self) -> None:
        self._lookups.close()
        super().close()

    def _worker(self) -> SimulatedWorker | None:
        group = self.kv_cache.kv_cache_groups[0]
        settings = ConnectorSettings(control_port=0, max_bytes=num_ranks() * self.profile.model.kv_bytes)
        return SimulatedWorker(
            self.gpu,
            self.profile.model,
            self._config,
            settings,
            group.kv_cache_spec,
            group.layer_names,
            can_listen=self._chooses,
        )

    def pin(self, prompt: TokenIds) -> None:
        """Keep a prompt that was served from being evicted."""
        self.clock.sleep_until(self._stored_at)
        self.read_events()
        node = self._keeper.tree.find(_NAMESPACE, prompt)
        assert node is not None, "it is stored"
        self._keeper.tree.pin(node.node_id)

    def decision(self, request_id: str) -> str:
        """What became of a request, and why no more was shared."""
        report, plan = self.reports[request_id], self._sent[request_id].request.routed.plan
        reason = report.reason or plan.reason
        return report.decision if reason is None else f"{report.decision}: {reason}"

    def read_events(self) -> None:
        """
        As the proxy does: learn from what the connector reports, store what it has retained, and have it drop
        what is evicted. Its writer stores one prompt after the other.
        """
        journal, now = self._connector.events.read(self._num_read), self.clock.now()
        self._num_read = journal.last
        for event in journal.events:
            if isinstance(event, FinishedReport):
                self._learn(event)
            self._stored_at = max(self._stored_at, now) + self.profile.costs.store_s
            self._unstored.append((self._stored_at, event))
        while self._unstored and self._unstored[0][0] <= now:
            self._store(self._unstored.popleft()[1])
        self._connector.scheduler.drop(self._tier.take_dropped(_REPLICA))

    def _learn(self, report: FinishedReport) -> None:
        sent = self._sent[report.ticket_id]
        sent.request.progress.prefill_s = sent.answer.token_at[0] - sent.request.progress.sent_at
        self.reports[report.ticket_id] = report
        observe(self.cost, sent.request.routed, sent.request.progress, report)

    def _store(self, event: JournalEvent) -> None:
        if isinstance(event, Dropped):
            self._keeper.forget(event.segment_ids)
            return
        request, held = self._sent[event.ticket_id].request, self._donors_in_flight
        if isinstance(event, Prefilled):
            self._keeper.store_prompt(request, event, held)
        else:
            if (node := self._keeper.store(request, event, held)) is not None:
                self._lookups.note_stored(node)
            self._in_flight.discard(event.ticket_id)

    @property
    def _donors_in_flight(self) -> frozenset[NodeId]:
        plans = (self._sent[ticket_id].request.routed.plan for ticket_id in self._in_flight)
        return frozenset(donor for plan in plans if isinstance(plan, Plan) for donor in plan.donors)

    def _route(
        self, answer: Answer, prompt: TokenIds, max_tokens: int, donor: TokenIds | None, mode: SharingMode
    ) -> None:
        """Look up and plan, which takes its time, and send to vLLM."""
        self.read_events()
        self._note_prefilled(answer.sent_at)
        own = Prompt(prompt, PromptText("", ""))
        lookup = self._lookups.find(own, donor, mode, self._replica.queue(self.cost.rates))
        sent_at = answer.sent_at + lookup.seconds
        self._note_prefilled(sent_at)
        plan, ticket_id = self._repairing(lookup.plan), answer.request_id
        ticket = ticket_for(plan, prompt, ticket_id=ticket_id, namespace=_NAMESPACE, store=True)
        request = RoutedRequest(Incoming(_OWNER, own, mode, may_store=True), Routed(plan, ticket))
        request.execution.replica = _REPLICA
        request.progress.sent_at = sent_at
        request.progress.was_alone = not self._replica.being_prefilled()
        self._replica.requests.add(request)
        self._sent[ticket_id] = _Sent(request, answer)
        self._prefilling.append(self._sent[ticket_id])
        self._in_flight.add(ticket_id)
        make = partial(
            self._request,
            ticket_id,
            prompt,
            max_tokens,
            salt=request.salt,
            transfer=request.transfer_params,
        )
        self.engine.send(make, answer, arrives_at=sent_at + self.profile.costs.front_s)

    def _note_prefilled(self, time: float) -> None:
        """What the proxy knows at this time: whose first token it has passed on."""
        for sent in tuple(self._prefilling):
            if sent.answer.token_at and sent.answer.token_at[0] <= time:
                sent.request.note_prefilled()
                self._replica.requests.discard(sent.request)
                self._prefilling.remove(sent)

    def _repairing(self, plan: Plan | NoPlan) -> Plan | NoPlan:
        if self._chooses or isinstance(plan, NoPlan) or plan.order is None:
            return plan
        num_tokens = plan.order.num_tokens + plan.num_selecting
        return replace(plan, order=replace(plan.order, probes=(), num_tokens=num_tokens))


class _Sent(NamedTuple):
    """A request on its way through the proxy."""

    request: RoutedRequest
    answer: Answer


@contextmanager
def servers(
    profile: Profile, settings: Settings, *, chooses: bool = True, ranks: int = 1
) -> Iterator[tuple[Server, SharingServer]]:
    """Both, each with a clock of its own."""
    init_none_hash(get_hash_fn_by_name("sha256"))
    with ExitStack() as opened:
        opened.enter_context(torch.inference_mode())
        opened.enter_context(alike_ranks(ranks))
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="kvshare-device-")))
        config = vllm_config(profile.model, folder)
        plain = Server(profile, config, SimulatedGpu(profile.costs, Clock()))
        opened.callback(plain.close)
        gpu, config = SimulatedGpu(profile.costs, Clock()), vllm_config(profile.model, folder, shares=True)
        opened.enter_context(virtual_threads(gpu))
        shared = SharingServer(profile, config, gpu, settings, chooses=chooses)
        opened.callback(shared.close)
        yield plain, shared
