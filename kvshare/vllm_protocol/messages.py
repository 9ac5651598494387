"""
The messages between the proxy and the connector inside vLLM, as values and JSON. Imports neither HTTP nor
vLLM.

    proxy --  POST /v1/...  kv_transfer_params = {"kvshare": Ticket}     -->  vLLM's scheduler
    proxy <-- GET  /journal: results of requests, and dropped segments   --   control server of the connector

A ticket is part of the request to vLLM, so that plan and prompt stay together. Answers are relayed unchanged;
the journal reports how a plan was executed. Every message is checked when it is received.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, model_validator

from delta_tree import Span, TokenIds
from kvshare.vllm_protocol.json_fields import Flag, Held, Message, Number, Seconds, Text
from kvshare.vllm_protocol.places import DiskProblem, Moved, OnDiskOnly

PROTOCOL = 5
HEADROOM = 8  # 1/8 of a replica's memory stays free, see `budget_of`
TICKET_KEY = "kvshare"  # in kv_transfer_params
PROMPT_KEY = "prompt_token_ids"  # the same, vLLM's own: rendered tokens that it need not render again
WORKER_CLASS = "kvshare.vllm_connector.workers.KVShareWorker"  # for --worker-cls
RANK_HEADER = "X-data-parallel-rank"  # vLLM's own header: the rank that serves a request
TOKEN_VARIABLE = "KVSHARE_VLLM_TOKEN"  # environment: the key of the control server


class WireCopy(NamedTuple):
    """Stored KV for a span of the prompt; an array in JSON."""

    segment_id: Held
    offset: Number  # first token within the segment
    length: Number
    target_start: Number
    source_position: Number  # for which the first token was computed

    @property
    def target(self) -> Span:
        return Span(self.target_start, self.target_start + self.length)

    @property
    def shift(self) -> int:
        """Return by how many positions the keys move."""
        return self.target_start - self.source_position


class WireSpan(NamedTuple):
    """Positions [start, end); an array in JSON."""

    start: Number
    end: Number

    @property
    def span(self) -> Span:
        return Span(self.start, self.end)


@dataclass(frozen=True, slots=True)
class WireOrder(Message):
    """
    The connector chooses `num_tokens` copied tokens in `stretches` after a probe pass, and renews them.

    The connector provides the KV before `end`; vLLM computes the tail after it. See
    `kvshare.sharing.plan.RepairOrder`.
    """

    stretches: tuple[WireSpan, ...]  # ascending, disjoint
    probes: tuple[Number, ...]
    num_tokens: Number
    end: Number


@dataclass(frozen=True, slots=True)
class Ticket(Message):
    """
    One request's plan, and whether its KV may be retained.

    Positions that no copy covers are placeholders; the last token always is one. Without copies there is no
    plan: vLLM computes the prompt as usual, and the connector retains its KV if `store` is true.
    """

    ticket_id: Text  # made by the proxy, secret; repeated in `Prefilled` and `FinishedReport`
    namespace: Text  # digest; segments of other namespaces are never used
    prompt_digest: Text  # of the planned token ids, see `digest_of`
    num_tokens: Number
    exact_length: Number = 0  # copies inside [0, exact_length) are exact
    copies: tuple[WireCopy, ...] = ()  # ascending by target, disjoint
    store: Flag = True
    from_memory: Flag = False  # copies from vLLM's blocks are not wanted: what host memory takes is measured
    order: WireOrder | None = None  # repairs that the connector still has to choose
    disk_s: Seconds = 0.0  # how long reads from disk may take; 0: as long as any

    _protocol = PROTOCOL

    @property
    def is_exact(self) -> bool:
        """
        Return whether all copies are exact, so that the KV may enter vLLM's own prefix cache.

        A ticket with approximate copies needs `private_salt(ticket_id)` as its request's cache_salt.
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
                raise ValueError(f"copies: an exact one moves by {copy.shift} tokens")
            end = copy.target.end
        if self.order is not None:
            self._check_order(self.order, end)
        return self

    def _check_order(self, order: WireOrder, end_of_copies: int) -> None:
        if not max(end_of_copies, 1) <= order.end < self.num_tokens:
            raise ValueError(f"order: expected an end from {end_of_copies} to {self.num_tokens - 1}")
        end = self.first_approximate
        for stretch in order.stretches:
            if not end <= stretch.start < stretch.end <= end_of_copies:
                raise ValueError(
                    f"order: a stretch [{stretch.start}, {stretch.end}) overlaps, is empty or not copied"
                )
            end = stretch.end
        ascending = all(before < probe for before, probe in pairwise(order.probes))
        inside = all(any(s.start <= probe < s.end for s in order.stretches) for probe in order.probes)
        num_copied = sum(stretch.end - stretch.start for stretch in order.stretches)
        if not ascending or not inside or order.num_tokens > num_copied:
            raise ValueError(
                "order: expected ascending probes in its stretches, and no more repairs than those have"
            )

    @property
    def first_approximate(self) -> int:
        """Position of the first approximate copy; num_tokens if there is none."""
        starts = (copy.target_start for copy in self.copies if copy.target_start >= self.exact_length)
        return min(starts, default=self.num_tokens)


