"""The vLLM replicas behind one proxy: the state of each, and their order for the next request."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from delta_tree import SegmentId
from kvshare.errors import NoReplicaError
from kvshare.fleet.client import ControlClient, ServedModels, VllmClient
from kvshare.fleet.routed_request import RoutedRequest
from kvshare.namespace import Namespace, Owner
from kvshare.part_problems import PartProblem
from kvshare.parts import PartReading, ServedPart
from kvshare.reasons import Reason
from kvshare.sharing.plan import Plan
from kvshare.sharing.rates import Queue, Rates
from kvshare.vllm_protocol.messages import RANK_HEADER, Dropped
from kvshare.vllm_protocol.places import DiskProblem, Moved
from kvshare.vllm_protocol.replica_info import ReplicaInfo

log = logging.getLogger(__name__)

NAMESPACE_FIELDS = ("model", "revision", "tokenizer", "dtype", "kv_layout", "rope")


@dataclass(slots=True, eq=False)
class Replica:
    """One vLLM, or one of its data-parallel ranks. Its `Watcher` and its requests change its state."""

    name: str
    vllm: VllmClient = field(repr=False)
    control: ControlClient = field(repr=False)
    models: ServedModels | None = None  # None: vLLM does not answer
    refusal: str | None = None  # why it gets no requests although vLLM answers
    info: ReplicaInfo | None = None  # of the connector; None until connected, and after it is lost
    is_connected: bool = False  # the connector's journal is being read
    connector_problem: str | None = None  # why not, as its connector or the way there says
    num_inflight: int = 0
    requests: set[RoutedRequest] = field(default_factory=set, repr=False)  # those in flight
    in_blocks: set[SegmentId] = field(default_factory=set, repr=False)  # segments, as it has reported
    public_name: str | None = None  # what is said where no key is asked for; None: its name
    renders: bool = True  # false once vLLM answers that it has no /render routes

    @property
    def serves(self) -> bool:
        return self.models is not None and self.refusal is None

    @property
    def speculates(self) -> bool:
        return self.info is not None and bool(self.info.speculation)

    @property
    def shares(self) -> bool:
        return self.serves and self.is_connected and self.info is not None and self.info.shares

    def readings(self) -> Iterator[PartReading]:
        """Report the state of the replica, and of its disk if it has one."""
        yield self._reading()
        if self.info is not None and self.info.max_disk_bytes:
            of_disk, problem = self.info.disk_problem, PartProblem.DISK_REPLICA_NOT_WRITTEN
            if of_disk.is_lasting:
                problem = PartProblem.DISK_REPLICA_GIVEN_UP
            now = problem if of_disk.reason else None
            yield PartReading(ServedPart.DISK, now, of_disk.reason, self.name, self.public_name)

    def _reading(self) -> PartReading:
        problem, cause = None, ""
        if self.refusal is not None:
            problem, cause = PartProblem.REPLICA_REFUSED, f"it {self.refusal}"
        elif self.models is None:
            problem = PartProblem.REPLICA_SILENT
        elif not self.is_connected or self.info is None:
            problem = PartProblem.REPLICA_NO_CONNECTOR
            cause = self.connector_problem or "its connector has not answered yet"
        elif not self.info.shares:
            problem = PartProblem.REPLICA_UNSHARED
            cause = "; ".join(filter(None, (*self.info.refusals, self.info.passing)))
        elif self.info.warnings:
            problem, cause = PartProblem.REPLICA_WARNS, "; ".join(self.info.warnings)
        return PartReading(ServedPart.REPLICA, problem, cause, self.name, self.public_name)

    def queue(self, rates: Rates) -> Queue:
        """Return what it has to load and compute before the next request, as far as that is planned here."""
        loading_s = computing_s = 0.0
        for request in self.being_prefilled():
            if isinstance(plan := request.routed.plan, Plan):
                loading_s += plan.estimate.load_s
                computing_s += plan.estimate.compute_s
            elif (prompt := request.incoming.prompt) is not None:
                computing_s += rates.full_s(prompt.num_tokens)
        return Queue(loading_s, computing_s, self.in_blocks)

    def note_disk(self, problem: DiskProblem) -> None:
        assert self.info is not None, "its journal is read when it is known"
        self.info = replace(self.info, disk_problem=problem)

    def note_places(self, event: Moved | Dropped) -> None:
        """Plans for it know from where each segment would be copied."""
        if isinstance(event, Moved):
            self.in_blocks.difference_update(event.left)
            self.in_blocks.update(event.came)
        else:
            self.in_blocks.difference_update(event.segment_ids)

    @contextmanager
    def computing(self, request: RoutedRequest) -> Iterator[None]:
        """Count a request while it is sent here and answered. Notes which prefills were alone."""
        others = self.being_prefilled()
        for other in others:
            other.progress.was_alone = False
        request.progress.was_alone = not others
        request.progress.sent_at = time.perf_counter()
        self.requests.add(request)
        try:
            yield
        finally:
            self.requests.discard(request)

    def being_prefilled(self) -> list[RoutedRequest]:
        """Return the requests in flight whose first token has not come."""
        return [request for request in self.requests if not request.progress.is_prefilled]

    @property
    def headers(self) -> Mapping[str, str]:
        """Return the header that sends a request to this rank; empty until the connector reports its rank."""
        rank = self.info.data_parallel_rank if self.info is not None else None
        return {} if rank is None else {RANK_HEADER: str(rank)}

    @property
    def shares_store(self) -> bool:
        """Other replicas can read what it has stored."""
        return self.info is not None and bool(self.info.shared_store)

    @property
    def holder(self) -> str:
        """Return the name under which its readable KV is held: its own, or its shared store's."""
        return self.info.shared_store if self.info is not None and self.info.shared_store else self.name

    def namespace(self, owner: Owner) -> Namespace:
        """Return an owner's namespace in the KV that this replica reads. Only for replicas that share."""
        assert self.info is not None, "namespaces are for replicas that share"
        parts = {name: self.info.namespace_fields[name] for name in NAMESPACE_FIELDS}
        return Namespace(**asdict(owner), **parts, holder=self.holder)


