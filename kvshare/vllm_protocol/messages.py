"""
What the proxy and the connector inside vLLM send each other. Values and their JSON; no HTTP, no vLLM.

    proxy --  POST /v1/...  kv_transfer_params = {"kvshare": Ticket}  -->  vLLM's scheduler
    proxy <-- GET  /journal what came of it, and which segments are gone -- control server in the connector

A ticket travels through vLLM's own request, so that plan and prompt cannot be separated. Answers stream back
untouched; what really happened is read from the journal. Everything is checked when it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from delta_tree import SegmentId, Span, TokenIds
from kvshare.vllm_protocol.json_fields import Flag, Message, Number, Text

PROTOCOL = 3
HEADROOM = 8  # one part in so many of a replica's memory
TICKET_KEY = "kvshare"  # in kv_transfer_params
WORKER_CLASS = "kvshare.vllm_connector.workers.KVShareWorker"  # for --worker-cls
RANK_HEADER = "X-data-parallel-rank"  # vLLM's own: the engine that a request goes to
TOKEN_VARIABLE = "KVSHARE_VLLM_TOKEN"  # environment: the secret that opens the control server

_Segment = Annotated[SegmentId, Field(strict=True, gt=0)]


class VersionedMessage(Message):
    """One that says by which protocol it was written."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        return {"protocol": PROTOCOL, **super().to_json()}

    @model_validator(mode="before")
    @classmethod
    def _check_protocol(cls, document: object) -> object:
        if isinstance(document, dict) and document.get("protocol") != PROTOCOL:
            raise ValueError(f"protocol: expected {PROTOCOL}, got {document.get('protocol')!r}")
        return document


class WireCopy(NamedTuple):
    """
    Stored KV for a stretch of the prompt; a row in JSON. `source_position`: where its first token stood when
    it was computed.
    """

    segment_id: _Segment
    offset: Number  # first token within the segment
    length: Number
    target_start: Number
    source_position: Number

    @property
    def target(self) -> Span:
        return Span(self.target_start, self.target_start + self.length)

    @property
    def shift(self) -> int:
        """How many positions the keys move."""
        return self.target_start - self.source_position


class WireSpan(NamedTuple):
    """Positions [start, end); a row in JSON."""

    start: Number
    end: Number

    @property
    def span(self) -> Span:
        return Span(self.start, self.end)


@dataclass(frozen=True, slots=True)
class WireOrder(Message):
    """
    Of the copies in `pieces` the connector computes `num_tokens` again; which, it learns in a probe pass.

    It provides everything in front of `end`; behind that is the tail, which vLLM computes. See
    `kvshare.sharing.plan.RepairOrder`.
    """

    pieces: tuple[WireSpan, ...]  # ascending, disjoint
    probes: tuple[Number, ...]
    num_tokens: Number
    end: Number


@dataclass(frozen=True, slots=True)
class Ticket(VersionedMessage):
    """
    One request's plan, and whether its KV may be retained.

    Positions that no copy covers are placeholders; the last token always is one. Without copies there is no
    plan: the prompt is computed as it would be without us, and retained if `keep` says so.
    """

    request_id: Text  # the proxy's; comes back in `Finished`
    namespace: Text  # digest; segments of another one are never used
    prompt_digest: Text  # of the token ids the plan was made for, see `digest_of`
    num_tokens: Number
    exact_length: Number = 0  # copies inside [0, exact_length) are exact
    copies: tuple[WireCopy, ...] = ()  # ascending by target, disjoint
    keep: Flag = True
    order: WireOrder | None = None  # repairs that are still to be chosen

    @property
    def is_exact(self) -> bool:
        """
        All copies are exact: the KV may enter vLLM's own prefix cache.

        Any other ticket is only honoured with `private_salt(request_id)` as its request's cache_salt.
        """
        return all(copy.target.end <= self.exact_length for copy in self.copies)

    @model_validator(mode="after")
    def _check_copies(self) -> Self:
        end = 0
        for copy in self.copies:
            if copy.target_start < end or copy.length < 1 or copy.target.end > self.num_tokens - 1:
                raise ValueError(
                    f"copies: [{copy.target_start}, {copy.target.end}) overlaps, is empty or reaches "
                    f"the last of {self.num_tokens} tokens"
                )
            if copy.target_start < self.exact_length < copy.target.end:
                raise ValueError(f"copies: one crosses the end of the exact prefix at {self.exact_length}")
            if copy.target_start < self.exact_length and copy.shift:
                raise ValueError("copies: an exact one moves")
            end = copy.target.end
        if self.order is not None:
            self._check_order(self.order, end)
        return self

    def _check_order(self, order: WireOrder, end_of_copies: int) -> None:
        if not max(end_of_copies, 1) <= order.end < self.num_tokens:
            raise ValueError(f"order: expected an end from {end_of_copies} to {self.num_tokens - 1}")
        end = self.first_approximate
        for piece in order.pieces:
            if not end <= piece.start < piece.end <= end_of_copies:
                raise ValueError(
                    f"order: a piece [{piece.start}, {piece.end}) overlaps, is empty or not copied"
                )
            end = piece.end
        ascending = all(before < probe for before, probe in pairwise(order.probes))
        inside = all(any(p.start <= probe < p.end for p in order.pieces) for probe in order.probes)
        num_copied = sum(piece.end - piece.start for piece in order.pieces)
        if not ascending or not inside or order.num_tokens > num_copied:
            raise ValueError(
                "order: expected ascending probes in its pieces, and no more repairs than those have"
            )

    @property
    def first_approximate(self) -> int:
        """Position of the first approximate copy; num_tokens if there is none."""
        starts = (copy.target_start for copy in self.copies if copy.target_start >= self.exact_length)
        return min(starts, default=self.num_tokens)


