"""
What the scheduler side requests and the worker side reports back: plain values that cross processes.

In a step, a worker starts copies and drops segments before vLLM's forward pass. After it, the worker computes
placeholders of loads whose copies have arrived, then it starts saves. Loads that join a step are complete
before its forward pass, in which vLLM may compute the rest of their requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from delta_tree import Segment, SegmentId, Span, TokenIds, gaps, merge
from kvshare.sharing.plan import RepairOrder
from kvshare.vllm_protocol.messages import WireCopy

Tokens = TokenIds | tuple[int, ...]
"""The scheduler side sends arrays, which cross to the workers' processes as bytes."""


@dataclass(frozen=True, slots=True)
class BlockSource:
    """
    Where rows lie in vLLM's cache: from token `first` of the first block on. `follows_steps`: steps in flight
    may still compute them.
    """

    block_ids: tuple[int, ...]
    first: int
    follows_steps: bool = False


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """
    Fill the slots [start, end) of a request: write the copies, compute everything between them.

        0        start                           end      num_tokens
        [ local ][ copy ][ run ][ copy ][ run ][ copy ][ tail: vLLM's own forward pass ]

    With an `order` (of repairs), the worker chooses copied tokens to compute again. To choose, it needs what
    the tail attends to, so it computes the tail as well: `end` is then the end of the prompt.
    """

    request_id: str
    block_ids: tuple[int, ...]  # the request's block table, vLLM's block size
    start: int
    end: int
    token_ids: Tokens = field(
        repr=False, compare=False
    )  # of [0, end) or more; not for vLLM's log of failed steps
    copies: tuple[WireCopy, ...]  # ascending; those wholly before `start` are left out
    order: RepairOrder | None = None  # repairs that the worker is to choose in [start, end)
    first_approximate: int = 0
    sources: Mapping[WireCopy, BlockSource] = field(default_factory=dict)  # of copies not from host memory
    reads_within_s: float = 0.0  # what is not read from disk by then is computed
    media: tuple[Span, ...] = ()  # that a pass cannot compute
    has_head: bool = False  # whose rows depend on the following token, see `head_rows`
    shared: tuple[Segment, ...] = ()  # of those that are read: what others have written to a shared store

    @property
    def stored_ids(self) -> frozenset[SegmentId]:
        """Return the segments of which something is read from host memory."""
        return frozenset(copy.segment_id for copy in self.copies if copy not in self.sources)

    @property
    def num_from_blocks(self) -> int:
        """Return the number of tokens that are not copied from host memory."""
        return sum(len(target) for copy, target in self.targets() if copy in self.sources)

    @property
    def follows_steps(self) -> bool:
        """Return whether it reads rows that steps in flight may still compute."""
        return any(source.follows_steps for source in self.sources.values())

    def targets(self, unreadable: frozenset[SegmentId] = frozenset()) -> list[tuple[WireCopy, Span]]:
        """The copies to write, each with the part of its target from `start` on."""
        return [
            (copy, Span(max(copy.target_start, self.start), copy.target.end))
            for copy in self.copies
            if copy.segment_id not in unreadable
        ]

    def runs(self, unreadable: frozenset[SegmentId] = frozenset()) -> tuple[Span, ...]:
        """Return the spans to compute: those that no readable copy covers."""
        placed = [span for _, span in self.targets(unreadable)]
        return gaps(merge([Span(0, self.start), *placed]), self.end)

    def head_rows(self, unreadable: frozenset[SegmentId] = frozenset()) -> tuple[int, ...]:
        """
        The positions of copies where a drafting head's row is computed here. Ascending.

        The last one of each copy: its row has seen the token that followed in the donor. Not where the next
        copy goes on in the same segment. And one that moves from or to position 0, whose token MTP masks.
        """
        if not self.has_head:
            return ()
        placed = self.targets(unreadable)
        begins = {(copy.segment_id, copy.offset, copy.target_start) for copy, _ in placed}
        ends = ((copy.segment_id, copy.offset + copy.length, target.end) for copy, target in placed)
        moved = (
            (copy, target) for copy, target in placed if copy.shift and target.start == copy.target_start
        )
        masked = {target.start for copy, target in moved if 0 in (copy.source_position, target.start)}
        return tuple(sorted(masked | {end[2] - 1 for end in ends if end not in begins}))

    @property
    def head(self) -> Span:
        """Return what comes before the first copy: it attends to nothing that is copied."""
        first = min((target.start for _, target in self.targets()), default=self.end)
        return Span(self.start, max(self.start, first))

    def passed(self, unreadable: frozenset[SegmentId] = frozenset()) -> tuple[Span, ...]:
        """Return what a pass goes over: what it computes, and rows of copies for a drafting head."""
        rows = (Span(place, place + 1) for place in self.head_rows(unreadable))
        return merge([*self.runs(unreadable), *rows])

    def lacks_media(self, unreadable: frozenset[SegmentId]) -> bool:
        """Return whether some of what would be computed lies in a medium."""
        runs = self.runs(unreadable) if self.media else ()
        return any(run.intersection(medium) for run in runs for medium in self.media)


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """
    Save spans of a request as segments, either of its prompt while it runs, or of all of it after its end.

    The blocks of an ended request stay allocated until the save is reported.
    """

    request_id: str
    block_ids: tuple[int, ...]
    spans: tuple[tuple[SegmentId, Span], ...] = ()
    has_ended: bool = True

    def without(self, segment_ids: Collection[SegmentId]) -> SaveRequest:
        return replace(self, spans=tuple(entry for entry in self.spans if entry[0] not in segment_ids))


