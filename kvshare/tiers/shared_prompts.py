"""
Which prompts lie in a shared store: records that servers write for each other, and news of them.

    <prefix>:p:<name>    one prompt: its tokens, its pieces, the segments that they lie in, and whose it is
    <prefix>:news        "+<name>" a prompt is there, "-<name>" an administrator has deleted it; with the
                         operator's key names are sealed for this stream and this sign

A record is written when all its segments are there. No server is asked whether a record still holds: a
segment that has ended is a miss for the server that reads it.
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
_NEWS_S: Final = 30 * 86400  # after the last: so long a server may be away and still hear of deletions
_NAMESPACE: Final = re.compile("[0-9a-f]{64}")
_PAGE: Final = 64  # records at once


class RecordError(Exception):
    """A record is not what a server has written."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompt:
    """The data by which a server can use the KV of another's prompt."""

    namespace: str
    token_ids: TokenIds
    pieces: PieceTable
    segments: tuple[Segment, ...]
    owner: NamespaceOwner | None

    @classmethod
    def of(cls, node: Node, segments: Sequence[Segment], owner: NamespaceOwner | None) -> Self:
        """`segments`: all that the node's pieces lie in."""
        return cls(node.namespace, node.token_ids, node.pieces, tuple(segments), owner)

    def draft(self, known: Iterable[SegmentId]) -> NodeDraft:
        """The node, with those of its segments that the tree does not know."""
        without = frozenset(known)
        new = tuple(each for each in self.segments if each.segment_id not in without)
        return NodeDraft(self.namespace, self.token_ids, None, self.pieces, new, len(self.token_ids))

    def to_bytes(self) -> bytes:
        """A line of JSON, the tokens and the pieces; a check in front of all."""
        own = {
            "format": FORMAT,
            "namespace": self.namespace,
            "num_tokens": len(self.token_ids),
            "owner": None if self.owner is None else asdict(self.owner),
            "segments": [_numbers(segment) for segment in self.segments],
        }
        line = json.dumps(own, separators=(",", ":")).encode() + b"\n"
        body = line + np.ascontiguousarray(self.token_ids, dtype="<i4").tobytes() + self.pieces.to_bytes()
        return xxhash.xxh3_128_digest(body) + body

    @classmethod
    def from_bytes(cls, raw: bytes | memoryview) -> Self:
        """Raises RecordError for what `to_bytes` did not write."""
        check, body = bytes(raw[:16]), bytes(raw[16:])
        if xxhash.xxh3_128_digest(body) != check:
            raise RecordError("it does not match its check")
        line, _, rest = body.partition(b"\n")
        try:
            own: dict[str, Any] = json.loads(line)
            if own["format"] != FORMAT:
                raise RecordError("it has another format")
            end = 4 * own["num_tokens"]
            namespace, owner = own["namespace"], _owner(own["owner"])
            if not isinstance(namespace, str) or not _NAMESPACE.fullmatch(namespace):
                raise RecordError("its namespace is none")
            found = cls(
                namespace=namespace,
                token_ids=token_ids(np.frombuffer(rest[:end], dtype="<i4")),
                pieces=PieceTable.from_bytes(rest[end:]),
                segments=tuple(_segment(namespace, numbers) for numbers in own["segments"]),
                owner=owner,
            )
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError, DeltaTreeError) as exc:
            raise RecordError("it cannot be read") from exc
        found._check()
        return found

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
    """One piece of news: a prompt that is there, or the name of one that is to be deleted."""

    name: str
    prompt: SharedPrompt | None


class PromptExchange:
    """The records of one store. Methods block, and raise BackendError."""

    def __init__(self, store: SharedStore) -> None:
        self.store = store
        self.num_damaged = 0  # records
        self._channel = f"{store.prefix}:news"
        self._after: str | None = None  # place of the last news that were read
        self._before: str | None = None  # while older ones are read, from the newest on
        self._epoch: str | None = None
        self._takes_older = True
        self._unannounced: set[str] = set()  # records that are there
        self._is_caught_up = False

    def name_of(self, namespace: str, tokens: TokenIds) -> str:
        """Name a prompt. The name reveals nothing of it without the operator's key."""
        return self.store.key("p", namespace.encode(), np.ascontiguousarray(tokens, dtype="<i4").tobytes())

    def publish(self, prompt: SharedPrompt) -> bool:
        """
        Its segments are there. Returns whether it is announced: it is not if there is a record already,
        unless that cannot be read, or names segments that have ended.
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
        """Return whether a record and all its segments are there."""
        value = self.store.get(name)
        prompt = None if value is None else self._opened(name, value)
        if prompt is None:
            return False
        keys = [self.store.segment_key(segment) for segment in prompt.segments]
        return self.store.renew(keys) == len(keys)

    def revoke(self, names: Sequence[str]) -> None:
        """Delete records, and tell all servers to evict these prompts."""
        self.store.delete(names)
        for name in names:
            self._announce(b"-", name)

    def has_lost(self) -> bool:
        """True if the store has lost all it had since the last call: everything is to be reported again."""
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
        """Return whether all records that were there have been read, so that only new ones are reported."""
        return self._is_caught_up

    def reported(self) -> list[Reported]:
        """
        A page of what is new to this server; nothing if there is none. First what was announced before, the
        newest first, then what others announce. What has a record is there; of what has none, deletions are
        reported, so that a server that was away hears of them.
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
        """There is no room for older prompts: of older news only deletions are reported."""
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
    """Raises TypeError, ValueError: the file of namespaces takes text only."""
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
    """Raises TypeError, ValueError."""
    segment_id, first_position, num_tokens, generation, num_bytes, checksum = map(int, numbers)
    return Segment(
        SegmentId(segment_id), namespace, first_position, num_tokens, generation, num_bytes, checksum
    )
