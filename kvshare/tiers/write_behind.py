"""A thread that writes while requests run: one piece after the other, at most `bytes_per_s`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from kvshare.safe_logging import classes_and_places

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0  # if nothing wakes the thread: a disk may have space again


class WriteBehind:
    """
    `work` does one piece and returns its bytes; None: there is nothing that can be done now.

    `bytes_per_s`: the limit on average. While `close` runs there is none.
    """

    def __init__(self, work: Callable[[], int | None], *, bytes_per_s: float) -> None:
        self._work = work
        self._bytes_per_s = bytes_per_s
        self._changed = threading.Condition()
        self._is_woken = False
        self._until: float | None = None  # when the thread must end; None: `close` was not called
        self._thread = threading.Thread(target=self._run, name="kvshare-disk-writer", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wake the thread: there is something to do."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def close(self, *, within_s: float) -> None:
        """Do what is left, for at most `within_s`, and wait for the thread's end, for a second more."""
        with self._changed:
            self._until = time.monotonic() + within_s
            self._changed.notify_all()
        self._thread.join(within_s + _LOOK_EVERY_S)

    def _run(self) -> None:
        while self._until is None or time.monotonic() < self._until:
            num_bytes = self._one_piece()
            with self._changed:
                if num_bytes is None and self._until is not None:
                    return
                if num_bytes is None:
                    self._changed.wait_for(lambda: self._is_woken or self._until is not None, _LOOK_EVERY_S)
                    self._is_woken = False
                elif num_bytes:
                    self._changed.wait_for(lambda: self._until is not None, num_bytes / self._bytes_per_s)

    def _one_piece(self) -> int | None:
        try:
            return self._work()
        except Exception as exc:  # noqa: BLE001  logged, without its message
            log.error("KV could not be written to disk; please report this: %s", classes_and_places(exc))
            return None
