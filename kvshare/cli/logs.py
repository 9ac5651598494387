"""The log of `kvshare serve`: one handler on stderr, as text or as one JSON object a line."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

from kvshare.safe_logging import classes_and_places


class Discreet(logging.Formatter):
    """Exceptions by class and place, also those that asyncio and libraries log."""

    def formatException(self, ei: tuple[Any, ...]) -> str:
        return classes_and_places(ei[1]) if ei[1] is not None else ""


class JsonLines(Discreet):
    """A record as one JSON object: time, level, logger, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(*, level: str, json_lines: bool) -> None:
    """Send our records from `level` ("info", ...) up to stderr, and those of libraries from warnings up."""
    handler = logging.StreamHandler()
    text = Discreet("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonLines() if json_lines else text)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    for package in ("kvshare", "proxy", "delta_tree", "vector_index"):
        logging.getLogger(package).setLevel(level.upper())
