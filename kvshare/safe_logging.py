"""
What a log says of an exception that is not ours: classes and places. Its message may quote a prompt.

Errors that were written to be read (`KVShareError`, the disk's `StoreError`) are logged by their messages,
where they are caught.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path


def class_and_place(exc: BaseException) -> str:
    """`UpstreamError at upstream.py:78, caused by ClientOSError at ...`, for one line of a log."""
    return ", caused by ".join(type(failure).__name__ + _place(failure) for failure in _causes(exc))


def classes_and_places(exc: BaseException) -> str:
    """The tracebacks of an exception and of its causes, each after its class."""
    return "\ncaused by ".join(
        f"{type(failure).__name__}\n{''.join(traceback.format_tb(failure.__traceback__))}".rstrip()
        for failure in _causes(exc)
    )


def _causes(exc: BaseException) -> Iterator[BaseException]:
    failure: BaseException | None = exc
    while failure is not None:
        yield failure
        failure = failure.__cause__


def _place(exc: BaseException) -> str:
    """Where it was raised; nothing for an exception that was not."""
    frames = traceback.extract_tb(exc.__traceback__)
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
