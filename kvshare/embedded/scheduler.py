"""
A worker thread advances all tasks in turn, one quantum each, so that all streams progress.

A quantum is a prefill chunk (`chunks.py`) or one token of each choice.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

from kvshare.embedded.chunks import PrefillChunks
from kvshare.embedded.turns import TenantTurns
from kvshare.errors import RequestError
from kvshare.safe_logging import classes_and_places
from kvshare.sharing.cost import CostModel

log = logging.getLogger(__name__)


class Advancing(Protocol):
    """
    A request (`Task`), or an answer that is computed once more (`Shadow`).

    `prefilled`: its prompt is computed; until then `num_remaining` tokens are left. `cancelled`: it ends
    after the quantum in progress. `is_pending`: a grammar has yet to say if its last token completes the
    answer, which `settle` asks.
    """

    @property
    def tenant(self) -> str: ...
    @property
    def cost(self) -> CostModel: ...
    @property
    def prefilled(self) -> bool: ...
    @property
    def num_remaining(self) -> int: ...
    @property
    def cancelled(self) -> bool: ...
    @property
    def is_pending(self) -> bool: ...

    def advance(self, *, max_queries: int) -> bool: ...
    def settle(self) -> bool: ...
    def end(self, error: BaseException | None) -> None: ...


class Scheduler:
    """
    Tasks of a tenant take turns, and tenants get equal shares (`turns.py`): after its quantum a task waits
    for its next turn, or is released.

    While a grammar's process takes a token of one task, the next task has its quantum. After that the first
    task ends if its token completed the answer; it need not wait for its next turn.

    `on_release(task, error)` is called, from any thread, when the worker will not use a task again.
    """

    def __init__(
        self, *, chunk_tokens: int, on_release: Callable[[Advancing, BaseException | None], object]
    ) -> None:
        self._chunks = PrefillChunks(chunk_tokens)
        self._on_release = on_release
        self._turns = TenantTurns[Advancing](lambda task: task.tenant, _left)
        self._tasks: set[Advancing] = set()
        self._pending: set[Advancing] = set()  # tasks whose last token may have completed the answer
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvshare-compute")

    def stop(self) -> None:
        """End the thread after the quantum in progress; tasks still running are released with an error."""
        self._worker.shutdown(cancel_futures=True)
        for task in tuple(self._tasks):
            self._on_release(task, RuntimeError("the engine was stopped"))

    def submit(self, task: Advancing) -> None:
        """Raises RuntimeError after `stop`."""
        self._tasks.add(task)
        self._wait_for_turn(task)

    def _wait_for_turn(self, task: Advancing) -> None:
        self._turns.add(task)
        self._worker.submit(self._take_turn)

    def _take_turn(self) -> None:
        """Run the quantum of one ready task: the worker is called once for each."""
        task = self._turns.take()
        began = time.perf_counter()
        self._advance(task)
        self._turns.note(task.tenant, time.perf_counter() - began)

    def _advance(self, task: Advancing) -> None:
        if task not in self._tasks:  # its answer was settled in another task's turn
            return
        self._pending.discard(task)
        if self._has_more(task, lambda: task.advance(max_queries=self._chunk_of(task))):
            with suppress(RuntimeError):  # `stop` was called meanwhile: it releases the task
                self._wait_for_turn(task)
        for other in tuple(self._pending):
            if not self._has_more(other, other.settle) or not other.is_pending:
                self._pending.discard(other)
        if task in self._tasks and task.is_pending:
            self._pending.add(task)

    def _has_more(self, task: Advancing, work: Callable[[], bool]) -> bool:
        """Do work on a task, and release the task if nothing is left to do. Returns whether there is more."""
        error: BaseException | None = None
        more = False
        try:
            more = not task.cancelled and work()
        except RequestError as exc:  # its grammar cannot be followed any further
            error = exc
        except BaseException as exc:  # noqa: BLE001  logged, without its message; panics in Rust are not an Exception
            log.error("a request failed in the engine, its client gets an error: %s", classes_and_places(exc))
            error = exc
        if not more:
            self._tasks.discard(task)
            self._on_release(task, error)
        return more

    def _chunk_of(self, task: Advancing) -> int:
        others_decode = any(other.prefilled for other in tuple(self._tasks) if other is not task)
        return self._chunks.next(
            task.tenant, others_decode=others_decode, seconds=lambda number: task.cost.rates.full_s(number)
        )


def _left(task: Advancing) -> int | None:
    return None if task.prefilled else task.num_remaining
