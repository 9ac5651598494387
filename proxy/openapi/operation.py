"""A route as the documentation has it: what it takes, answers and refuses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from proxy.openapi.answers import ErrorAnswer

JSON = "application/json"
HTML = "text/html"
EVENTS = "text/event-stream"
ANY = "*/*"
MODEL = "{model}"
"""The served model, in examples."""


class RouteGroup(StrEnum):
    GENERATE = "Generate"
    MODELS = "Models"
    ABOUT = "About"
    OPERATORS = "Operators"
    PROBES = "Probes"


@dataclass(frozen=True, eq=False)
class _Refusals:
    always: tuple[int, ...]
    with_keys: tuple[int, ...]  # also, where keys are configured


class RouteAccess(_Refusals, Enum):
    """Who may use a route where keys are configured, and the refusals that this adds."""

    OPEN = (), ()
    KEY = (503,), (401,)
    METRICS = (), (401, 403)  # admins; without keys everybody, and also while the server starts
    ADMIN = (403, 503), (401,)


@dataclass(frozen=True, slots=True)
class RouteAnswer:
    """`media`: the shape of the answer by media type; None: no schema."""

    text: str
    media: Mapping[str, type | None]


@dataclass(frozen=True, slots=True)
class RouteParameter:
    """A parameter of a path, which is always required, or of a query."""

    description: str
    schema: Mapping[str, Any]  # JSON Schema
    example: object = None
    required: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """A method of a route. A route that is added to the server gets one."""

    method: str
    route: str
    summary: str
    answers: Mapping[int | str, RouteAnswer]  # by status, or `default` for all others
    group: RouteGroup
    description: str = ""
    access: RouteAccess = RouteAccess.KEY
    body: type | None = None  # its shape: the model that checks it, if there is one
    errors: tuple[int, ...] = ()  # the statuses of refusals, without those that access and body add
    error: type | None = ErrorAnswer  # their shape
    path: Mapping[str, RouteParameter] = field(default_factory=dict)
    query: Mapping[str, RouteParameter] = field(default_factory=dict)
    example: Mapping[str, Any] | None = None  # a body for the page's curl

    @property
    def components(self) -> set[type]:
        """Return the shapes of its body, its answers and its refusals."""
        media = (component for answer in self.answers.values() for component in answer.media.values())
        return {component for component in (self.body, self.error, *media) if component is not None}


def text(description: str, *, example: str | None = None, **limits: object) -> RouteParameter:
    """A parameter that is a string with content. `limits`: JSON Schema."""
    return RouteParameter(description, {"type": "string", "minLength": 1, **limits}, example)


def number(
    description: str, *, example: int | None = None, required: bool = False, **limits: int
) -> RouteParameter:
    """A parameter that is a positive integer. `limits`: JSON Schema."""
    return RouteParameter(description, {"type": "integer", "minimum": 1, **limits}, example, required)


def one_of(words: tuple[str, ...], description: str) -> RouteParameter:
    """A parameter that is one of a few words, by default the first."""
    return RouteParameter(description, {"enum": [*words], "default": words[0]})
