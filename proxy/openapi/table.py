"""The table of routes and what it is described with: routes.yaml, schemas.yaml and words.yaml, read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml
from pydantic.dataclasses import dataclass


class Access(StrEnum):
    """Who may use a route where keys are configured."""

    OPEN = "open"
    METRICS = "metrics"  # admins; without keys everybody, and also while the server starts
    KEY = "key"
    ADMIN = "admin"


@dataclass(frozen=True)
class Operation:
    """A row: a method of a route. `routes.yaml` says what each part is. "" for a component: none."""

    method: str
    route: str
    group: str
    summary: str
    answers: dict[int | str, dict[str, Any]]  # by status: "text", and a component for each media type
    description: str = ""
    access: Access = Access.KEY
    body: str | None = None
    errors: tuple[int, ...] = ()
    error: str | dict[str, Any] = "Error"
    path: dict[str, dict[str, Any]] = field(default_factory=dict)
    query: dict[str, dict[str, Any]] = field(default_factory=dict)
    example: dict[str, Any] | None = None


def _read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return document


def _operations(rows: Mapping[str, Mapping[str, Any]]) -> tuple[Operation, ...]:
    """Rows by their keys, such as "GET /health"."""
    named = [(key.partition(" "), row) for key, row in rows.items()]
    return tuple(Operation(method=method, route=route, **row) for (method, _, route), row in named)


_TABLE = _read("routes.yaml")
_COMMON = _operations(_TABLE["common"])
GENERATED = _operations(_TABLE["generated"]) + _COMMON
RELAYED = _operations(_TABLE["relayed"]) + _COMMON
SCHEMAS: Mapping[str, Any] = _read("schemas.yaml")
WORDS: Mapping[str, Any] = _read("words.yaml")