@dataclass(frozen=True, slots=True)
class PreloadRequest:
    """
    Read segments from disk into memory for a request that waits for blocks. `shared`: of them, what others
    have written to a shared store.
    """

    request_id: str
    segment_ids: tuple[SegmentId, ...]
    shared: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class Preloads:
    """`over`: requests that do not wait any more. Their loads have begun, or never will."""

    begun: tuple[PreloadRequest, ...] = ()
    over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Write a segment to disk that host memory has whole."""

    segment_id: SegmentId
    namespace: str
    first_position: int  # in the prompt that it was computed for


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The tasks of the workers in one step."""

    loads: tuple[LoadRequest, ...] = ()
    saves: tuple[SaveRequest, ...] = ()
    drops: tuple[SegmentId, ...] = ()
    cancelled: tuple[str, ...] = ()  # loads of aborted requests; their blocks stay until the copies end
    preempted: frozenset[str] = frozenset()  # requests that lose their blocks in this step
    has_forward: bool = True
    number: int = 0  # counts the steps
    joining: tuple[str, ...] = ()  # loads that are complete before the step's forward pass
    arriving: tuple[str, ...] = ()  # loads to announce to vLLM as arrived: they join a later step
    evictions: tuple[SegmentId, ...] = ()  # segments that leave host memory and stay on disk
    writes: tuple[WriteRequest, ...] = ()
    preloads: Preloads = Preloads()


@dataclass(frozen=True, slots=True)
class LoadResult:
    """
    Outcome of a load. Unreadable segments were computed instead; if it failed, vLLM computes it all, or the
    worker has, where it joined a step. `late`: the unreadable ones that were not read from disk in time, or
    had no room in memory.
    """

    failed: bool = False
    unreadable: frozenset[SegmentId] = frozenset()
    repaired: tuple[Span, ...] = ()  # copied tokens that were chosen and computed again
    late_s: float = 0.0  # that vLLM's stream waited for the copies of a load that joined a step
    late: frozenset[SegmentId] = frozenset()


@dataclass(frozen=True, slots=True)
class DiskReport:
    """Segments whose files are whole, and why nothing is written now, if so."""

    written: tuple[SegmentId, ...] = ()
    problem: str | None = None


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """A worker's results since its last report, by vLLM's request id."""

    loads: dict[str, LoadResult] = field(default_factory=dict)
    saved_prompts: set[str] = field(default_factory=set)  # of requests that are still running
    failed_saves: set[str] = field(default_factory=set)
    stage_seconds: dict[str, dict[str, float]] = field(default_factory=dict)  # see `FinishedReport`
    has_new_weights: bool = False  # KV of the old ones is worthless, saved or not
    step: int | None = None  # the number of the last step that had a forward pass
    arriving: set[str] = field(default_factory=set)  # loads that were announced to vLLM as arrived
    copied: set[str] = field(default_factory=set)  # loads that do not read other requests' blocks any more
    disk: DiskReport | None = None

    @property
    def unreadable(self) -> frozenset[SegmentId]:
        """Return the segments that are missing or damaged wherever they should be."""
        return frozenset().union(*(result.unreadable - result.late for result in self.loads.values()))

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Combine two ranks' reports: a load or save counts only if no rank failed."""
        assert isinstance(other, WorkerReport)
        loads = dict(self.loads)
        for request_id, result in other.loads.items():
            mine = loads.get(request_id, result)
            loads[request_id] = LoadResult(
                mine.failed or result.failed,
                mine.unreadable | result.unreadable,
                mine.repaired,  # ranks choose from the same scores
                max(mine.late_s, result.late_s),
                mine.late | result.late,
            )
        return WorkerReport(
            loads,
            self.saved_prompts | other.saved_prompts,
            self.failed_saves | other.failed_saves,
            {**other.stage_seconds, **self.stage_seconds},
            self.has_new_weights or other.has_new_weights,
            self.step,  # the same on all ranks
            self.arriving | other.arriving,
            self.copied | other.copied,  # a rank reports what all ranks have done
            self.disk or other.disk,  # several ranks have none
        )


@dataclass
class WorkerHandshake(KVConnectorHandshakeMetadata):
    """The report that a worker makes once, after its self-test."""

    unsupported: tuple[str, ...]  # reasons why nothing can be shared
    warnings: tuple[str, ...] = ()
    unverified: str = ""  # why the rows of what drafts are not known to be right: requests pass unshared
    # The rest is known only if the self-test could run.
    can_move_keys: bool = False
    can_listen: bool = False
    can_copy_blocks: bool = False  # from one block of vLLM's cache to another
    rope: str = "unknown"  # digest of the rotary frequencies
    num_layers: int = 0
    num_kv_heads: int = 0  # of this rank
    head_dim: int = 0
    kv_planes: str = (
        ""  # of this rank, where layers differ in shape: heads and dimensions above are the first's
    )
    dtype: str = "unknown"
    attention_backend: str = "unknown"
    bytes_per_token: int = 0  # of this rank
    weights: str = ""  # digest of a sample of this rank's weights
    fingerprint: str = ""  # of the model, the same on all ranks
    device: str = "unknown"  # that it computes on, in words
    on_disk: tuple[Segment, ...] = ()  # that an earlier process left
    has_disk: bool = False  # or a shared store: something below memory
    has_files: bool = False  # a disk
    shared_form: str = ""  # fingerprint of the objects in a shared store; empty: there is none
