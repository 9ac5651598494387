"""
A second thread, which copies for the worker: batch by batch, the most urgent job first.

    due    a load is due when it would be finished if it had begun at once; a save some time later. The job
           that is due first makes the next batch: short loads overtake long ones, loads overtake saves, and
           none waits for ever, as a job's time does not move. A job for which vLLM's thread waits is due at
           once
    room   a GPU gets only a few batches ahead, so that the next job is chosen late

On a GPU a batch is launched, on a CPU the thread copies itself. The order does not protect bytes: see
`segment_store.py`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from delta_tree import SegmentId
from kvshare.collector import take_short_turns
from kvshare.safe_logging import classes_and_places

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.layer_arrivals import LayerArrivals

log = logging.getLogger("vllm.kvshare")

_CLOSE_S = 10.0
_POLL_S = 0.0005  # between two queries of a GPU that has no room for another batch, or is awaited
_BYTES_PER_S = 10e9  # decides how long a load is overtaken by shorter ones
_SAVE_LATER_S = 1.0


class Work(Protocol):
    """The work of a job. The thread that copies calls everything that does not say "on vLLM's thread"."""

    @property
    def has_room(self) -> bool:
        """Return whether another batch can be made or launched now."""

    def batches(self) -> Iterator[None]:
        """Make or launch all batches, and yield between two of them."""

    @property
    def is_past(self) -> bool:
        """Return whether the device has finished everything that was launched. On vLLM's thread."""

    def wait_until_read(self) -> None:
        """Wait until vLLM may overwrite what this reads. On vLLM's thread, after the last batch."""

    def finish(self) -> Mapping[str, float]:
        """Take over the results; return the seconds of each stage. On vLLM's thread, once, at the end."""


class LoadWork(Work, Protocol):
    """
    `damaged`: once it has finished, the segments whose bytes are not those that were saved. `arrivals`: the
    layers that have arrived, if a pass can begin before all have; else None.
    """

    @property
    def damaged(self) -> set[SegmentId]: ...

    @property
    def arrivals(self) -> LayerArrivals | None: ...

    def rush(self) -> None:
        """Let all of its batches be launched, whatever their number. On vLLM's thread."""

    def written_s(self, since: Any) -> float:
        """Return for how many seconds it still wrote after a mark. On vLLM's thread, when it is done."""


@dataclass(eq=False)
class Job:
    """Something to copy. `failed`: it raised an error, which is logged."""

    what: str  # for the log
    work: Work
    due_s: float
    failed: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    _batches: Iterator[None] | None = None
    _launched: threading.Event = field(default_factory=lambda: threading.Event())  # looked up: see `lab`
    _is_finished: bool = False

    @property
    def is_launched(self) -> bool:
        """Return whether its last batch is made, or launched on the GPU."""
        return self._launched.is_set()

    @property
    def is_done(self) -> bool:
        """Return whether it is finished on the device, too. On vLLM's thread."""
        if not self._is_finished and self.is_launched:
            self._finish()
        return self._is_finished

    def wait_until_launched(self, timeout_s: float | None = None) -> None:
        self._launched.wait(timeout_s)

    @property
    def has_room(self) -> bool:
        """Return whether it can advance. Also after an error of the device: that ends the job."""
        try:
            return self.work.has_room
        except Exception as exc:  # noqa: BLE001  logged, without its message
            self._fail(exc)
            return True

    def advance(self) -> None:
        """Make its next batch. On the thread that copies."""
        try:
            with torch.inference_mode():
                if self._batches is None:
                    self._batches = self.work.batches()
                next(self._batches)
        except StopIteration:
            self._end()
        except Exception as exc:  # noqa: BLE001  logged, without its message
            self.fail(exc)

    def fail(self, exc: Exception) -> None:
        """End the job: it has no more batches."""
        self._fail(exc)
        self._end()

    def _end(self) -> None:
        self._batches = None
        self._launched.set()

    def _finish(self) -> None:
        try:
            if not self.work.is_past:
                return
            if not self.failed:
                self.seconds = self.work.finish()
        except Exception as exc:  # noqa: BLE001  logged, without its message
            self._fail(exc)
        self._is_finished = True

    def _fail(self, exc: Exception) -> None:
        self.failed = True
        log.error("kvshare: %s failed: %s", self.what, classes_and_places(exc))


