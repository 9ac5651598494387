"""
Which prompts a shared store holds: records that servers write for each other, and messages about them.

    <prefix>:p:<name>    one prompt: its tokens, its pieces, the segments that they lie in, and its owner
    <prefix>:news        "+<name>" a prompt is there, "-<name>" an administrator has deleted it; with the
                         operator's key, names are sealed for this stream and this sign

A record is written once all its segments are in the store. It is not kept up to date: a segment that has
expired since is a miss for the server that reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from typing import Any, Final, Self

import numpy as np
import xxhash

from delta_tree import DeltaTreeError, Node, NodeDraft, PieceTable, Segment, SegmentId, TokenIds, token_ids
from kvshare.tenants import NamespaceOwner
from kvshare.tiers.seal import SealError
from kvshare.tiers.shared_backend import News
from kvshare.tiers.shared_tier import SharedStore

FORMAT: Final = "kvshare prompt 1"
_MOST_NEWS: Final = 100_000
_NEWS_S: Final = 30 * 86400  # after the last message: a server away for less still learns of deletions
_NAMESPACE: Final = re.compile("[0-9a-f]{64}")
_PAGE: Final = 64  # messages read at once


class RecordError(Exception):
    """A record is not one that a server has written."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompt:
    """All that a server needs to use the KV of another server's prompt."""

    namespace: str
    token_ids: TokenIds
    pieces: PieceTable
    segments: tuple[Segment, ...]
    owner: NamespaceOwner | None

    @classmethod
    def of(cls, node: Node, segments: Sequence[Segment], owner: NamespaceOwner | None) -> Self:
        """`segments`: all those in which the node's pieces lie."""
        return cls(node.namespace, node.token_ids, node.pieces, tuple(segments), owner)

    def draft(self, known: Iterable[SegmentId]) -> NodeDraft:
        """Draft the node. `known`: the segments that the tree has; only the others are new to it."""
        without = frozenset(known)
        new = tuple(each for each in self.segments if each.segment_id not in without)
        return NodeDraft(self.namespace, self.token_ids, None, self.pieces, new, len(self.token_ids))

    def to_bytes(self) -> bytes:
        """Write the record: a check of the rest, a line of JSON, the tokens, the pieces."""
        header = {
            "format": FORMAT,
            "namespace": self.namespace,
            "num_tokens": len(self.token_ids),
            "owner": None if self.owner is None else asdict(self.owner),
            "segments": [_numbers(segment) for segment in self.segments],
        }
        line = json.dumps(header, separators=(",", ":")).encode() + b"\n"
        body = line + np.ascontiguousarray(self.token_ids, dtype="<i4").tobytes() + self.pieces.to_bytes()
        return xxhash.xxh3_128_digest(body) + body

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview) -> Self:
        """Read a record. Raises RecordError for bytes that `to_bytes` did not write."""
        check, body = bytes(raw[:16]), bytes(raw[16:])
        if xxhash.xxh3_128_digest(body) != check:
            raise RecordError("it does not match its check")
        line, _, rest = body.partition(b"\n")
        try:
            header: dict[str, Any] = json.loads(line)
            if header["format"] != FORMAT:
                raise RecordError("it has another format")
            end = 4 * header["num_tokens"]
            namespace, owner = header["namespace"], _owner(header["owner"])
            if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
                raise RecordError("its namespace is none")
            record = cls(
                namespace=namespace,
                token_ids=token_ids(np.frombuffer(rest[:end], dtype="<i4")),
                pieces=PieceTable.from_bytes(rest[end:]),
                segments=tuple(_segment(namespace, numbers) for numbers in header["segments"]),
                owner=owner,
            )
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError, DeltaTreeError) as exc:
            raise RecordError("it cannot be read") from exc
        record._check()
        return record

    def _check(self) -> None:
        lengths = {segment.segment_id: segment.num_tokens for segment in self.segments}
        fits = all(
            piece.offset >= 0 and piece.offset + piece.length <= lengths.get(piece.segment_id, 0)
            for piece in self.pieces
        )
        if not fits or self.pieces.num_tokens != len(self.token_ids) or not lengths:
            raise RecordError("its pieces do not fit its segments")
        if any(segment.generation or segment.num_tokens <= 0 for segment in self.segments):
            raise RecordError("its segments are not exact")


@dataclass(frozen=True, slots=True, eq=False)
class Reported:
    """A prompt in the store; or, with `prompt` None, the name of one that is to be deleted."""

    name: str
    prompt: SharedPrompt | None


