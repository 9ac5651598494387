"""The status of a running server, for `/ready`, `/metrics` and `/v1/models`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvshare.part_problems import PartProblem
from kvshare.parts import PartReading, ServedPart
from kvshare.telemetry import Counts
from vector_index import CircuitState


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The served model, as `/v1/models` reports it."""

    model_id: str
    created: int  # unix seconds
    max_model_len: int


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One vLLM behind the proxy."""

    name: str
    serves: bool  # takes requests
    shares: bool  # and its connector answers
    num_inflight: int
    num_segments: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class IndexStatus:
    """The state of the index: whether it is written, and how much disk space it has."""

    paused: str | None  # why nothing is written now; None: it is
    num_waiting: int  # prompts that are indexed when the pause ends
    free_bytes: int | None  # of its disk; None: the index is on another machine
    store_bytes: int | None = None  # of metadata and index on disk; None: they have no folder
    num_foreign_hits: int = 0  # search results from another namespace, which were discarded
    circuits: Mapping[str, CircuitState] = field(default_factory=dict)  # by the component they protect


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier of KV: what it holds, and what became of the segments that plans asked it for."""

    name: str  # memory, disk
    num_segments: int
    num_bytes: int
    max_bytes: int
    num_hits: int  # segments that were read from it
    num_misses: int  # that were not, after the tiers above it did not have them
    num_due_bytes: int = 0  # in memory, and not written here yet
    num_written: int = 0  # segments
    num_dropped: int = 0  # segments that could not be read, or were damaged
    num_late: int = 0  # that were not read in time
    problem: str | None = None  # why nothing is written now; None: it is
    is_late: bool = False  # it was read too late, a minute ago at most

    def reading(self) -> PartReading:
        if self.problem is not None:
            return PartReading(ServedPart.DISK, PartProblem.DISK_NOT_WRITTEN, self.problem)
        return PartReading(ServedPart.DISK, PartProblem.DISK_LATE if self.is_late else None)


@dataclass(frozen=True, slots=True)
class LoadStatus:
    """The extent of sharing at one load, and the figures that the controller compared for that."""

    load: str  # requests in flight at one engine: 1, 2-3, 4-7, ...
    rung: int  # 0: everything is shared; the higher, the less
    shared: str  # the rung in words
    slower: (
        float | None
    )  # by what share requests take longer with more sharing; negative: it saves; None: not known yet
    num_blocks_more: int  # of time that are compared now, with more sharing
    num_blocks_less: int  # and with less


@dataclass(frozen=True, slots=True)
class ControlStatus:
    """The findings and decisions of the controller of a whole server: see `kvshare.sharing.control`."""

    unshared_share: float  # of time; 0: nothing is compared
    num_requests: Mapping[str, int]  # by how they were served: usual, unshared, trial
    changes: Mapping[str, int]  # reduced, returned
    loads: tuple[LoadStatus, ...]  # those that were seen

    def reading(self) -> PartReading:
        reduced = [f"{each.shared} with {each.load} in flight" for each in self.loads if each.rung]
        problem = PartProblem.CONTROL_REDUCED if reduced else None
        return PartReading(ServedPart.CONTROL, problem, "; ".join(reduced))


@dataclass(frozen=True, slots=True)
class ShadowStatus:
    """The findings on answers that were computed once more in full (embedded engine). KL in nats."""

    share: float  # of approximate answers
    num_compared: int
    num_above: int  # deviated by more than their limit
    num_left_out: int  # were chosen while another one was computed
    measured: float  # sum
    expected: float  # sum of what was predicted for the same answers
    largest: float  # measured


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """The report of `/ready` and `/metrics`: whether the engine can serve, and its load."""

    ready: bool
    detail: str
    num_running: int = 0
    num_waiting: int = 0
    num_nodes: int = 0
    num_segments: int = 0
    kv_bytes: int = 0
    kv_budget_bytes: int = 0
    max_depth: int = 0
    counts: Counts = field(default_factory=Counts)
    num_embedding: int | None = None  # stored prompts still to be embedded; None: not known yet
    num_pending_tickets: int | None = None  # requests whose replica has not reported; None: no replicas
    replicas: tuple[ReplicaStatus, ...] = ()
    index: IndexStatus | None = None
    control: ControlStatus | None = None
    shadow: ShadowStatus | None = None  # None: not of this engine
    tiers: tuple[TierStatus, ...] = ()
    parts: tuple[PartReading, ...] = ()
    # Of KV, in all memories and on disk. Takes long with many namespaces.
    tenant_bytes: Callable[[], Mapping[str, int]] = dict