class CopyQueue:
    """Jobs that have batches left. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._jobs: list[Job] = []  # in the order of submission

    def __len__(self) -> int:
        return len(self._jobs)

    def submit(self, what: str, work: Work, *, num_bytes: int, is_save: bool = False) -> Job:
        later_s = _SAVE_LATER_S if is_save else 0.0
        job = Job(what, work, time.monotonic() + num_bytes / _BYTES_PER_S + later_s)
        with self.changed:
            self._jobs.append(job)
            self.changed.notify()
        return job

    def hurry(self, job: Job) -> None:
        """Make a job due at once, because vLLM's thread waits for it."""
        with self.changed:
            job.due_s = float("-inf")
            self.changed.notify()

    def advance(self) -> Job | None:
        """Make the next batch of the job with room that is due first. Returns the job, or None."""
        with self.changed:
            ready = [job for job in self._jobs if job.has_room]
            job = min(ready, key=lambda job: job.due_s, default=None)
        if job is not None:
            job.advance()
            if job.is_launched:
                with self.changed:
                    self._jobs.remove(job)
        return job

    def _fail_all(self, exc: Exception) -> None:
        """End all jobs after an error outside of a job: vLLM's thread waits for jobs, so none may stay."""
        with self.changed:
            jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.fail(exc)


class CopyThread(CopyQueue):
    """A daemon thread that starts with its first job."""

    def __init__(self, enter: Callable[[], None] = lambda: None) -> None:
        """`enter`: the thread calls this before its first batch."""
        super().__init__()
        self._enter = enter
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def submit(self, what: str, work: Work, *, num_bytes: int, is_save: bool = False) -> Job:
        if self._thread is None:
            take_short_turns()  # the new thread releases the GIL in each call of torch, and must get it back
            self._thread = threading.Thread(target=self._run, name="kvshare-copies", daemon=True)
            self._thread.start()
        return super().submit(what, work, num_bytes=num_bytes, is_save=is_save)

    def close(self) -> None:
        """End the thread when its jobs are done."""
        with self.changed:
            self._is_closing = True
            self.changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def wait(self, job: Job, timeout_s: float | None = None) -> bool:
        """Wait until a job is done, or for `timeout_s`. Returns whether it is done. On vLLM's thread."""
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        job.wait_until_launched(timeout_s)
        while not job.is_done and (end_s is None or time.monotonic() < end_s):
            time.sleep(_POLL_S)
        return job.is_done

    def wait_for_all(self, jobs: Sequence[Job]) -> None:
        """Wait until these jobs are done, before all others. On vLLM's thread."""
        for job in jobs:
            self.hurry(job)
        for job in jobs:
            self.wait(job)

    def wait_until_read(self, job: Job) -> None:
        """Wait until vLLM may overwrite what a job reads. On vLLM's thread."""
        self.hurry(job)
        job.wait_until_launched()
        if not job.is_done:
            job.work.wait_until_read()

    def _run(self) -> None:
        _unpin_from_vllm_cpus()
        has_entered = False
        while True:
            with self.changed:
                while not self._jobs:
                    if self._is_closing:
                        return
                    self.changed.wait()
            try:
                if not has_entered:
                    self._enter()
                    has_entered = True
                if self.advance() is None:
                    time.sleep(_POLL_S)
            except Exception as exc:  # noqa: BLE001  logged, without its message
                self._fail_all(exc)


def _unpin_from_vllm_cpus() -> None:
    """
    Let this thread run on any processor, but on one at a time: threads inherit vLLM's binding to processors.

    `torch.set_num_threads` is not used, because part of its effect is process-wide.
    """
    try:
        leave_vllm_cpus()
        ctypes.CDLL(None).omp_set_num_threads(1)
    except (AttributeError, OSError):
        log.debug("kvshare: the thread that copies stays on vLLM's own processors")


def leave_vllm_cpus() -> None:
    """Let this thread, and those that it starts, run on any processor. Raises AttributeError or OSError."""
    os.sched_setaffinity(threading.get_native_id(), range(os.cpu_count() or 1))


class LapTimer:
    """Each call returns the seconds since the last one."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def __call__(self) -> float:
        before, self._at = self._at, time.perf_counter()
        return self._at - before