class StoredSegment(NamedTuple):
    """A segment that was retained of a request; an array in JSON."""

    segment_id: Held
    start: Number  # position of its first token
    length: Number
    num_bytes: Number  # sum over all ranks

    @property
    def span(self) -> Span:
        return Span(self.start, self.start + self.length)


@dataclass(frozen=True, slots=True)
class Prefilled(Message):
    """
    The prompt of a running request is retained, so that other prompts can copy from it.

    `FinishedReport` repeats these fields and adds the answer.
    """

    ticket_id: Text
    used: tuple[Number, ...]
    stored: tuple[StoredSegment, ...]  # of the prompt
    repaired: tuple[WireSpan, ...] = ()
    kind: Literal["prefilled"] = "prefilled"


@dataclass(frozen=True, slots=True)
class FinishedReport(Message):
    """
    A request with a ticket has ended, and its KV is retained if the ticket asked for it.

    Retained positions are covered by the copies `used` (indices into the ticket's copies) without the spans
    `repaired`, and by the segments `stored`. All three are empty if nothing was retained. `output_ids`: the
    generated tokens among the retained ones. `stage_seconds`: "verify" checks segments, "write" writes copies
    into vLLM's blocks, "blocks" those of other blocks, "pass" computes placeholders, "save" copies KV out;
    "hidden" is the part of "write" during "pass", "waited" what "pass" waited for it; "disk" reads segments
    first, "ahead" is the part of "pass" during that. `first_token_s`:
    from its first blocks to its first token, with loads and placeholders; None without one, or if preempted.
    `num_answer_steps`: where vLLM decodes speculatively, the steps after the first token, which gave
    `num_answer_tokens`; else both are 0.
    """

    ticket_id: Text
    decision: Literal["approx", "exact", "full"]  # what was executed, which may differ from the plan
    reason: str | None  # why less was shared than planned: a `Reason`
    used: tuple[Number, ...] = ()
    num_computed: Number = 0  # prompt tokens that vLLM and the connector computed
    num_local: Number = 0  # prompt tokens from vLLM's own prefix cache
    num_from_blocks: Number = 0  # copied prompt tokens that were not loaded from host memory
    disk_bytes: Number = 0  # that were read from disk; of what was late in time, and of one segment at least
    late_bytes: Number = 0  # the others that were to be read
    output_ids: tuple[Number, ...] = ()
    stored: tuple[StoredSegment, ...] = ()
    repaired: tuple[WireSpan, ...] = ()
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    first_token_s: float | None = None
    num_answer_steps: Number = 0
    num_answer_tokens: Number = 0
    kind: Literal["finished"] = "finished"

    _optional = frozenset(
        {
            *("first_token_s", "num_from_blocks", "disk_bytes", "late_bytes"),
            *("num_answer_steps", "num_answer_tokens"),
        }
    )


@dataclass(frozen=True, slots=True)
class Dropped(Message):
    """Segments that the replica dropped: to make room, as unreadable, or on request."""

    segment_ids: tuple[Held, ...]
    kind: Literal["dropped"] = "dropped"


JournalEvent = Prefilled | FinishedReport | Dropped | Moved | OnDiskOnly | DiskProblem


@dataclass(frozen=True, slots=True)
class Journal(Message):
    """
    Events after a sequence number. A new `epoch` means a new process, which has lost what is not on disk.

    `gap`: some events are missing; the proxy must read the held segments with `GET /segments`.
    """

    epoch: Text
    last: Number  # sequence number of the newest event
    gap: Flag
    events: tuple[Annotated[JournalEvent, Field(discriminator="kind")], ...]


def budget_of(max_bytes: int) -> int:
    """
    Return the bytes of a replica's memory that the proxy fills. The rest is for prompts that the replica
    saves before the proxy has evicted others for them: see docs/decisions/0001-who-orders-evictions.md.
    """
    return max_bytes - max_bytes // HEADROOM


def digest_of(token_ids: TokenIds | Sequence[int]) -> str:
    """Return the hash of token ids that ties a plan to its prompt: 32 hex digits."""
    return hashlib.blake2b(np.asarray(token_ids, dtype="<i4").tobytes(), digest_size=16).hexdigest()
