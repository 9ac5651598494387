"""
What the scheduler side requests and the worker side reports back. Plain values; they cross processes.

Copies of loads begin before vLLM's own forward pass of a step, in which segments are dropped, too; behind it
come passes for what has arrived, then saves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from delta_tree import SegmentId, Span, gaps, merge
from kvshare.sharing.plan import RepairOrder
from kvshare.vllm_protocol.messages import WireCopy


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """
    Make the slots [start, end) of a request valid: copies are placed, everything between them is computed.

        0        start                           end      num_tokens
        [ local ][ copy ][ run ][ copy ][ run ][ copy ][ tail: vLLM's own forward ]

    With an `order`, some of the copies are computed again; to learn which, the tail is computed here, too,
    and the end is that of the prompt.
    """

    request_id: str
    block_ids: tuple[int, ...]  # the request's block table, vLLM's block size
    start: int
    end: int
    token_ids: tuple[int, ...] = field(repr=False)  # of [0, end) or more; vLLM logs it when a step fails
    copies: tuple[WireCopy, ...]  # ascending; those wholly before `start` are left out
    order: RepairOrder | None = None  # what is still to be chosen of [start, end)
    first_approximate: int = 0

    def targets(self, unreadable: frozenset[SegmentId] = frozenset()) -> list[tuple[WireCopy, Span]]:
        """The copies to write, each with the part of its target that lies behind `start`."""
        return [
            (copy, Span(max(copy.target_start, self.start), copy.target.end))
            for copy in self.copies
            if copy.segment_id not in unreadable
        ]

    def runs(self, unreadable: frozenset[SegmentId] = frozenset()) -> tuple[Span, ...]:
        """What must be computed: all that no copy covers."""
        placed = [span for _, span in self.targets(unreadable)]
        return gaps(merge([Span(0, self.start), *placed]), self.end)


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """
    Save spans of a request as segments: of its prompt, while it runs, or when it has ended.

    The blocks of one that has ended stay allocated until that is reported.
    """

    request_id: str
    block_ids: tuple[int, ...]
    spans: tuple[tuple[SegmentId, Span], ...]
    has_ended: bool = True

    def without(self, segment_ids: Collection[SegmentId]) -> SaveRequest:
        return replace(self, spans=tuple(entry for entry in self.spans if entry[0] not in segment_ids))


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the workers are to do in one step."""

    loads: tuple[LoadRequest, ...] = ()
    saves: tuple[SaveRequest, ...] = ()
    drops: tuple[SegmentId, ...] = ()
    cancelled: tuple[str, ...] = ()  # nobody waits for these loads; their blocks are held until they are over
    preempted: frozenset[str] = frozenset()  # their blocks may be others' from this step on
    has_forward: bool = True


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How one load went. What could not be read was computed. If it failed, everything was or will be."""

    failed: bool = False
    unreadable: frozenset[SegmentId] = frozenset()
    repaired: tuple[Span, ...] = ()  # of the copies, chosen and computed


@dataclass(slots=True)
class Transfers:
    """Requests by what has come to its end."""

    saved: set[str] = field(default_factory=set)  # ended ones: their blocks are no longer needed
    loaded: set[str] = field(default_factory=set)  # or not, see `failed`
    failed: set[str] = field(default_factory=set)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What happened while a worker carried out a step's requests, by vLLM's request id."""

    loads: dict[str, LoadResult] = field(default_factory=dict)
    saved_prompts: set[str] = field(default_factory=set)  # of requests that run on
    failed_saves: set[str] = field(default_factory=set)
    stage_seconds: dict[str, dict[str, float]] = field(default_factory=dict)  # fetch, lay, pass, save

    @property
    def unreadable(self) -> frozenset[SegmentId]:
        return frozenset().union(*(result.unreadable for result in self.loads.values()))

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Ranks agree on what is readable before they load; a load or save counts if no rank failed."""
        assert isinstance(other, WorkerReport)
        loads = dict(self.loads)
        for request_id, result in other.loads.items():
            mine = loads.get(request_id, result)
            loads[request_id] = LoadResult(
                mine.failed or result.failed,
                mine.unreadable | result.unreadable,
                mine.repaired,  # ranks choose from the same scores
            )
        return WorkerReport(
            loads,
            self.saved_prompts | other.saved_prompts,
            self.failed_saves | other.failed_saves,
            {**other.stage_seconds, **self.stage_seconds},
        )


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """What a worker reports once, after its self-test."""

    unsupported: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    # What follows is known if the self-test could run.
    can_move_keys: bool = False
    can_listen: bool = False
    rope: str = "unknown"  # digest of the rotary frequencies
    num_layers: int = 0
    num_kv_heads: int = 0  # of this rank
    head_dim: int = 0
    dtype: str = "unknown"
    attention_backend: str = "unknown"
    bytes_per_token: int = 0  # of this rank
    weights: str = ""  # digest of a sample of this rank's weights
    fingerprint: str = ""  # of the model, the same on all ranks
