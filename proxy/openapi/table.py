"""The table of routes: `routes.yaml` and `schemas.yaml`, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

_MEDIA = {"json": "application/json", "html": "text/html", "any": "*/*"}


class Access(StrEnum):
    """Who may use a route where keys are configured."""

    OPEN = "open"
    METRICS = "metrics"  # admins; without keys everybody, and also while the server starts
    KEY = "key"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a status means, and the component of each media type's schema, if it has one."""

    text: str
    media: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Operation:
    """A row: a method of a route. `routes.yaml` says what each part is."""

    method: str
    route: str
    group: str
    summary: str
    answers: Mapping[int | str, Answer]
    description: str = ""
    access: Access = Access.KEY
    body: str | None = None
    errors: tuple[int, ...] = ()
    error: str | None = "Error"
    path: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    query: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    example: Mapping[str, Any] | None = None


def _read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return document


def _operations(rows: Mapping[str, Mapping[str, Any]]) -> tuple[Operation, ...]:
    return tuple(_operation(key, row) for key, row in rows.items())


def _operation(key: str, row: Mapping[str, Any]) -> Operation:
    """`key`: as "GET /health"."""
    method, _, route = key.partition(" ")
    answers = {status: _answer(**entry) for status, entry in row["answers"].items()}
    parsed = {
        "answers": answers,
        "access": Access(row.get("access", Access.KEY)),
        "errors": tuple(row.get("errors", ())),
        "error": row.get("error", "Error") or None,
    }
    return Operation(method, route, **{**row, **parsed})


def _answer(text: str, **media: str) -> Answer:
    return Answer(text, {_MEDIA.get(name, name): component or None for name, component in media.items()})


_TABLE = _read("routes.yaml")
_COMMON = _operations(_TABLE["common"])
GENERATED = _operations(_TABLE["generated"]) + _COMMON
RELAYED = _operations(_TABLE["relayed"]) + _COMMON
SCHEMAS: Mapping[str, Any] = _read("schemas.yaml")
