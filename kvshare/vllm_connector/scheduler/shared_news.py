"""
What other vLLMs have written to the shared store, and what must leave it.

    start     segments that the store still has are listed, the newest first: for some seconds, the rest later
    learned   another vLLM has written a segment: it can be read here, as from disk (`disk_plan.py`)
    dropped   the proxy has dropped a segment: if it is known here, now or later, it is deleted in the store,
              for all. If it is not known, or not deleted when vLLM ends, it expires in the store
    renewed   segments known here are kept from expiring; those that have expired are forgotten

It has a thread of its own: neither steps nor requests wait for the store. If the store hangs, only what is in
it is missing. Does not import vLLM.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from delta_tree import Segment, SegmentId
from kvshare.safe_logging import class_and_place
from kvshare.tiers.shared_backend import BackendError
from kvshare.tiers.shared_segments import SegmentNews
from kvshare.tiers.shared_tier import SharedStore
from kvshare.vllm_connector.scheduler.disk_plan import DiskPlan

log = logging.getLogger("vllm.kvshare")

START_S: Final = 5.0  # how long a start lists the store; the rest is listed later
_LOOK_EVERY_S: Final = 0.5
_DELETE_AGAIN_S: Final = 30.0  # pause of deletions after a failure; learning and renewals go on
_RENEWALS: Final = 4  # in the time after which a value expires
_MOST_DROPPED: Final = 100_000
_BATCH: Final = 256  # keys


class SharedNews:
    """One per scheduler. `note_dropped` may be called from any thread."""

    def __init__(self, store: SharedStore, disk: DiskPlan, *, place: str) -> None:
        """`place`: a name of the store; all that share the store use the same name."""
        self.place = place
        self.is_listing = True  # not all segments that were there at the start are known yet
        self._store, self._disk, self._news = store, disk, SegmentNews(store)
        self._dropped: OrderedDict[SegmentId, None] = OrderedDict()  # never adopted again
        self._leaving: OrderedDict[SegmentId, Segment] = OrderedDict()  # to be deleted in the store
        self._renewed_at = time.monotonic()
        self._delete_from = 0.0  # no deletion before this time, after a failure
        self._problem: str | None = None
        self._delete_problem: str | None = None
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvshare-shared-news", daemon=True)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return the current problems of the store, for `/info`."""
        problem, undeleted = self._problem, self._delete_problem
        return (
            *((f"the shared store cannot be used now: {problem}",) if problem is not None else ()),
            *((f"nothing is deleted in the shared store: {undeleted}",) if undeleted is not None else ()),
        )

    def begin(self) -> None:
        """List the store, for about `START_S` at most, then go on in the thread."""
        until = time.monotonic() + START_S
        while self.is_listing and time.monotonic() < until and not self._store.breaker.is_open:
            if not self._looked():
                self._is_closed.wait(min(_LOOK_EVERY_S, max(0.0, until - time.monotonic())))
        self._thread.start()

    def note_dropped(self, segment_ids: Iterable[SegmentId]) -> None:
        """Note that the proxy has dropped segments: delete them in the store, and never adopt them again."""
        with self._lock:
            for segment_id in segment_ids:
                self._dropped[segment_id] = None
                if (segment := self._disk.shared.pop(segment_id, None)) is not None:
                    self._leaving[segment_id] = segment
            for each in (self._dropped, self._leaving):
                while len(each) > _MOST_DROPPED:
                    each.popitem(last=False)

    def close(self) -> None:
        """Stop. Segments that are not deleted by then expire in the store."""
        self._is_closed.set()
        if self._thread.is_alive():
            self._thread.join(_LOOK_EVERY_S)
        self._store.backend.close()

    def _run(self) -> None:
        while not self._is_closed.is_set():
            if not self._looked():
                self._is_closed.wait(_LOOK_EVERY_S)
        self._delete()

    def _looked(self) -> bool:
        """Do one piece of work, and note problems. Returns whether there may be more work at once."""
        try:
            has_more = self._look()
        except BackendError as exc:
            self._note_problem(exc.strerror)
            return False
        except Exception as exc:  # noqa: BLE001  logged, without its message
            self._note_problem(f"{class_and_place(exc)}, please report this")
            return False
        self._note_problem(None)
        return has_more

    def _look(self) -> bool:
        """Do one piece of work. Raises BackendError; the next call does what was not done."""
        if self.is_listing:
            self.is_listing = self._news.take_earlier(self._take_earlier)
        has_more = self._news.take(self._take)
        if time.monotonic() - self._renewed_at > self._store.keep_s / _RENEWALS:
            self._renew()
        if self._leaving and time.monotonic() >= self._delete_from:
            self._delete()
        return has_more or self.is_listing

    def _take(self, segments: Sequence[Segment], *, is_earlier: bool = False) -> None:
        # The lock is held to the end, so that a later `note_dropped` sees what was adopted.
        with self._lock:
            self._leaving.update((each.segment_id, each) for each in segments if self._is_dropped(each))
            self._disk.adopt([each for each in segments if not self._is_dropped(each)], is_earlier=is_earlier)

    def _take_earlier(self, segments: Sequence[Segment]) -> None:
        self._take(self._news.those_there(segments), is_earlier=True)

    def _is_dropped(self, segment: Segment) -> bool:
        return segment.segment_id in self._dropped

    def _delete(self) -> None:
        """Delete dropped segments in the store; after a failure, try again later."""
        try:
            while self._leaving:
                with self._lock:
                    batch = list(self._leaving.values())[:_BATCH]
                self._store.delete([self._store.segment_key(segment) for segment in batch])
                with self._lock:
                    for segment in batch:
                        self._leaving.pop(segment.segment_id, None)
        except BackendError as exc:
            self._delete_from = time.monotonic() + _DELETE_AGAIN_S
            if self._delete_problem is None:
                log.warning(
                    "kvshare: what is dropped is not deleted in the shared store, where it ends %d s after "
                    "its last use: %s. This is tried again; see whether its access rules allow UNLINK",
                    *(self._store.keep_s, exc.strerror),
                )
            self._delete_problem = exc.strerror
        else:
            self._delete_problem = None

    def _renew(self) -> None:
        for batch in _batches(self._disk.known_shared()):
            there = self._store.renew([self._store.segment_key(segment) for segment in batch])
            gone = [segment for segment, is_there in zip(batch, there, strict=True) if not is_there]
            self._disk.note_ended(gone)
        self._renewed_at = time.monotonic()

    def _note_problem(self, problem: str | None) -> None:
        if problem is not None and self._problem is None:
            log.warning(
                "kvshare: what other vLLMs write to the shared store is not known here: %s. This is tried "
                "again",
                problem,
            )
        elif problem is None and self._problem is not None:
            log.warning("kvshare: the shared store answers again")
        self._problem = problem


def _batches(segments: Sequence[Segment]) -> Iterator[Sequence[Segment]]:
    return (segments[start : start + _BATCH] for start in range(0, len(segments), _BATCH))
