"""
One worker thread that advances all running tasks in turn, a quantum each, so that streams interleave.

While others decode, prefill chunks are a quarter as long: a long prompt delays their next token less.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from kvshare.engines.embedded.task import Task
from kvshare.safe_logging import classes_and_places

log = logging.getLogger(__name__)


class Scheduler:
    """
    Round-robin over tasks. `on_release(task, error)` is called in the worker thread when a task leaves
    it.
    """

    def __init__(
        self, *, chunk_tokens: int, on_release: Callable[[Task, BaseException | None], object]
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._on_release = on_release
        self._tasks: deque[Task] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvshare-compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the quantum in progress; tasks still running are released with an error."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, task: Task) -> None:
        with self._wake:
            if self._stopping:
                raise RuntimeError("the scheduler has been stopped")
            self._tasks.append(task)
            self._wake.notify()

    def _run(self) -> None:
        while (task := self._next()) is not None:
            error: BaseException | None = None
            more = False
            if not task.cancelled:
                try:
                    more = task.advance(max_queries=self._chunk_for(task))
                except Exception as exc:  # noqa: BLE001  logged, without its message
                    log.error("a request failed while computing: %s", classes_and_places(exc))
                    error = exc
            if more:
                with self._wake:
                    self._tasks.append(task)
            else:
                self._on_release(task, error)
        for task in self._tasks:
            self._on_release(task, RuntimeError("the engine was stopped"))

    def _next(self) -> Task | None:
        with self._wake:
            while not self._tasks and not self._stopping:
                self._wake.wait()
            return None if self._stopping else self._tasks.popleft()

    def _chunk_for(self, task: Task) -> int:
        with self._wake:
            others_decode = any(other.prefilled for other in self._tasks)
        return max(1, self._chunk_tokens // 4) if others_decode else self._chunk_tokens
