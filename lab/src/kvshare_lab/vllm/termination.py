"""SIGTERM as an exception, so that a benchmark that gets it stops its servers and leaves its document."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(SystemExit):
    """SIGTERM has come. The exit code is the one that shells have for it."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


@contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """
    Raise Terminated on the first SIGTERM, so that servers are stopped: they have process groups of their own.

    Only in the main thread, which gets the signals.
    """

    def end(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not end the stopping
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