class Stored(NamedTuple):
    """A segment that was retained of a request; a row in JSON."""

    segment_id: _Segment
    start: Number  # position of its first token
    length: Number
    num_bytes: Number  # over all ranks


@dataclass(frozen=True, slots=True)
class Prefilled(Message):
    """
    A ticketed request runs on, and its prompt is retained: others can copy from it already.

    The members are those of `Finished`, which repeats them and adds the answer.
    """

    request_id: Text
    used: tuple[Number, ...]
    stored: tuple[Stored, ...]  # of the prompt
    repaired: tuple[WireSpan, ...] = ()
    kind: Literal["prefilled"] = "prefilled"


@dataclass(frozen=True, slots=True)
class Finished(Message):
    """
    A ticketed request has ended, and its KV is retained where it should be.

    The KV of the retained positions comes from the copies `used` (indices into the ticket's), but for what
    was `repaired` of them, and from `stored`; all are empty where nothing was retained. `output_ids` are the
    generated tokens among them.
    """

    request_id: Text
    decision: Literal["approx", "exact", "full"]  # what vLLM computed with, whatever was planned
    reason: str | None  # why less was shared than planned; a fixed word
    used: tuple[Number, ...] = ()
    num_computed: Number = 0  # prompt tokens that were computed here
    num_local: Number = 0  # prompt tokens that vLLM's own prefix cache had
    output_ids: tuple[Number, ...] = ()
    stored: tuple[Stored, ...] = ()
    repaired: tuple[WireSpan, ...] = ()
    stage_seconds: Mapping[str, float] = field(default_factory=dict)  # lay, pass, save
    kind: Literal["finished"] = "finished"


@dataclass(frozen=True, slots=True)
class Dropped(Message):
    """Segments that are gone: evicted to make room, unreadable, or on request."""

    segment_ids: tuple[_Segment, ...]
    kind: Literal["dropped"] = "dropped"


JournalEvent = Prefilled | Finished | Dropped


@dataclass(frozen=True, slots=True)
class Journal(Message):
    """
    Events after a sequence number. A new `epoch` means a new process: all it held before is gone.

    `gap`: events in between were forgotten; what is held must be asked for with `GET /segments`.
    """

    epoch: Text
    last: Number  # sequence number of the newest event
    gap: Flag
    events: tuple[Annotated[JournalEvent, Field(discriminator="kind")], ...]


@dataclass(frozen=True, slots=True)
class HeldSegments(Message):
    """`GET /segments`: what a connector holds, as of an event of its journal."""

    epoch: Text
    last: Number
    segment_ids: tuple[_Segment, ...]


@dataclass(frozen=True, slots=True)
class ReplicaInfo(VersionedMessage):
    """`GET /info`: what a vLLM with the connector can do, and what its KV is."""

    epoch: Text
    model: Text
    versions: Mapping[str, str]  # vllm, kvshare, torch
    refusals: tuple[str, ...]  # why nothing is shared here; empty where it is
    warnings: tuple[str, ...]  # what works, but not as meant
    can_move_keys: Flag
    namespace_fields: Mapping[str, str]  # model, revision, tokenizer, dtype, kv_layout, rope
    bytes_per_token: Number
    max_bytes: Number
    num_bytes: Number
    num_segments: Number
    max_model_len: Number
    fingerprint: str = ""  # of the model: what a calibration is found by
    can_choose: Flag = True  # repairs, by what is attended to
    settings: Mapping[str, Any] = field(default_factory=dict)  # what `kvshare doctor` compares
    data_parallel_rank: Number | None = None  # of this engine, where a vLLM has several
    data_parallel_size: Number = 1  # how many engines that vLLM has, as far as it knows

    _optional = frozenset(
        {"fingerprint", "can_choose", "settings", "data_parallel_rank", "data_parallel_size"}
    )

    @property
    def shares(self) -> bool:
        return not self.refusals

    @property
    def budget_bytes(self) -> int:
        """See `budget_of`."""
        return budget_of(self.max_bytes)


def budget_of(max_bytes: int) -> int:
    """
    How much of its memory the proxy lets a replica hold. The rest is for prompts that are saved before the
    proxy, which is told of them, has evicted others: see docs/decisions/0001-who-orders-evictions.md.
    """
    return max_bytes - max_bytes // HEADROOM


def digest_of(token_ids: TokenIds | Sequence[int]) -> str:
    """What ties a plan to its prompt: a hash of the token ids, 32 hex digits."""
    raw = np.asarray(token_ids, dtype="<i4").tobytes()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()
