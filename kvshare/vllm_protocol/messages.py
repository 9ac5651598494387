"""
What the proxy and the connector inside vLLM tell each other: values and their JSON. No HTTP, no vLLM.

    proxy --  POST /v1/...  kv_transfer_params = {"kvshare": Ticket}  -->  vLLM's scheduler
    proxy <-- GET  /journal what came of it, and which segments are gone -- control server in the connector

A ticket travels through vLLM's own request, so that plan and prompt cannot be separated. Answers stream back
untouched; what really happened is read from the journal. Everything is checked when it is read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from delta_tree import SegmentId, Span, TokenIds

PROTOCOL = 1
TICKET_KEY = "kvshare"  # in kv_transfer_params
WORKER_CLASS = "kvshare.vllm_connector.workers.KVShareWorker"  # for --worker-cls
TOKEN_VARIABLE = "KVSHARE_VLLM_TOKEN"  # environment: the secret that opens the control server


class WireError(ValueError):
    """A message that does not say what it must; names the field and what was expected."""


@dataclass(frozen=True, slots=True)
class WireCopy:
    """Stored KV for a stretch of the prompt. `source_position`: where its first token stood when computed."""

    segment_id: SegmentId
    offset: int  # first token within the segment
    length: int
    target_start: int
    source_position: int

    @property
    def target(self) -> Span:
        return Span(self.target_start, self.target_start + self.length)

    @property
    def shift(self) -> int:
        """How many positions the keys move."""
        return self.target_start - self.source_position


@dataclass(frozen=True, slots=True)
class Ticket:
    """
    One request's plan, and the leave to keep what it computes.

    Positions that no copy covers are placeholders; the last token always is one. Without copies there is
    no plan: the prompt is computed as ever and kept, if `keep` says so.
    """

    request_id: str  # the proxy's; comes back in `Finished`
    namespace: str  # digest; segments of another one are never laid
    prompt_digest: str  # of the token ids the plan was made for, see `digest_of`
    num_tokens: int
    exact_length: int = 0  # copies inside [0, exact_length) are exact
    copies: tuple[WireCopy, ...] = ()  # ascending by target, disjoint
    keep: bool = True

    @property
    def is_exact(self) -> bool:
        """
        All copies are exact: the KV may enter vLLM's own prefix cache.

        Any other ticket is only honoured with `private_salt(request_id)` as its request's cache_salt.
        """
        return all(copy.target.end <= self.exact_length for copy in self.copies)

    def to_json(self) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "request_id": self.request_id,
            "namespace": self.namespace,
            "prompt_digest": self.prompt_digest,
            "num_tokens": self.num_tokens,
            "exact_length": self.exact_length,
            "copies": [
                [copy.segment_id, copy.offset, copy.length, copy.target_start, copy.source_position]
                for copy in self.copies
            ],
            "keep": self.keep,
        }

    @classmethod
    def from_json(cls, document: object) -> Ticket:
        """Raises WireError."""
        fields = _object(document, "ticket")
        if fields.get("protocol") != PROTOCOL:
            raise WireError(f"protocol: expected {PROTOCOL}, got {fields.get('protocol')!r}")
        ticket = cls(
            request_id=_text(fields, "request_id"),
            namespace=_text(fields, "namespace"),
            prompt_digest=_text(fields, "prompt_digest"),
            num_tokens=_number(fields, "num_tokens"),
            exact_length=_number(fields, "exact_length"),
            copies=tuple(_copy(entry) for entry in _list(fields, "copies")),
            keep=fields.get("keep") is True,
        )
        ticket._check()
        return ticket

    def _check(self) -> None:
        end = 0
        for copy in self.copies:
            if copy.target_start < end or copy.length < 1 or copy.target.end > self.num_tokens - 1:
                raise WireError(
                    f"copies: [{copy.target_start}, {copy.target.end}) overlaps, is empty or reaches "
                    f"the last of {self.num_tokens} tokens"
                )
            if copy.target_start < self.exact_length < copy.target.end:
                raise WireError(f"copies: one crosses the end of the exact prefix at {self.exact_length}")
            if copy.target_start < self.exact_length and copy.shift:
                raise WireError("copies: an exact one moves")
            end = copy.target.end


@dataclass(frozen=True, slots=True)
class Stored:
    """A segment that was kept of a request."""

    segment_id: SegmentId
    start: int  # position of its first token
    length: int
    num_bytes: int  # over all ranks

    def to_json(self) -> list[int]:
        return [self.segment_id, self.start, self.length, self.num_bytes]


@dataclass(frozen=True, slots=True)
class Finished:
    """
    A ticketed request has ended, and its KV is kept where it should be.

    The KV of positions [0, num_kept) comes from the copies `used` (indices into the ticket's) and from
    `stored`; both are empty where nothing was kept. `output_ids` are the generated tokens among them.
    """

    request_id: str
    decision: str  # "approx" | "exact" | "full": what vLLM computed with, whatever was planned
    reason: str | None  # why less was shared than planned; a fixed word
    used: tuple[int, ...] = ()
    num_computed: int = 0  # prompt tokens that were computed here
    num_local: int = 0  # prompt tokens that vLLM's own prefix cache had
    output_ids: tuple[int, ...] = ()
    stored: tuple[Stored, ...] = ()
    stage_seconds: Mapping[str, float] = field(default_factory=dict)  # lay, pass, save
    kind = "finished"

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "request_id": self.request_id,
            "decision": self.decision,
            "reason": self.reason,
            "used": list(self.used),
            "num_computed": self.num_computed,
            "num_local": self.num_local,
            "output_ids": list(self.output_ids),
            "stored": [stored.to_json() for stored in self.stored],
            "stage_seconds": dict(self.stage_seconds),
        }


@dataclass(frozen=True, slots=True)
class Dropped:
    """Segments that are gone: evicted to make room, unreadable, or on request."""

    segment_ids: tuple[SegmentId, ...]
    kind = "dropped"

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "segment_ids": list(self.segment_ids)}


JournalEvent = Finished | Dropped


@dataclass(frozen=True, slots=True)
class Journal:
    """
    Events after a sequence number. A new `epoch` means a new process: all it held before is gone.

    `gap`: events in between were forgotten; what is held must be asked for with `GET /segments`.
    """

    epoch: str
    last: int  # sequence number of the newest event
    gap: bool
    events: tuple[JournalEvent, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "last": self.last,
            "gap": self.gap,
            "events": [event.to_json() for event in self.events],
        }

    @classmethod
    def from_json(cls, document: object) -> Journal:
        """Raises WireError."""
        fields = _object(document, "journal")
        return cls(
            epoch=_text(fields, "epoch"),
            last=_number(fields, "last"),
            gap=fields.get("gap") is True,
            events=tuple(_event(entry) for entry in _list(fields, "events")),
        )


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """`GET /info`: what a vLLM with the connector can do, and what its KV is."""

    epoch: str
    model: str
    versions: Mapping[str, str]  # vllm, kvshare, torch
    refusals: tuple[str, ...]  # why nothing is shared here; empty where it is
    warnings: tuple[str, ...]  # what works, but not as meant
    can_move_keys: bool
    namespace_fields: Mapping[str, str]  # model, revision, tokenizer, dtype, kv_layout, rope
    bytes_per_token: int
    max_bytes: int
    num_bytes: int
    num_segments: int
    max_model_len: int
    settings: Mapping[str, Any] = field(default_factory=dict)  # what `kvshare doctor` compares

    @property
    def shares(self) -> bool:
        return not self.refusals

    def to_json(self) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "epoch": self.epoch,
            "model": self.model,
            "versions": dict(self.versions),
            "refusals": list(self.refusals),
            "warnings": list(self.warnings),
            "can_move_keys": self.can_move_keys,
            "namespace_fields": dict(self.namespace_fields),
            "bytes_per_token": self.bytes_per_token,
            "max_bytes": self.max_bytes,
            "num_bytes": self.num_bytes,
            "num_segments": self.num_segments,
            "max_model_len": self.max_model_len,
            "settings": dict(self.settings),
        }

    @classmethod
    def from_json(cls, document: object) -> ReplicaInfo:
        """Raises WireError, also for another protocol."""
        fields = _object(document, "info")
        if fields.get("protocol") != PROTOCOL:
            raise WireError(f"protocol: expected {PROTOCOL}, got {fields.get('protocol')!r}")
        return cls(
            epoch=_text(fields, "epoch"),
            model=_text(fields, "model"),
            versions=_texts(fields, "versions"),
            refusals=tuple(str(entry) for entry in _list(fields, "refusals")),
            warnings=tuple(str(entry) for entry in _list(fields, "warnings")),
            can_move_keys=fields.get("can_move_keys") is True,
            namespace_fields=_texts(fields, "namespace_fields"),
            bytes_per_token=_number(fields, "bytes_per_token"),
            max_bytes=_number(fields, "max_bytes"),
            num_bytes=_number(fields, "num_bytes"),
            num_segments=_number(fields, "num_segments"),
            max_model_len=_number(fields, "max_model_len"),
            settings=_object(fields.get("settings", {}), "settings"),
        )


def digest_of(token_ids: TokenIds | Sequence[int]) -> str:
    """What ties a plan to its prompt: a hash of the token ids, 32 hex digits."""
    raw = np.asarray(token_ids, dtype="<i4").tobytes()
    return hashlib.blake2b(raw, digest_size=16).hexdigest()


def private_salt(request_id: str) -> str:
    """The cache_salt of a request whose KV is approximate: nobody else ever asks with it."""
    return f"kvshare-private-{request_id}"


def is_private_salt(cache_salt: str | None, request_id: str) -> bool:
    return cache_salt == private_salt(request_id)


def _event(document: object) -> JournalEvent:
    fields = _object(document, "event")
    if fields.get("kind") == Dropped.kind:
        return Dropped(tuple(SegmentId(entry) for entry in _numbers(fields, "segment_ids")))
    if fields.get("kind") != Finished.kind:
        raise WireError(f"kind: expected {Finished.kind!r} or {Dropped.kind!r}, got {fields.get('kind')!r}")
    reason = fields.get("reason")
    return Finished(
        request_id=_text(fields, "request_id"),
        decision=_text(fields, "decision"),
        reason=None if reason is None else str(reason),
        used=_numbers(fields, "used"),
        num_computed=_number(fields, "num_computed"),
        num_local=_number(fields, "num_local"),
        output_ids=_numbers(fields, "output_ids"),
        stored=tuple(_stored(entry) for entry in _list(fields, "stored")),
        stage_seconds={
            key: float(value) for key, value in _object(fields.get("stage_seconds"), "stage_seconds").items()
        },
    )


def _stored(document: object) -> Stored:
    segment_id, start, length, num_bytes = _row(document, 4, "stored")
    return Stored(SegmentId(segment_id), start, length, num_bytes)


def _copy(document: object) -> WireCopy:
    segment_id, offset, length, target_start, source_position = _row(document, 5, "copies")
    return WireCopy(SegmentId(segment_id), offset, length, target_start, source_position)


def _row(document: object, width: int, name: str) -> list[int]:
    if not isinstance(document, list) or len(document) != width or not all(map(_is_number, document)):
        raise WireError(f"{name}: expected rows of {width} non-negative integers")
    return document


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _object(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise WireError(f"{name}: expected an object, got {type(value).__name__}")
    return value


def _list(fields: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = fields.get(name)
    if not isinstance(value, list):
        raise WireError(f"{name}: expected a list, got {type(value).__name__}")
    return value


def _numbers(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values = _list(fields, name)
    if not all(map(_is_number, values)):
        raise WireError(f"{name}: expected non-negative integers")
    return tuple(values)


def _number(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not _is_number(value):
        raise WireError(f"{name}: expected a non-negative integer, got {value!r}")
    return int(value)  # type: ignore[arg-type]  # checked above


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise WireError(f"{name}: expected text, got {type(value).__name__}")
    return value


def _texts(fields: Mapping[str, Any], name: str) -> Mapping[str, str]:
    return {str(key): str(value) for key, value in _object(fields.get(name), name).items()}
