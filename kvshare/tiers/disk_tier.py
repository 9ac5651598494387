"""
Segments as files in one folder, within a budget of bytes.

    <folder>/<fingerprint>/<2 digits>/<16 digits of the segment id>.kv    an object, see `kv_object.py`
    ...                                                    .kv.tmp        one that is being written
    <folder>/<fingerprint>/index                           what the objects say, see `object_index.py`

A folder with another fingerprint belongs to another model, tokenizer, dtype or calibration: it is never read,
and is deleted. `open`, `write`, `read` and `sweep` wait for the disk; most other methods only look at
dictionaries.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from delta_tree import Segment, SegmentId
from kvshare.tiers.files import Files, remove_empty
from kvshare.tiers.kv_object import (
    Header,
    ObjectError,
    ObjectForm,
    Rows,
    StoredObject,
    checks_of,
    claimed,
    write_object,
)
from kvshare.tiers.lower_tier import BusyError, LowerTier
from kvshare.tiers.object_files import FORM_NAME, SUFFIX, UNFINISHED, listed, may_hold, object_path
from kvshare.tiers.object_index import delete_index, read_index, write_index
from kvshare.tiers.pace import CHUNK_BYTES, BytesRead

log = logging.getLogger(__name__)

# Errors of this process, not of the file.
_OURS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN}


class DiskTier:
    """A `LowerTier`. `keep_free_bytes`: no write leaves less than this of the disk free. Thread-safe."""

    name = "disk"
    problem = None

    def __init__(
        self,
        folder: Path,
        form: ObjectForm,
        *,
        max_bytes: int,
        keep_free_bytes: int,
        files: Files | None = None,
    ) -> None:
        self.form = form
        self.max_bytes = max_bytes
        self.num_bytes = 0  # of KV, as the tree counts it
        self.bytes_read = BytesRead()
        self.counts: Counter[str] = Counter()  # written, read, damaged, failed, deleted: objects
        self._root, self._folder = folder, folder / form.fingerprint[:16]
        self._keep_free_bytes = keep_free_bytes
        self._files = files or Files()
        self._objects: dict[SegmentId, Segment] = {}
        self._found: dict[SegmentId, int] = {}  # bytes of the files that were there at the start
        self._garbage: deque[Path] = deque()  # files of this folder
        self._spare: deque[tuple[Path, int]] = deque()  # files and their bytes: deleted if space is needed
        self._foreign: list[Path] = []  # folders of other models
        self._foreign_files = self._of_other_models()
        self._made: set[Path] = set()
        self._lock = threading.Lock()
        self.is_open = False  # `write` fails until it is

    def open(self) -> None:
        """List the files there, by name and size only. Raises OSError if the folder cannot be used."""
        self._look()
        self.is_open = True

    def open_late(self, segments: Iterable[Segment]) -> None:
        """
        Do `open` and `adopt` while other threads already write and sweep. Raises OSError as `open` does.

        Files of no known segment may belong to a store that was moved aside: they stay until space is needed.
        """
        self._look()
        with self._lock:
            self._hold(segments)
            self._spare.extend((self._path(entry), num_bytes) for entry, num_bytes in self._found.items())
            self._found.clear()
        self.is_open = True

    def _look(self) -> None:
        self._found.clear()
        self._foreign.clear()
        self._files.make_folder(self._folder)
        for name, _, is_folder in self._files.entries(self._root):
            if is_folder and FORM_NAME.fullmatch(name) and name != self._folder.name:
                self._foreign.append(self._root / name)
        for shelf, name, segment_id, num_bytes in listed(self._folder, self._files):
            if segment_id is None:
                self._garbage.append(shelf / name)
            else:
                self._found[segment_id] = num_bytes
        self._foreign_files = self._of_other_models()

    def whole(self, segments: Iterable[Segment]) -> frozenset[SegmentId]:
        """Return the segments that had a file of the right size when the folder was opened."""
        return frozenset(
            segment.segment_id
            for segment in segments
            if may_hold(self._found.get(segment.segment_id, 0), segment)
        )

    def described(self) -> list[Segment]:
        """List the segments that the files of the start claim to be; `read` checks that. `adopt` is next."""
        indexed, segments = read_index(self._files, self._folder), []
        for segment_id, num_bytes in self._found.items():
            segment = indexed.get(segment_id) or self._claimed(segment_id)
            if segment is not None and may_hold(num_bytes, segment):
                segments.append(segment)
        return segments

    def save_index(self) -> None:
        """Write what `described` reads at the next start. If that fails, the next start takes longer."""
        with self._lock:
            held = list(self._objects.values())
        with suppress(OSError):
            write_index(self._files, self._folder, held)

    def _claimed(self, segment_id: SegmentId) -> Segment | None:
        with suppress(ObjectError, OSError):
            segment, fingerprint = claimed(self._files, self._path(segment_id))
            if segment.segment_id == segment_id and fingerprint == self.form.fingerprint:
                return segment
        return None

    def adopt(self, segments: Iterable[Segment]) -> None:
        """Hold the files of the start that belong to these segments; `sweep` deletes the others."""
        with self._lock:
            self._hold(segments)
            self._garbage.extend(self._path(segment_id) for segment_id in self._found)
            self._found.clear()

    def _hold(self, segments: Iterable[Segment]) -> None:
        for segment in segments:
            if self._found.pop(segment.segment_id, None) is not None:
                self._objects[segment.segment_id] = segment
                self.num_bytes += segment.num_bytes

    @property
    def parts(self) -> Sequence[LowerTier]:
        return (self,)

    def ids(self) -> list[SegmentId]:
        with self._lock:
            return list(self._objects)

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._objects

    def takes(self, segment: Segment) -> bool:
        """Return true: every segment is written."""
        return True

    def write(self, segment: Segment, rows: tuple[Rows, ...]) -> None:
        """
        Store a segment; it is held once its file is complete and has its final name.

        Raises:  OSError, also if too little space is free; the segment is not held then
        """
        if not self.is_open:
            raise OSError(errno.ENODEV, "its folder could not be used yet")
        path = self._path(segment.segment_id)
        unfinished = path.with_name(path.name.removesuffix(SUFFIX) + UNFINISHED)
        if path.parent not in self._made:
            self._files.make_folder(path.parent)
            self._made.add(path.parent)
        num_free = self._files.free_bytes(path.parent) - self._keep_free_bytes - segment.num_bytes
        self._make_way(segment.num_bytes, num_free)
        if num_free < 0:
            raise OSError(errno.ENOSPC, "less space is free than is to be left")
        planes = self.form.planes(segment.num_tokens)
        header = Header(segment, self.form.fingerprint, planes, checks_of(rows))
        try:
            write_object(self._files, unfinished, header, rows)
            self._files.rename(unfinished, path)
        except OSError:
            self._made.discard(path.parent)
            with suppress(OSError):
                self._files.delete(unfinished)
            raise
        with self._lock:
            self._objects[segment.segment_id] = segment
            self.num_bytes += segment.num_bytes
            self.counts["written"] += 1

    def read(self, segment_id: SegmentId, *, planes: Iterable[int] | None = None) -> tuple[Rows, ...] | None:
        """
        Return the bytes of a segment, or of some planes, which match their checks; None if it is not held.

        A segment that cannot be read, or is not what was written, is dropped.
        Raises:  BusyError if this process has no room for an open file
        """
        segment = self._objects.get(segment_id)
        if segment is None:
            return None
        try:
            is_small, path = segment.num_bytes < CHUNK_BYTES, self._path(segment_id)
            with closing(StoredObject(self._files, path, self.bytes_read, counts_header=is_small)) as stored:
                self._check(stored.header, segment)
                numbers = range(len(stored.header.planes)) if planes is None else planes
                rows = tuple(stored.rows(number) for number in numbers)
        except (ObjectError, OSError) as exc:
            if isinstance(exc, OSError) and exc.errno in _OURS:
                raise BusyError from exc
            self._drop_damaged(segment_id, exc)
            return None
        with self._lock:
            self.counts["read"] += 1
        return rows

    def drop(self, segment_ids: Iterable[SegmentId]) -> list[SegmentId]:
        """Forget segments, whose files `sweep` deletes; unknown ids are ignored. Returns those held."""
        with self._lock:
            held = [
                self._objects.pop(segment_id) for segment_id in segment_ids if segment_id in self._objects
            ]
            self.num_bytes -= sum(segment.num_bytes for segment in held)
            self.counts["deleted"] += len(held)
            self._garbage.extend(self._path(segment.segment_id) for segment in held)
        return [segment.segment_id for segment in held]

    def sweep(self) -> bool:
        """Delete one file that no segment needs, also of other models. Returns whether it did. One thread."""
        if self._garbage:
            self._delete(self._garbage[0])
            self._garbage.popleft()
            return True
        path = next(self._foreign_files, None)
        if path is not None:
            self._delete(path)
        return path is not None

    def close(self) -> None:
        """Do nothing: no file is open between calls."""

    @property
    def is_swept(self) -> bool:
        """Return whether no file of this model waits to be deleted."""
        return not self._garbage

    def segment(self, segment_id: SegmentId) -> Segment | None:
        """Return what is known of a segment that is held."""
        return self._objects.get(segment_id)

    def _of_other_models(self) -> Iterator[Path]:
        for folder in self._foreign:
            yield from (shelf / name for shelf, name, _, _ in listed(folder, self._files))
            delete_index(self._files, folder)
            remove_empty(self._files, folder)

    def _make_way(self, num_bytes: int, num_free: int) -> None:
        """Let `sweep` delete spare files until `num_bytes` more fit the budget, and the disk's free space."""
        num_spare = sum(each for _, each in self._spare)
        excess = max(self.num_bytes + num_spare + num_bytes - self.max_bytes, -num_free)
        while self._spare and excess > 0:
            path, each = self._spare.popleft()
            self._garbage.append(path)
            excess -= each

    def _check(self, header: Header, segment: Segment) -> None:
        if header.fingerprint != self.form.fingerprint:
            raise ObjectError("it is of another model")
        if header.segment != segment or header.planes != self.form.planes(segment.num_tokens):
            raise ObjectError("it is another segment")

    def _drop_damaged(self, segment_id: SegmentId, exc: ObjectError | OSError) -> None:
        if not self.drop([segment_id]):
            return  # evicted while it was read
        is_damaged = isinstance(exc, ObjectError)
        with self._lock:
            self.counts["damaged" if is_damaged else "failed"] += 1
        what = str(exc) if is_damaged else f"the system says: {exc.strerror or type(exc).__name__}"  # type: ignore[union-attr]  # an OSError
        log.warning("a stored segment was deleted and is computed again: %s", what)

    def _delete(self, path: Path) -> None:
        """Delete a file. If that fails it stays, held by no segment, and the next start deletes it."""
        with suppress(OSError):
            self._files.delete(path)

    def _path(self, segment_id: SegmentId) -> Path:
        return object_path(self._folder, segment_id)
