"""
The documents that answer administrators: JSON-ready, with spans and counts, and no token ids.

Segment ids are written as 16 hex digits: they do not fit a JSON number. Spans are `[start, end]`, half-open.
"""

from __future__ import annotations

from typing import TypedDict


class StoredTotals(TypedDict):
    """Figures over all prompts, or those of one namespace."""

    num_nodes: int
    num_roots: int
    num_pinned: int
    num_segments: int
    num_tokens: int
    num_stored_tokens: int
    num_bytes: int
    max_depth: int


class NamespaceTotals(StoredTotals):
    namespace: str
    tenant: str | None  # None: not known


class TenantTotals(StoredTotals):
    """The sums of all namespaces of a tenant. `max_bytes`: its limit; None if it has none."""

    tenant: str
    max_bytes: int | None


class StoreStats(TypedDict):
    """The figures of any store, also of one whose server is stopped."""

    totals: StoredTotals
    namespaces: list[NamespaceTotals]
    tenants: list[TenantTotals]


class LoadCosts(TypedDict):
    fixed_s: float
    bytes_per_s: float


class Costs(TypedDict):
    """The rates that plans are priced with, and which of them were measured."""

    step_s: float
    token_s: float
    pair_s: float
    pass_s: float
    reused_s: float
    loads: dict[str, LoadCosts]  # by place
    full_s: dict[str, float]  # of prompts of so many tokens, as the next two
    lookup_s: dict[str, float]
    embedding_s: dict[str, float]
    bytes_per_token: int
    num_extra_passes: int
    machine: str  # that they are measured on, in words; empty until it is known
    measured: list[str]
    break_even_tokens: int | None


class PinnedBytes(TypedDict):
    num_bytes: int
    max_bytes: int


class LoadControl(TypedDict):
    """See `kvshare.status.LoadStatus`."""

    load: str
    rung: int
    shared: str
    slower: float | None
    num_blocks_more: int
    num_blocks_less: int


class ControlDocument(TypedDict):
    """The controller's findings and decisions: see `kvshare.status.ControlStatus`."""

    unshared_share: float
    num_requests: dict[str, int]
    changes: dict[str, int]
    loads: list[LoadControl]


class TierDocument(TypedDict):
    """See `kvshare.status.TierStatus`."""

    name: str
    num_segments: int
    num_bytes: int
    max_bytes: int
    num_hits: int
    num_misses: int
    num_due_bytes: int
    num_written: int
    num_dropped: int
    num_late: int
    problem: str | None


class ServerStats(StoreStats):
    """
    The same of a running server: with its rates, its controller, the KV of its pinned prompts, and the tiers
    of KV in its process.
    """

    costs: Costs
    control: ControlDocument
    pins: PinnedBytes
    tiers: list[TierDocument]


class NodeSummary(TypedDict):
    id: int
    namespace: str
    tenant: str | None  # None: not known
    num_tokens: int
    exact_length: int
    num_bytes: int  # KV that it points to; what is not its own is other prompts' as well
    own_bytes: int
    subtree_bytes: int
    num_hits: int
    age_s: float
    idle_s: float
    pinned: bool


class TreeEntry(NodeSummary):
    """A prompt, and those below it down to the depth that was asked for."""

    num_children: int
    children: list[TreeEntry]


class TreeDocument(TypedDict):
    depth: int
    num_roots: int  # there are; `roots` has those that were asked for
    roots: list[TreeEntry]


class EditDocument(TypedDict):
    op: str
    source: list[int]
    target: list[int]


class EditsDocument(TypedDict):
    """Counts are in tokens of the target, for deletes of the source."""

    counts: dict[str, int]
    ops: list[EditDocument]


class PieceDocument(TypedDict):
    """The place of a stretch's KV. A shift is the distance to the position at which it was computed."""

    start: int
    end: int
    segment: str
    offset: int
    shift: int
    generation: int
    num_references: int
    num_bytes: int


class SharedTokens(TypedDict):
    id: int
    num_tokens: int


class NodeDocument(NodeSummary):
    """
    One prompt. It lists at most 100 children, and at most 100 prompts that share KV with it. `num_children`
    is exact; `num_shared_with` is a lower bound.
    """

    parents: list[int]
    num_children: int
    children: list[int]
    edits: EditsDocument | None  # from its parent; None of a root
    pieces: list[PieceDocument]
    num_shared_with: int
    shared_with: list[SharedTokens]


class DiffDocument(TypedDict):
    a: int
    b: int
    namespace: str
    num_common_prefix: int
    kept_share_of_a: float
    kept_share_of_b: float
    edits: EditsDocument


class EvictionDocument(TypedDict):
    dry_run: bool
    num_nodes: int
    num_segments: int
    freed_bytes: int


class PinDocument(TypedDict):
    """The number of prompts, and the KV that they point to, part of which other prompts may share."""

    num_nodes: int
    num_bytes: int
