"""The table as an OpenAPI 3.1 document."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from kvshare import __version__
from proxy.generate.chat.bodies import ChatBody, CompletionBody
from proxy.generate.embeddings import EmbeddingBody
from proxy.generate.messages.bodies import CountTokensBody, MessagesBody
from proxy.generate.responses.bodies import ResponsesBody
from proxy.generate.tokenization import DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from proxy.openapi.table import SCHEMAS, WORDS, Access, Operation

BODIES: tuple[type[BaseModel], ...] = (
    *(ChatBody, CompletionBody, ResponsesBody, MessagesBody, CountTokensBody),
    *(EmbeddingBody, TokenizeTextBody, TokenizeChatBody, DetokenizeBody),
)
"""The models that rows of the table name as bodies."""

_MEDIA = {"json": "application/json", "html": "text/html", "any": "*/*"}
_REFERENCE = "#/components/schemas/"


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
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer", "description": "A key of `auth.keys`."},
            "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same."},
        }
    return document


def _operation(operation: Operation, *, model: str, asks_for_keys: bool) -> dict[str, Any]:
    name = f"{operation.method.lower()}{operation.route}".replace("{", "").replace("}", "")
    written: dict[str, Any] = {
        "operationId": name.replace("/", "_"),
        "tags": [operation.group],
        "summary": operation.summary,
        "description": operation.description,
        "parameters": [*_parameters(operation, "path", model), *_parameters(operation, "query", model)],
        "responses": _responses(operation, asks_for_keys=asks_for_keys),
    }
    if operation.body is not None:
        content: dict[str, Any] = {"schema": _reference(operation.body)}
        if operation.example is not None:
            content["example"] = _named(operation.example, model)
        written["requestBody"] = {"required": True, "content": {"application/json": content}}
    if asks_for_keys and operation.access is not Access.OPEN:
        written["security"] = [{"bearer": []}, {"header": []}]
    return written


def _parameters(
    operation: Operation, place: Literal["path", "query"], model: str
) -> Iterator[dict[str, Any]]:
    rows = operation.path if place == "path" else operation.query
    for name, row in rows.items():
        parts = ("description", "required", "example")
        written = {"name": name, "in": place, "required": row.get("required", place == "path")}
        written["schema"] = {key: value for key, value in row.items() if key not in parts}
        written |= {key: row[key] for key in ("description", "example") if key in row}
        yield _named(written, model)


def _responses(operation: Operation, *, asks_for_keys: bool) -> dict[str, Any]:
    """Answers, then refusals in the order of their numbers."""
    written: dict[str, Any] = {}
    for status, answer in operation.answers.items():
        media = {_MEDIA.get(name, name): _schema(entry) for name, entry in answer.items() if name != "text"}
        described = {"description": answer["text"], "headers": _headers(operation)}
        written[str(status)] = {**described, "content": media}
    for status in sorted(_refusals(operation, asks_for_keys=asks_for_keys)):
        content = {"application/json" if operation.error else "*/*": _schema(operation.error)}
        words = WORDS["refusals"].get(status, HTTPStatus(status).phrase + ".")
        written.setdefault(str(status), {"description": words, "content": content})
    return written


def _refusals(operation: Operation, *, asks_for_keys: bool) -> set[int]:
    """A row's own, and those that its access and its body imply."""
    refusals = set(operation.errors)
    if operation.access in (Access.KEY, Access.ADMIN):
        refusals |= {503}
    if operation.access is Access.ADMIN or (asks_for_keys and operation.access is Access.METRICS):
        refusals |= {403}
    if asks_for_keys and operation.access is not Access.OPEN:
        refusals |= {401}
    if operation.body is not None:
        refusals |= {400, 408, 413, 415}
    return refusals


def _headers(operation: Operation) -> dict[str, Any]:
    """Only answers to what generates say how it was planned."""
    names = WORDS["headers"] if operation.group == "Generate" else ("X-Request-Id",)
    return {name: {"description": WORDS["headers"][name], "schema": {"type": "string"}} for name in names}


def _schema(component: object) -> dict[str, Any]:
    """Of a component by its name; empty for none."""
    return {"schema": _reference(str(component))} if component else {}


def _reference(component: str) -> dict[str, str]:
    return {"$ref": _REFERENCE + component}


def _used(paths: Mapping[str, Any]) -> dict[str, Any]:
    """The components that a document refers to, and those that these refer to."""
    _, models = models_json_schema(
        [(body, "validation") for body in BODIES],
        ref_template=_REFERENCE + "{model}",
        schema_generator=_Untitled,
    )
    known = {**models["$defs"], **SCHEMAS}
    used: dict[str, Any] = {}
    waiting = _referred(paths)
    while waiting:
        used |= {name: known[name] for name in waiting}
        waiting = [name for name in _referred(used) if name not in used]
    return {name: used[name] for name in sorted(used)}


def _referred(document: object) -> Collection[str]:
    """The names of the components that a document refers to."""
    if isinstance(document, Mapping):
        inner = [name for value in document.values() for name in _referred(value)]
        target = document.get("$ref")
        return [target.removeprefix(_REFERENCE), *inner] if isinstance(target, str) else inner
    if isinstance(document, list):
        return [name for value in document for name in _referred(value)]
    return []


def _named(example: Any, model: str) -> Any:
    """An example with the served model's name."""
    return json.loads(json.dumps(example).replace('"{model}"', json.dumps(model)))
