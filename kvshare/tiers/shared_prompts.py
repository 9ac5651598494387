"""
Which prompts lie in a shared store: records that servers write for each other, and news of them.

    <prefix>:p:<name>    one prompt: its tokens, its pieces, the segments that they lie in, and whose it is
    <prefix>:news        "+<name>" a prompt is there, "-<name>" an administrator has deleted it

A record is written when all its segments are there. No server is asked whether a record still holds: a
segment that has ended is a miss for the server that reads it.
"""

from __future__ import annotations

import json
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
_PAGE: Final = 64  # records at once


class RecordError(Exception):
    """A record is not what a server has written."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedPrompt:
    """What a server needs to know of another's prompt to use its KV."""

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
            owner = None if own["owner"] is None else NamespaceOwner(**own["owner"])
            found = cls(
                namespace=own["namespace"],
                token_ids=token_ids(np.frombuffer(rest[:end], dtype="<i4")),
                pieces=PieceTable.from_bytes(rest[end:]),
                segments=tuple(_segment(own["namespace"], numbers) for numbers in own["segments"]),
                owner=owner,
            )
        except (ValueError, KeyError, TypeError, DeltaTreeError) as exc:
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
        self._is_caught_up = False

    def name_of(self, namespace: str, tokens: TokenIds) -> str:
        """Of a prompt: tells nothing of it to those who lack the operator's key."""
        return self.store.key("p", namespace.encode(), np.ascontiguousarray(tokens, dtype="<i4").tobytes())

    def publish(self, prompt: SharedPrompt) -> bool:
        """Its segments are there. Returns whether it is new to the store."""
        name = self.name_of(prompt.namespace, prompt.token_ids)
        is_new = self.store.put_new(name, prompt.to_bytes())
        if is_new:
            self._announce(b"+", name)
        return is_new

    def revoke(self, names: Sequence[str]) -> None:
        """Delete records, and tell all servers to evict these prompts."""
        self.store.delete(names)
        for name in names:
            self._announce(b"-", name)

    def has_lost(self) -> bool:
        """Whether the store has lost all it had since the last call: everything is to be reported again."""
        backend, name = self.store.backend, f"{self.store.prefix}:epoch"
        epoch = self.store.breaker.call(lambda: backend.epoch(name))
        was, self._epoch = self._epoch, epoch
        if was is None or was == epoch:
            return False
        self._after = self._before = None
        self._is_caught_up = False
        return True

    @property
    def is_caught_up(self) -> bool:
        """Whether all records that were there have been read, so that only new ones are reported."""
        return self._is_caught_up

    def reported(self) -> list[Reported]:
        """
        A page of what is new to this server; nothing if there is none. First the records that were there, the
        newest first, then what others announce.
        """
        backend, channel = self.store.backend, self._channel
        while not self._is_caught_up:
            before = self._before
            page = partial(backend.latest, channel, before=before, most=_PAGE)
            news = self.store.breaker.call(page)
            if before is None:
                self._after = news[0].place if news else None
            # What was deleted is not there any more, or is there again.
            reported = self._records([each for each in news if each.message[:1] == b"+"])
            self._before, self._is_caught_up = (news[-1].place, False) if news else (None, True)
            if reported:
                return reported
        after = self._after
        news = self.store.breaker.call(lambda: backend.news(channel, after=after, most=_PAGE))
        reported = self._records(news)
        self._after = news[-1].place if news else after
        return reported

    def stop_looking_back(self) -> None:
        """There is no room for older prompts."""
        self._is_caught_up = True

    def _records(self, news: Sequence[News]) -> list[Reported]:
        backend = self.store.backend
        names = {each.message[1:].decode("ascii", "replace"): each.message[:1] for each in news}
        wanted = [name for name, sign in names.items() if sign == b"+"]
        values = self.store.breaker.call(lambda: backend.get_many(wanted))
        found = dict(zip(wanted, values, strict=True))
        reported = []
        for name, sign in names.items():
            if sign == b"-":
                reported.append(Reported(name, None))
            elif (value := found[name]) is not None and (prompt := self._opened(name, value)) is not None:
                reported.append(Reported(name, prompt))
        return reported

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
        backend, message = self.store.backend, sign + name.encode()
        self.store.breaker.call(lambda: backend.announce(self._channel, message, most=_MOST_NEWS))


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
