"""
vLLM with the connector, behind the proxy, in a simulated benchmark. The connector's two sides, the plans, the
tickets and what is learned of costs are the product's.

Not here: HTTP, tokenizing and the index, whose time is a constant of the profile. The proxy is given which
prompt is the donor; what similar prompts an index would find is not simulated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from vllm.config import VllmConfig

from delta_tree import DeltaTree, NodeId, TokenIds
from kvshare.fleet.observation import observe
from kvshare.fleet.remote_tier import RemoteTier
from kvshare.fleet.replica_keeper import ReplicaKeeper
from kvshare.fleet.routed_request import Incoming, Routed, RoutedRequest
from kvshare.fleet.tickets import ticket_for
from kvshare.requests import Prompt, SharingMode
from kvshare.settings import Settings
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.tenants import owner_of_key
from kvshare.vllm_connector.config import ConnectorSettings
from kvshare.vllm_connector.connector import KVShareConnector
from kvshare.vllm_connector.worker.ranks import num_ranks
from kvshare.vllm_protocol.messages import Dropped, FinishedReport, Prefilled, budget_of
from kvshare.vllm_protocol.places import DiskProblem, Moved, OnDiskOnly
from kvshare.vllm_protocol.replica_info import ReplicaInfo
from kvshare_lab.device.admission import Controlled
from kvshare_lab.device.disk import SimulatedDisk
from kvshare_lab.device.engine import Answer
from kvshare_lab.device.gpu import SimulatedGpu
from kvshare_lab.device.lookups import Lookups, costs_of
from kvshare_lab.device.prefilling import Prefilling, SentRequest
from kvshare_lab.device.profile import Profile
from kvshare_lab.device.routing import Routing
from kvshare_lab.device.servers import Server
from kvshare_lab.device.worker import SimulatedWorker
from vector_index import PromptText

_NAMESPACE = "simulated"
_OWNER = owner_of_key("simulated", "private", "key")
_REPLICA = "simulated"
_DISK_BYTES = 1 << 50  # all fits
_Unstored = tuple[float, Prefilled | FinishedReport | Dropped]  # with when it is stored


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
        copies_blocks: bool = True,
        disk: SimulatedDisk | None = None,
    ) -> None:
        """
        Unless it `chooses`, as many tokens are repaired by place as a choice computes in all. Unless it
        `copies_blocks`, all copies come from host memory. `disk`: all that is saved is written there.
        """
        self._chooses, self.disk = chooses, disk
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
        self._connector.scheduler.donors.can_be_copied = copies_blocks
        self._num_read = 0
        self._tier = RemoteTier([_REPLICA])
        self._tier.memories[_REPLICA].max_bytes = budget_of(num_ranks() * profile.model.kv_bytes)
        self._keeper = ReplicaKeeper(
            DeltaTree.open(None, identity="bench"), self._tier, min_tokens=settings.sharing.min_prompt_tokens
        )
        self.cost = costs_of(settings, profile.model, clock=self.clock.now, has_disk=disk is not None)
        if disk is not None:
            self._connector.segments.disk.max_bytes = _DISK_BYTES
            self._connector.scheduler.disk.begin(())
        self._lookups = Lookups(
            self._keeper,
            profile.costs,
            limits=PlannerLimits.from_settings(settings, can_probe=True),
            cost=self.cost,
            namespace=_NAMESPACE,
        )
        self.engine.on_answer = lambda answer: self.admission.end(answer)
        self.admission = Controlled(settings.control, self._lookups.sharing, clock=self.clock.now)
        self._routing = Routing(self._lookups.sharing, self.admission, _NAMESPACE, chooses)
        self._prefilling = Prefilling(_REPLICA)
        self._sent: dict[str, SentRequest] = {}
        self._own: set[str] = set()  # requests that the proxy makes to measure
        self._in_flight: set[str] = set()  # tickets that are not reported
        self._unstored: deque[_Unstored] = deque()
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

    @contextmanager
    def calling(self, on_answer: Callable[[Answer], None]) -> Iterator[None]:
        """The controller learns of each answer, too."""

        def note(answer: Answer) -> None:
            self.admission.end(answer)
            on_answer(answer)

        with super().calling(note):
            yield

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
            disk=self.disk,
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
        report, plan = self.reports.get(request_id), self._sent[request_id].request.routed.plan
        if report is None:
            return f"full: {plan.reason}"  # it had no ticket
        reason = report.reason or plan.reason
        return report.decision if reason is None else f"{report.decision}: {reason}"

    def holds(self, prompt: TokenIds) -> bool:
        """Whether it is stored."""
        self.clock.sleep_until(self._stored_at)
        self.read_events()
        return self._keeper.tree.find(_NAMESPACE, prompt) is not None

    def leave_on_disk(self) -> None:
        """All that host memory has leaves it. It must be written."""
        self.clock.sleep_until(self._stored_at)
        segments = self._connector.segments
        assert all(segment_id in segments.disk for segment_id in segments.ids()), "all is written"
        self._connector.scheduler.drops.note(segments.evict(segments.ids()))
        self.read_events()

    def info(self) -> ReplicaInfo:
        """What the connector says of itself."""
        return self._connector.info()

    def drop(self, report: FinishedReport) -> None:
        """What was stored of a request of the proxy itself."""
        self._connector.scheduler.drop(segment.segment_id for segment in report.stored)

    def read_events(self) -> None:
        """
        As the proxy does: learn from what the connector reports, store what it has retained, and have it drop
        what is evicted. Its writer stores one prompt after the other.
        """
        journal, now = self._connector.events.read(self._num_read), self.clock.now()
        self._num_read = journal.last
        for event in journal.events:
            if isinstance(event, Moved | Dropped):
                self._prefilling.replica.note_places(event)
            if isinstance(event, OnDiskOnly):
                self._tier.note_places(_REPLICA, on_disk=event.came, in_memory=event.left)
            if isinstance(event, Moved | OnDiskOnly | DiskProblem):
                continue
            if isinstance(event, FinishedReport):
                self._learn(event)
            if not isinstance(event, Dropped) and event.ticket_id in self._own:
                continue
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

    def _store(self, event: Prefilled | FinishedReport | Dropped) -> None:
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
        self._prefilling.note(answer.sent_at)
        own, sent_at = Prompt(prompt, PromptText("", "")), answer.sent_at
        treatment = self.admission.begin(answer.request_id, own.num_tokens)
        if treatment.refusal is not None:
            routed = Routed(NoPlan(treatment.refusal))
        else:
            lookup = self._lookups.find(own, donor, mode, self._prefilling.replica.queue(self.cost.rates))
            routed, sent_at = (
                self._routing.routed(own, lookup, answer.request_id),
                answer.sent_at + lookup.seconds,
            )
        incoming = Incoming(_OWNER, own, mode, may_store=routed.ticket is not None and routed.ticket.store)
        request = RoutedRequest(incoming, routed, treatment=treatment)
        self._send_routed(SentRequest(request, answer), max_tokens, sent_at)

    def send_own(self, prompt: TokenIds, plan: Plan | NoPlan, *, at: float) -> Answer:
        """A request of the proxy itself, which measures what this plan takes. It is not in the tree."""
        answer = Answer(self._new_id(), at)
        ticket = ticket_for(plan, prompt, ticket_id=answer.request_id, namespace=_NAMESPACE, store=True)
        ticket = replace(ticket, from_memory=True)
        incoming = Incoming(_OWNER, Prompt(prompt, PromptText("", "")), SharingMode.APPROX, may_store=True)
        sent = SentRequest(RoutedRequest(incoming, Routed(plan, ticket)), answer)
        self._own.add(answer.request_id)
        self.engine.at(at, partial(self._send_routed, sent, 1, at))
        return answer

    def _send_routed(self, sent: SentRequest, max_tokens: int, sent_at: float) -> None:
        request, request_id = sent.request, sent.answer.request_id
        assert request.incoming.prompt is not None, "all have one"
        request.execution.replica = _REPLICA
        self._prefilling.add(sent, sent_at, self.cost.rates)
        self._sent[request_id] = sent
        if request.routed.ticket is not None:
            self._in_flight.add(request_id)
        token_ids = request.incoming.prompt.token_ids
        make = partial(
            self._request,
            request_id,
            token_ids,
            max_tokens,
            salt=request.salt,
            transfer=request.transfer_params,
        )
        self.engine.send(make, sent.answer, arrives_at=sent_at + self.profile.costs.fronts_s(len(token_ids)))
