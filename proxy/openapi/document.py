"""
The table of routes as an OpenAPI 3.1 document.

routes.yaml and common_routes.yaml have a row for each route, schemas.yaml the shapes of answers, words.yaml
what all have alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.dataclasses import dataclass
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from kvshare import __version__
from kvshare.tables import read_table
from proxy.generate.chat.bodies import ChatBody, CompletionBody
from proxy.generate.messages.bodies import CountTokensBody, MessagesBody
from proxy.generate.models import DetokenizeBody, EmbeddingBody, TokenizeChatBody, TokenizeTextBody
from proxy.generate.responses.bodies import ResponsesBody

BODIES: tuple[type[BaseModel], ...] = (
    *(ChatBody, CompletionBody, ResponsesBody, MessagesBody, CountTokensBody),
    *(EmbeddingBody, TokenizeTextBody, TokenizeChatBody, DetokenizeBody),
)
"""The models that rows of the table name as bodies."""

_MEDIA = {"json": "application/json", "html": "text/html", "any": "*/*"}
_REFERENCE = "#/components/schemas/"


@dataclass(frozen=True)
class Operation:
    """A row: a method of a route. `routes.yaml` says what each part is. "" for a component: none."""

    method: str
    route: str
    group: str
    summary: str
    answers: dict[int | str, dict[str, Any]]  # by status: "text", and a component for each media type
    description: str = ""
    access: Literal["open", "metrics", "key", "admin"] = "key"
    body: str | None = None
    errors: tuple[int, ...] = ()
    error: str | dict[str, Any] = "Error"
    path: dict[str, dict[str, Any]] = field(default_factory=dict)
    query: dict[str, dict[str, Any]] = field(default_factory=dict)
    example: dict[str, Any] | None = None


def _read(name: str) -> dict[str, Any]:
    document: dict[str, Any] = read_table(Path(__file__).with_name(name))
    return document


def _operations(rows: Mapping[str, Mapping[str, Any]]) -> tuple[Operation, ...]:
    """Rows by their keys, such as "GET /health"."""
    named = [(key.partition(" "), row) for key, row in rows.items()]
    return tuple(Operation(method=method, route=route, **row) for (method, _, route), row in named)


_TABLE = _read("routes.yaml")
_COMMON = _operations(_read("common_routes.yaml"))
GENERATED = _operations(_TABLE["generated"]) + _COMMON
RELAYED = _operations(_TABLE["relayed"]) + _COMMON
SCHEMAS: Mapping[str, Any] = _read("schemas.yaml")
WORDS: Mapping[str, Any] = _read("words.yaml")


class _Untitled(GenerateJsonSchema):
    """A field's title would repeat its name."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def build_document(
    operations: Sequence[Operation], *, model: str, asks_for_keys: bool, is_relay: bool
) -> dict[str, Any]:
    """The document of these routes of a server. `model`: its name, for examples."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        written = _operation(operation, model=model, asks_for_keys=asks_for_keys)
        paths.setdefault(operation.route, {})[operation.method.lower()] = written
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "KVShare",
            "version": __version__,
            "description": " ".join([WORDS["about"], *([WORDS["about relay"]] if is_relay else [])]),
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": group} for group in dict.fromkeys(each.group for each in operations)],
        "paths": paths,
        "components": {"schemas": _used(paths)},
    }
    if asks_for_keys:
        document["components"]["securitySchemes"] = WORDS["security schemes"]
    return document


def _operation(operation: Operation, *, model: str, asks_for_keys: bool) -> dict[str, Any]:
    name = f"{operation.method.lower()}{operation.route}".replace("{", "").replace("}", "")
    written: dict[str, Any] = {
        "operationId": name.replace("/", "_"),
        "tags": [operation.group],
        "summary": operation.summary,
        "description": operation.description,
        "parameters": [
            *(_parameter(name, row, "path", model) for name, row in operation.path.items()),
            *(_parameter(name, row, "query", model) for name, row in operation.query.items()),
        ],
        "responses": _responses(operation, asks_for_keys=asks_for_keys),
    }
    if operation.body is not None:
        content = _schema(operation.body)
        if operation.example is not None:
            content["example"] = _named(operation.example, model)
        written["requestBody"] = {"required": True, "content": {"application/json": content}}
    if asks_for_keys and operation.access != "open":
        written["security"] = [{"bearer": []}, {"header": []}]
    return written


def _parameter(name: str, row: Mapping[str, Any], place: str, model: str) -> Any:
    """`place`: path or query; parameters of a path are always required."""
    parts = ("description", "required", "example")
    written = {"name": name, "in": place, "required": row.get("required", place == "path")}
    written["schema"] = {key: value for key, value in row.items() if key not in parts}
    written |= {key: row[key] for key in ("description", "example") if key in row}
    return _named(written, model)


def _responses(operation: Operation, *, asks_for_keys: bool) -> dict[str, Any]:
    """Answers, then refusals in the order of their numbers."""
    written: dict[str, Any] = {}
    # Only answers to what generates say how it was planned.
    names = WORDS["headers"] if operation.group == "Generate" else ("X-Request-Id",)
    texts = WORDS["headers"]
    headers = {name: {"description": texts[name], "schema": {"type": "string"}} for name in names}
    for status, answer in operation.answers.items():
        media = {_MEDIA.get(name, name): _schema(entry) for name, entry in answer.items() if name != "text"}
        described = {"description": answer["text"], "headers": headers}
        written[str(status)] = {**described, "content": media}
    for status in sorted(_refusals(operation, asks_for_keys=asks_for_keys)):
        content = {"application/json" if operation.error else "*/*": _schema(operation.error)}
        words = WORDS["refusals"].get(status, HTTPStatus(status).phrase + ".")
        written.setdefault(str(status), {"description": words, "content": content})
    return written


def _refusals(operation: Operation, *, asks_for_keys: bool) -> set[int]:
    """A row's own, and those that its access and its body imply."""
    implied = WORDS["implied refusals"]
    refusals = {*operation.errors, *implied["access"][operation.access]}
    if asks_for_keys:
        refusals.update(implied["access with keys"][operation.access])
    if operation.body is not None:
        refusals.update(implied["body"])
    return refusals


def _schema(component: object) -> dict[str, Any]:
    """Return the schema of a component by its name; empty without a name."""
    return {"schema": {"$ref": f"{_REFERENCE}{component}"}} if component else {}


def _used(paths: Mapping[str, Any]) -> dict[str, Any]:
    """The components that a document refers to, and those that these refer to."""
    _, models = models_json_schema(
        [(body, "validation") for body in BODIES],
        ref_template=_REFERENCE + "{model}",
        schema_generator=_Untitled,
    )
    known = {**models["$defs"], **SCHEMAS}
    used: set[str] = set()
    waiting = _referred(paths)
    while waiting:
        used |= waiting
        waiting = _referred([known[name] for name in waiting]) - used
    return {name: known[name] for name in sorted(used)}


def _referred(document: object) -> set[str]:
    """The names of the components that a document refers to."""
    return set(re.findall(rf'"\$ref": "{_REFERENCE}(\w+)"', json.dumps(document)))


def _named(example: Any, model: str) -> Any:
    """An example with the served model's name."""
    return json.loads(json.dumps(example).replace('"{model}"', json.dumps(model)))
