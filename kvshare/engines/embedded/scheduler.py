"""
One worker thread advances all running tasks in turn, one quantum each, so that all streams make progress.

While other tasks decode, prefill chunks are a quarter as long, so that a long prompt delays other answers
less.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from kvshare.engines.embedded.task import Task
from kvshare.safe_logging import classes_and_places

log = logging.getLogger(__name__)


class Scheduler:
    """
    Round-robin over tasks: after its quantum a task goes to the end of the worker's queue, or is released.

    A thread calls `on_release(task, error)` when the worker will not use a task again.
    """

    def __init__(
        self, *, chunk_tokens: int, on_release: Callable[[Task, BaseException | None], object]
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._on_release = on_release
        self._tasks: set[Task] = set()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvshare-compute")

    def stop(self) -> None:
        """End the thread after the quantum in progress; tasks still running are released with an error."""
        self._worker.shutdown(cancel_futures=True)
        for task in tuple(self._tasks):
            self._on_release(task, RuntimeError("the engine was stopped"))

    def submit(self, task: Task) -> None:
        """Raises RuntimeError after `stop`."""
        self._tasks.add(task)
        self._worker.submit(self._advance, task)

    def _advance(self, task: Task) -> None:
        """One quantum."""
        error: BaseException | None = None
        more = False
        try:
            more = not task.cancelled and task.advance(max_queries=self._chunk_for(task))
        except Exception as exc:  # noqa: BLE001  logged, without its message
            log.error("a request failed in the engine, its client gets an error: %s", classes_and_places(exc))
            error = exc
        if more:
            with suppress(RuntimeError):  # `stop` was called meanwhile: it releases the task
                self._worker.submit(self._advance, task)
        else:
            self._tasks.discard(task)
            self._on_release(task, error)

    def _chunk_for(self, task: Task) -> int:
        others_decode = any(other.prefilled for other in tuple(self._tasks) if other is not task)
        return max(1, self._chunk_tokens // 4) if others_decode else self._chunk_tokens