class PromptExchange:
    """The records of one store. Methods block, and raise BackendError."""

    def __init__(self, store: SharedStore) -> None:
        self.store = store
        self.num_damaged = 0  # records and messages that cannot be opened or read
        self._channel = f"{store.prefix}:news"
        self._after: str | None = None  # place of the newest message read
        self._before: str | None = None  # place of the oldest message read, while older ones are looked at
        self._epoch: str | None = None
        self._takes_older = True
        self._unannounced: set[str] = set()  # records that were written, but not announced yet
        self._is_caught_up = False

    def name_of(self, namespace: str, tokens: TokenIds) -> str:
        """Name a prompt. The name reveals nothing of it without the operator's key."""
        return self.store.key("p", namespace.encode(), np.ascontiguousarray(tokens, dtype="<i4").tobytes())

    def publish(self, prompt: SharedPrompt) -> bool:
        """
        Write and announce the record of a prompt whose segments are in the store. Returns whether it did: it
        does not if there is a record already, unless that is unreadable or a segment of it has expired.
        """
        name, record = self.name_of(prompt.namespace, prompt.token_ids), prompt.to_bytes()
        if not self.store.put_new(name, record) and name not in self._unannounced:
            if self._holds(name):
                return False
            self.store.put(name, record)
        self._unannounced.add(name)
        self._announce(b"+", name)
        self._unannounced.discard(name)
        return True

    def _holds(self, name: str) -> bool:
        """Return whether a readable record and all its segments are in the store, and renew them."""
        value = self.store.get(name)
        prompt = None if value is None else self._opened(name, value)
        if prompt is None:
            return False
        keys = [self.store.segment_key(segment) for segment in prompt.segments]
        return all(self.store.renew(keys))

    def revoke(self, names: Sequence[str]) -> None:
        """Delete records, and tell all servers to evict these prompts."""
        self.store.delete(names)
        for name in names:
            self._announce(b"-", name)

    def has_lost(self) -> bool:
        """Return whether the store has lost all since the last call. If so, `reported` starts over."""
        backend, name = self.store.backend, f"{self.store.prefix}:epoch"
        epoch = self.store.breaker.call(lambda: backend.epoch(name, keep_s=self._news_s))
        was, self._epoch = self._epoch, epoch
        if was is None or was == epoch:
            return False
        self._after = self._before = None
        self._is_caught_up, self._takes_older = False, True
        return True

    @property
    def is_caught_up(self) -> bool:
        """Return whether all earlier messages were read, so that only new ones are reported."""
        return self._is_caught_up

    def reported(self) -> list[Reported]:
        """
        Read a page of messages that are new to this server; empty if there are none. It starts with those
        sent before, the newest first, and goes on with new ones. A prompt that has a record is reported as
        in the store; one that has none only if it was deleted, so that a server that was away learns of it.
        """
        backend, channel = self.store.backend, self._channel
        while not self._is_caught_up:
            before = self._before
            page = partial(backend.latest, channel, before=before, most=_PAGE)
            news = self.store.breaker.call(page)
            if before is None:
                self._after = news[0].place if news else None
            wanted = b"+-" if self._takes_older else b"-"
            reported = self._records([each for each in news if each.message[:1] in wanted])
            self._before, self._is_caught_up = (news[-1].place, False) if news else (None, True)
            if reported:
                return reported
        after = self._after
        news = self.store.breaker.call(lambda: backend.news(channel, after=after, most=_PAGE))
        reported = self._records(news)
        self._after = news[-1].place if news else after
        return reported

    def stop_looking_back(self) -> None:
        """Report only deletions of the older messages from now on: there is no room for older prompts."""
        self._takes_older = False

    def _records(self, news: Sequence[News]) -> list[Reported]:
        backend = self.store.backend
        signs: dict[str, set[bytes]] = {}
        for each in news:
            if (name := self._name_in(each.message)) is not None:
                signs.setdefault(name, set()).add(each.message[:1])
        names = list(signs)
        values = self.store.breaker.call(lambda: backend.get_many(names))
        reported = []
        for name, value in zip(names, values, strict=True):
            if value is None and b"-" in signs[name]:
                reported.append(Reported(name, None))
            elif value is not None and b"+" in signs[name] and (prompt := self._opened(name, value)):
                reported.append(Reported(name, prompt))
        return reported

    def _name_in(self, message: bytes) -> str | None:
        """Return the name in a message; None if no server with this key wrote it."""
        try:
            return bytes(self.store.seal.opened(self._bound_to(message[:1]), message[1:])).decode("ascii")
        except (SealError, UnicodeDecodeError):
            self.num_damaged += 1
            return None

    def _bound_to(self, sign: bytes) -> str:
        """Return what a message is sealed for: in another stream, or with another sign, it is invalid."""
        return f"{self._channel}:{sign.decode('latin-1')}"

    @property
    def _news_s(self) -> int:
        return max(_NEWS_S, self.store.keep_s)

    def _opened(self, name: str, value: bytes) -> SharedPrompt | None:
        try:
            prompt = SharedPrompt.from_bytes(self.store.seal.opened(name, value))
            if self.name_of(prompt.namespace, prompt.token_ids) != name:
                raise RecordError("it lies under the name of another")
        except (RecordError, SealError):
            self.num_damaged += 1
            return None
        return prompt

    def _announce(self, sign: bytes, name: str) -> None:
        backend = self.store.backend
        message = sign + self.store.seal.sealed(self._bound_to(sign), name.encode())
        self.store.breaker.call(
            lambda: backend.announce(self._channel, message, most=_MOST_NEWS, keep_s=self._news_s)
        )


def _owner(given: dict[str, Any] | None) -> NamespaceOwner | None:
    """Read an owner. Raises TypeError, ValueError: the file of namespaces takes text only."""
    if given is None:
        return None
    owner = NamespaceOwner(**given)
    for text in (owner.tenant, owner.scope, *(() if owner.key is None else (owner.key,))):
        if not isinstance(text, str):
            raise TypeError("expected text")
        text.encode()
    if not isinstance(owner.is_divided, bool):
        raise TypeError("expected true or false")
    return owner


def _numbers(segment: Segment) -> list[int]:
    namespace_left_out = list(astuple(segment))
    del namespace_left_out[1]
    return namespace_left_out


def _segment(namespace: str, numbers: list[int]) -> Segment:
    """Make a segment of what `_numbers` returns. Raises TypeError, ValueError."""
    segment_id, first_position, num_tokens, generation, num_bytes, checksum = map(int, numbers)
    return Segment(
        SegmentId(segment_id), namespace, first_position, num_tokens, generation, num_bytes, checksum
    )
