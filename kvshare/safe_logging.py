"""
Logs classes and places of exceptions that are not ours, whose messages may quote a prompt. Sets up the log of
our programs: one handler on stderr, as text or as one JSON object a line.

Errors that were written to be read (`KVShareError`, the disk's `StoreError`) are logged by their messages,
where they are caught.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def configure(*, level: str, json_lines: bool) -> None:
    """Send our records from `level` ("info", ...) up to stderr, and those of libraries from warnings up."""
    handler = logging.StreamHandler()
    text = Discreet("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if json_lines else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    set_level(level)


def set_level(level: str) -> None:
    """Send our records from this level up from now on."""
    for package in ("kvshare", "proxy", "delta_tree", "vector_index"):
        logging.getLogger(package).setLevel(level.upper())


class Discreet(logging.Formatter):
    """Exceptions by class and place, also those that asyncio and libraries log."""

    def formatException(self, ei: tuple[Any, ...]) -> str:
        return classes_and_places(ei[1]) if ei[1] is not None else ""


class JsonLines(Discreet):
    """
    A record as one JSON object: time, level, logger, message, and the traceback if there is one. What a call
    gives as `extra={"fields": {...}}` are further members.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def class_and_place(exc: BaseException) -> str:
    """`UpstreamError at upstream.py:78, caused by ClientOSError at ...`, for one line of a log."""
    return ", caused by ".join(type(failure).__name__ + _place(failure) for failure in _causes(exc))


def classes_and_places(exc: BaseException) -> str:
    """Return the tracebacks of an exception and of its causes, each after its class."""
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
    frames = traceback.extract_tb(exc.__traceback__)
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
