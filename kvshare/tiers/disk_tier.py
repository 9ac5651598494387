"""
Segments as files in one folder, within a budget of bytes.

    <folder>/<fingerprint>/<2 digits>/<16 digits of the segment id>.kv    an object, see `kv_object.py`
    ...                                                    .kv.tmp        one that is being written
    <folder>/<fingerprint>/index                           what they say of themselves, see `object_index.py`

The folder of another fingerprint is of another model, tokenizer, dtype or calibration: it is never read, and
is deleted. `open`, `write`, `read` and `sweep` wait for the disk; the other methods look at
dictionaries.
"""

from __future__ import annotations

import errno
import logging
import re
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

from delta_tree import Segment, SegmentId
from kvshare.tiers.files import Files, remove_empty
from kvshare.tiers.kv_object import (
    MOST_HEADER_BYTES,
    PAGE_BYTES,
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
from kvshare.tiers.object_index import delete_index, read_index, write_index

log = logging.getLogger(__name__)

SUFFIX, UNFINISHED = ".kv", ".kv.tmp"
OBJECT_NAME = re.compile(r"([0-9a-f]{16})\.kv")
FORM_NAME = re.compile(r"[0-9a-f]{16}")
# Errors of this process, not of the file that was asked for.
_OURS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EINTR, errno.EAGAIN}


class DiskTier:
    """A `LowerTier`. `keep_free_bytes`: nothing is written with less of the disk free. Thread-safe."""

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
        self.counts: Counter[str] = Counter()  # written, read, damaged, failed, deleted: objects
        self._root, self._folder = folder, folder / form.fingerprint[:16]
        self._keep_free_bytes = keep_free_bytes
        self._files = files or Files()
        self._objects: dict[SegmentId, Segment] = {}
        self._found: dict[SegmentId, int] = {}  # bytes of the files that were there at the start
        self._garbage: deque[Path] = deque()  # files of this folder
        self._foreign: list[Path] = []  # folders of other models
        self._foreign_files = self._of_other_models()
        self._made: set[Path] = set()
        self._lock = threading.Lock()
        self.is_open = False  # nothing is written before

    def open(self) -> None:
        """Look at what is there: names and sizes only. Raises OSError if the folder cannot be used."""
        self._found.clear()
        self._foreign.clear()
        self._files.make_folder(self._folder)
        for name, _, is_folder in self._files.entries(self._root):
            if is_folder and FORM_NAME.fullmatch(name) and name != self._folder.name:
                self._foreign.append(self._root / name)
        for shelf, _, is_folder in list(self._files.entries(self._folder)):
            if not is_folder:
                continue
            for name, num_bytes, _ in self._files.entries(self._folder / shelf):
                if (match := OBJECT_NAME.fullmatch(name)) is not None:
                    self._found[SegmentId(int(match[1], 16))] = num_bytes
                elif name.endswith(UNFINISHED):
                    self._garbage.append(self._folder / shelf / name)
        self.is_open = True

    def whole(self, segments: Iterable[Segment]) -> frozenset[SegmentId]:
        """Those of which a file of the right size was there when the folder was opened."""
        return frozenset(
            segment.segment_id
            for segment in segments
            if _may_hold(self._found.get(segment.segment_id, 0), segment)
        )

    def described(self) -> list[Segment]:
        """What the files of the start say they are, which is checked when they are read. `adopt` follows."""
        indexed, found = read_index(self._files, self._folder), []
        for segment_id, num_bytes in self._found.items():
            segment = indexed.get(segment_id) or self._claimed(segment_id)
            if segment is not None and _may_hold(num_bytes, segment):
                found.append(segment)
        return found

    def save_index(self) -> None:
        """What `described` reads at the next start. One that cannot be written costs that start some time."""
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
        """Hold those of the files of the start that belong to these segments; the others are deleted."""
        for segment in segments:
            if self._found.pop(segment.segment_id, None) is not None:
                self._objects[segment.segment_id] = segment
                self.num_bytes += segment.num_bytes
        self._garbage.extend(self._path(segment_id) for segment_id in self._found)
        self._found.clear()

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
        """All of them."""
        return True

    def write(self, segment: Segment, rows: tuple[Rows, ...]) -> None:
        """
        Store a segment; it is held once its whole file has its name.

        Raises:  OSError, also where too little space is free; nothing is held then
        """
        if not self.is_open:
            raise OSError(errno.ENODEV, "its folder could not be used yet")
        path = self._path(segment.segment_id)
        unfinished = path.with_name(path.name.removesuffix(SUFFIX) + UNFINISHED)
        if path.parent not in self._made:
            self._files.make_folder(path.parent)
            self._made.add(path.parent)
        if self._files.free_bytes(path.parent) < self._keep_free_bytes + segment.num_bytes:
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
        The bytes of a segment, or of some planes, once they match their checks; None if it is not held.

        One that cannot be read, or is not what was written, is dropped.
        Raises:  BusyError if this process has no room for an open file
        """
        segment = self._objects.get(segment_id)
        if segment is None:
            return None
        try:
            with closing(StoredObject(self._files, self._path(segment_id))) as found:
                self._check(found.header, segment)
                numbers = range(len(found.header.planes)) if planes is None else planes
                rows = tuple(found.rows(number) for number in numbers)
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
        """Delete one file that belongs to nothing. Returns whether there was any. For one thread."""
        if self._garbage:
            self._delete(self._garbage[0])
            self._garbage.popleft()
            return True
        path = next(self._foreign_files, None)
        if path is not None:
            self._delete(path)
        return path is not None

    def close(self) -> None:
        """No file is open between calls."""

    @property
    def is_swept(self) -> bool:
        """Whether no file of this model is to be deleted."""
        return not self._garbage

    def segment(self, segment_id: SegmentId) -> Segment | None:
        """What is known of a segment that is held."""
        return self._objects.get(segment_id)

    def _of_other_models(self) -> Iterator[Path]:
        for folder in self._foreign:
            yield from object_files(folder, self._files)
            delete_index(self._files, folder)
            remove_empty(self._files, folder)

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
        """A file that cannot be deleted now belongs to nothing, and is deleted at the next start."""
        with suppress(OSError):
            self._files.delete(path)

    def _path(self, segment_id: SegmentId) -> Path:
        return object_path(self._folder, segment_id)


def object_path(folder: Path, segment_id: SegmentId) -> Path:
    """Where a segment is in the folder of its form."""
    digits = f"{segment_id:016x}"
    return folder / digits[-2:] / f"{digits}{SUFFIX}"


def object_files(folder: Path, files: Files) -> Iterator[Path]:
    """All objects in the folder of a form, unfinished ones, too."""
    for shelf, _, is_folder in list(files.entries(folder)):
        for name, _, _ in files.entries(folder / shelf) if is_folder else ():
            if OBJECT_NAME.fullmatch(name) or name.endswith(UNFINISHED):
                yield folder / shelf / name


def _may_hold(file_bytes: int, segment: Segment) -> bool:
    """Whether a file of this size may be the segment's object: after its bytes only whole pages are left."""
    rest = file_bytes - segment.num_bytes
    return 0 < rest <= MOST_HEADER_BYTES and rest % PAGE_BYTES == 0
