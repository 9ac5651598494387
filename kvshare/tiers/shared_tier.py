"""
Segments in a store that several servers use: a server can read KV that another server has computed.

    <prefix>:o:<name>    one segment, as a file of the disk tier; sealed if the operator gives a key

The prefix names the model and everything on which the model's KV depends. The name is made of namespace and
segment id. So no KV crosses models or tenants. This server knows the segments that it has written, and the
segments that other servers have reported (`shared_prompts.py`). If the store has lost a known segment, a read
of it is a miss. Values that are not used expire, so other servers need not clean up after a server that
vanishes.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from delta_tree import Segment, SegmentId
from kvshare.tiers.kv_object import (
    MOST_HEADER_BYTES,
    PAGE_BYTES,
    Header,
    ObjectError,
    ObjectForm,
    Rows,
    checks_of,
)
from kvshare.tiers.lower_tier import BusyError, LowerTier
from kvshare.tiers.seal import Seal, SealError
from kvshare.tiers.shared_backend import BackendError, Breaker, SharedBackend

log = logging.getLogger(__name__)

PROTOCOL: Final = "kvshare1"


class SharedStore:
    """The store as servers of one model see it: its values, their names, and how they are sealed."""

    def __init__(self, backend: SharedBackend, fingerprint: str, *, seal: Seal, keep_s: int) -> None:
        """`fingerprint`: that of the objects' `ObjectForm`. `keep_s`: a value unused for so long expires."""
        self.backend, self.breaker, self.seal, self.keep_s = backend, Breaker(), seal, keep_s
        self.prefix = f"{PROTOCOL}:{seal.name_of(fingerprint.encode())}"

    def key(self, kind: str, *parts: bytes) -> str:
        """Return the key of a value: `kind` is o for a segment, p for a prompt."""
        return f"{self.prefix}:{kind}:{self.seal.name_of(*parts)}"

    def segment_key(self, segment: Segment) -> str:
        return self.key("o", segment.namespace.encode(), b"%016x" % segment.segment_id)

    def put(self, key: str, value: bytes) -> None:
        """Seal and store a value. Raises BackendError, as do all methods that ask the store."""
        sealed = self.seal.sealed(key, value)
        self.breaker.call(lambda: self.backend.put(key, sealed, keep_s=self.keep_s))

    def put_new(self, key: str, value: bytes) -> bool:
        sealed = self.seal.sealed(key, value)
        return self.breaker.call(lambda: self.backend.put_new(key, sealed, keep_s=self.keep_s))

    def get(self, key: str) -> bytes | None:
        return self.breaker.call(lambda: self.backend.get(key, keep_s=self.keep_s))

    def delete(self, keys: Sequence[str]) -> None:
        self.breaker.call(lambda: self.backend.delete(keys))

    def renew(self, keys: Sequence[str]) -> list[bool]:
        """Restart the expiry time of values. Returns for each key whether its value is there."""
        return self.breaker.call(lambda: self.backend.renew(keys, keep_s=self.keep_s))