class Fleet:
    """All replicas of one model, and which of them serve and share."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = tuple(replicas)
        self.models: ServedModels | None = None  # what all replicas serve; None until one has answered
        self._next = 0  # the replica that comes first among equally idle ones

    def serving(self) -> list[Replica]:
        """
        Return the replicas that take requests, those with fewest requests first; equal ones in rotation.

        Only `advance_rotation` changes the rotation.
        """
        rotated = self.replicas[self._next :] + self.replicas[: self._next]
        return sorted((entry for entry in rotated if entry.serves), key=lambda entry: entry.num_inflight)

    def sharing(self) -> list[Replica]:
        return [replica for replica in self.serving() if replica.shares]

    @property
    def why_none_shares(self) -> Reason:
        infos = [replica.info for replica in self.serving() if replica.info is not None]
        if any(info.passing and not info.refusals for info in infos):
            return Reason.SPECULATION
        return Reason.NO_CONNECTOR

    @property
    def shares_media(self) -> bool:
        """Return whether every replica that plans are made for shares prompts with images, too."""
        sharing = self.sharing()
        return bool(sharing) and all(one.info is not None and one.info.can_share_media for one in sharing)

    def idlest(self, *, without: Collection[Replica] = ()) -> Replica:
        """Return the serving replica with fewest requests. Raises NoReplicaError."""
        replica = next((entry for entry in self.serving() if entry not in without), None)
        if replica is None:
            raise NoReplicaError
        return replica

    def advance_rotation(self) -> None:
        """Called once per sent request, so that equally idle replicas take turns."""
        self._next = (self._next + 1) % len(self.replicas)

    def check_models(self, replica: Replica) -> None:
        """Called when a replica's models are known. It gets no requests if they differ from the others'."""
        assert replica.models is not None, "called when they are known"
        replica.refusal = None
        others = [other for other in self.replicas if other is not replica and other.serves]
        if not others or self.models is None:
            self.models = replica.models
            for other in self.replicas:  # refused until now
                if other.models is not None and set(other.models.names) == set(replica.models.names):
                    other.refusal = None
        elif set(replica.models.names) != set(self.models.names):
            replica.refusal = f"serves {_listed(replica.models)}, the others serve {_listed(self.models)}"
            log.error(
                "replica %s gets no requests: it %s. Serve the same model there, or remove the replica",
                replica.name,
                replica.refusal,
            )

    def check_ranks(self, replica: Replica) -> None:
        """Called when a connector is connected: warns if some of its ranks are not configured as replicas."""
        assert replica.info is not None, "called when it is known"
        size = replica.info.data_parallel_size
        num_configured = sum(other.vllm.url == replica.vllm.url for other in self.replicas)
        if num_configured < size:
            log.warning(
                "%s has %d data-parallel ranks, %d of them are replicas here: the others get no requests; "
                "set data_parallel_size: %d in vllm.replicas, or give --vllm-data-parallel-size %d",
                *(replica.vllm.url, size, num_configured, size, size),
            )

    def check_stores(self, replica: Replica) -> None:
        """Called when a connector is connected: warns if another replica names another shared store."""
        info = replica.info
        assert info is not None, "called when it is known"
        for other in self.replicas if info.shared_store else ():
            theirs = other.info.shared_store if other.info is not None else ""
            if theirs and theirs != info.shared_store:
                log.warning(
                    "replicas %s and %s share KV through stores of different addresses: neither can use what "
                    "the other stores. If it is one store, give both vLLMs the same --shared-tier",
                    *(other.name, replica.name),
                )
                return


def _listed(models: ServedModels) -> str:
    return ", ".join(models.names) or "nothing"
