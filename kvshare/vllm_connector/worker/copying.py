"""
A second thread, which copies for the worker: one job after the other, in the order of submission.

The order protects bytes: a segment's memory is read for a load before the next segment is written there.
Ranks that share memory have a thread each: there it is freed when all of them have come that far.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from kvshare.safe_logging import classes_and_places

log = logging.getLogger("vllm.kvshare")

_CLOSE_S = 10.0


@dataclass(eq=False)
class Job:
    """Something to copy. `failed`: it raised an error, which is logged."""

    what: str  # for the log
    work: Callable[[], Mapping[str, float]]  # returns seconds by stage
    failed: bool = False
    seconds: Mapping[str, float] = field(default_factory=dict)
    _done: threading.Event = field(default_factory=threading.Event)

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether it is done by then."""
        return self._done.wait(timeout_s)

    def run(self) -> None:
        try:
            with torch.inference_mode():
                self.seconds = self.work()
        except Exception as exc:  # noqa: BLE001  logged, without its message
            self.failed = True
            log.error("kvshare: %s failed: %s", self.what, classes_and_places(exc))
        self._done.set()


class CopyThread:
    """Starts with its first job; a daemon thread."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()  # None: no more will come
        self._thread: threading.Thread | None = None

    def submit(self, job: Job) -> Job:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvshare-copies", daemon=True)
            self._thread.start()
        self._jobs.put(job)
        return job

    def close(self) -> None:
        """End the thread when its jobs are done."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        _unpin_from_vllm_cpus()
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # it refers to large buffers


def _unpin_from_vllm_cpus() -> None:
    """
    Run on one processor at a time, on any: threads inherit vLLM's binding to its own processors.

    `torch.set_num_threads` is not used: part of its effect is process-wide.
    """
    try:
        os.sched_setaffinity(threading.get_native_id(), range(os.cpu_count() or 1))
        ctypes.CDLL(None).omp_set_num_threads(1)
    except (AttributeError, OSError):
        log.debug("kvshare: the thread that copies stays on vLLM's own processors")


class LapTimer:
    """Each call returns the seconds since the last one."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def __call__(self) -> float:
        before, self._at = self._at, time.perf_counter()
        return self._at - before