class SharedTier:
    """A `LowerTier`. `drop` only makes this server forget segments; `remove` deletes them for all servers."""

    name = "shared"
    is_swept = True

    def __init__(
        self,
        store: SharedStore,
        form: ObjectForm,
        *,
        max_bytes: int,
        announce: Callable[[Segment], None] | None = None,
    ) -> None:
        """
        `max_bytes`: limits the segments of other servers that this server knows; without a disk above this
        tier, also this server's own segments.
        `announce`: called once a segment is stored, before it counts as written; raises BackendError.
        """
        self.store, self.form, self.max_bytes, self._announce = store, form, max_bytes, announce
        self.num_bytes = 0  # of the segments that count
        self.counts_own = True  # whether this server's segments count; False: a disk above limits them
        self.counts: Counter[str] = Counter()
        self._segments: dict[SegmentId, Segment] = {}
        self._counted: set[SegmentId] = set()
        self._lock = threading.Lock()

    @property
    def parts(self) -> Sequence[LowerTier]:
        return (self,)

    @property
    def problem(self) -> str | None:
        """Return why the last call to the store failed; None: it succeeded."""
        return self.store.breaker.reason

    def ids(self) -> list[SegmentId]:
        with self._lock:
            return list(self._segments)

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._segments

    def segment(self, segment_id: SegmentId) -> Segment | None:
        return self._segments.get(segment_id)

    def adopt(self, segments: Iterable[Segment]) -> None:
        """Hold segments that other servers have written. `read` checks that each value is the segment."""
        self._hold(segments, is_counted=True)

    def takes_room(self, segment_id: object) -> bool:
        """Return whether a segment counts against `max_bytes`."""
        return segment_id in self._counted

    def finds(self, segment: Segment) -> bool:
        """Return whether the store has a segment, perhaps of another server. Raises BackendError."""
        if segment.segment_id in self._segments:
            return True
        (is_there,) = self.store.renew([self.store.segment_key(segment)])
        if is_there:
            self._hold([segment], is_counted=self.counts_own)
        return is_there

    def _hold(self, segments: Iterable[Segment], *, is_counted: bool) -> None:
        with self._lock:
            for segment in segments:
                if segment.segment_id in self._segments:
                    continue
                self._segments[segment.segment_id] = segment
                if is_counted:
                    self._counted.add(segment.segment_id)
                    self.num_bytes += segment.num_bytes

    def takes(self, segment: Segment) -> bool:
        """Return whether the segment's KV is exact. Other KV stays where it was computed."""
        return segment.generation == 0

    def write(self, segment: Segment, rows: tuple[Rows, ...]) -> None:
        """Store a segment. Raises BackendError (an OSError), at once while the breaker is open."""
        self.store.breaker.check()  # before the work of building a value
        planes = self.form.planes(segment.num_tokens)
        header = Header(segment, self.form.fingerprint, planes, checks_of(rows))
        value = b"".join((header.to_bytes(), *(plane.data.cast("B") for plane in rows)))
        self.store.put(self.store.segment_key(segment), value)
        if self._announce is not None:
            self._announce(segment)
        self._hold([segment], is_counted=self.counts_own)
        with self._lock:
            self.counts["written"] += 1

    def read(self, segment_id: SegmentId) -> tuple[Rows, ...] | None:
        segment = self._segments.get(segment_id)
        if segment is None:
            return None
        key = self.store.segment_key(segment)
        try:
            value = self.store.get(key)
        except BackendError as exc:
            raise BusyError from exc
        try:
            rows = None if value is None else self._opened(key, value, segment)
        except (ObjectError, SealError) as exc:
            if self.drop([segment_id]):
                self._count("damaged")
                log.warning("a segment of the shared store is not used, and is computed again: %s", exc)
            return None
        if rows is None:
            if self.drop([segment_id]):
                self._count("failed")  # the store needed its room, or has lost it
            return None
        self._count("read")
        return rows

    def drop(self, segment_ids: Iterable[SegmentId]) -> list[SegmentId]:
        with self._lock:
            found = (self._segments.pop(segment_id, None) for segment_id in segment_ids)
            held = [segment for segment in found if segment is not None]
            for segment in held:
                if segment.segment_id in self._counted:
                    self._counted.discard(segment.segment_id)
                    self.num_bytes -= segment.num_bytes
        return [segment.segment_id for segment in held]

    def known(self, segment_ids: Iterable[SegmentId]) -> list[Segment]:
        found = (self._segments.get(segment_id) for segment_id in segment_ids)
        return [segment for segment in found if segment is not None]

    def remove(self, segments: Iterable[Segment]) -> None:
        """Delete segments in the store, so that no server reads them any more. Raises BackendError."""
        keys = [self.store.segment_key(segment) for segment in segments]
        if keys:
            self.store.delete(keys)

    def close(self) -> None:
        self.store.backend.close()

    def sweep(self) -> bool:
        return False

    def _opened(self, key: str, value: bytes, segment: Segment) -> tuple[Rows, ...]:
        """Return the rows of a value that is this segment's object. Raises ObjectError, SealError."""
        raw = self.store.seal.opened(key, value)
        length = 8 + int.from_bytes(raw[:8], "little")
        if not 8 < length <= min(MOST_HEADER_BYTES, len(raw)) or length % PAGE_BYTES:
            raise ObjectError("it does not begin with a header")
        header = Header.from_bytes(bytes(raw[:length]))
        if header.fingerprint != self.form.fingerprint:
            raise ObjectError("it is of another model")
        if header.segment != segment or header.planes != self.form.planes(segment.num_tokens):
            raise ObjectError("it is another segment")
        if len(raw) != length + header.planes[-1].end:
            raise ObjectError("its bytes are not all there")
        # Copied because the tensors made of it must be writable.
        every = np.frombuffer(raw, dtype=np.uint8, offset=length).copy()
        rows = tuple(every[plane.start : plane.end].reshape(plane.shape[0], -1) for plane in header.planes)
        if checks_of(rows) != header.checks:
            raise ObjectError("its bytes do not match their checks")
        return rows

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1


def remove_from_shared(tiers: Iterable[LowerTier], segment: Segment) -> None:
    """Remove a segment from all shared tiers among these tiers, for all servers; failures are ignored."""
    for tier in tiers:
        if isinstance(tier, SharedTier):
            with suppress(OSError):  # the value expires then
                tier.remove([segment])
