"""The routes as an OpenAPI 3.1 document. `answers.py` has the shapes of answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from kvshare import __version__
from proxy.openapi import words
from proxy.openapi.common_routes import COMMON_ROUTES
from proxy.openapi.generated_routes import GENERATED_ROUTES
from proxy.openapi.operation import ANY, JSON, MODEL, Operation, RouteAccess, RouteGroup, RouteParameter
from proxy.openapi.relayed_routes import RELAYED_ROUTES

_REFERENCE = "#/components/schemas/"
GENERATED = GENERATED_ROUTES + COMMON_ROUTES
RELAYED = RELAYED_ROUTES + COMMON_ROUTES


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
            "description": f"{words.ABOUT} {words.ABOUT_RELAY}" if is_relay else words.ABOUT,
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": group} for group in dict.fromkeys(each.group for each in operations)],
        "paths": paths,
        "components": {"schemas": _components(operations)},
    }
    if asks_for_keys:
        document["components"]["securitySchemes"] = words.SECURITY_SCHEMES
    return document


def _operation(operation: Operation, *, model: str, asks_for_keys: bool) -> dict[str, Any]:
    name = f"{operation.method.lower()}{operation.route}".replace("{", "").replace("}", "")
    written: dict[str, Any] = {
        "operationId": name.replace("/", "_"),
        "tags": [operation.group],
        "summary": operation.summary,
        "description": operation.description,
        "parameters": [
            *(_parameter(name, each, "path", model) for name, each in operation.path.items()),
            *(_parameter(name, each, "query", model) for name, each in operation.query.items()),
        ],
        "responses": _responses(operation, asks_for_keys=asks_for_keys),
    }
    if operation.body is not None:
        content = _schema(operation.body)
        if operation.example is not None:
            content["example"] = _named(operation.example, model)
        written["requestBody"] = {"required": True, "content": {JSON: content}}
    if asks_for_keys and operation.access is not RouteAccess.OPEN:
        written["security"] = [{"bearer": []}, {"header": []}]
    return written


def _parameter(name: str, parameter: RouteParameter, place: str, model: str) -> Any:
    """`place`: path or query; parameters of a path are always required."""
    written = {"name": name, "in": place, "required": parameter.required or place == "path"}
    written |= {"schema": parameter.schema, "description": parameter.description}
    if parameter.example is not None:
        written["example"] = parameter.example
    return _named(written, model)


def _responses(operation: Operation, *, asks_for_keys: bool) -> dict[str, Any]:
    """Answers, then refusals in the order of their numbers."""
    written: dict[str, Any] = {}
    # Only answers to what generates say how it was planned.
    names = words.HEADERS if operation.group is RouteGroup.GENERATE else (words.REQUEST_ID,)
    headers = {name: {"description": words.HEADERS[name], "schema": {"type": "string"}} for name in names}
    for status, answer in operation.answers.items():
        content = {media: _schema(component) for media, component in answer.media.items()}
        written[str(status)] = {"description": answer.text, "headers": headers, "content": content}
    for status in sorted(_refusals(operation, asks_for_keys=asks_for_keys)):
        content = {JSON if operation.error else ANY: _schema(operation.error)}
        said = words.REFUSALS.get(status, HTTPStatus(status).phrase + ".")
        written.setdefault(str(status), {"description": said, "content": content})
    return written


def _refusals(operation: Operation, *, asks_for_keys: bool) -> set[int]:
    of_access = operation.access.with_keys if asks_for_keys else ()
    of_body = () if operation.body is None else words.OF_BODIES
    return {*operation.errors, *operation.access.always, *of_access, *of_body}


def _schema(component: type | None) -> dict[str, Any]:
    return {"schema": {"$ref": f"{_REFERENCE}{component.__name__}"}} if component else {}


def _components(operations: Sequence[Operation]) -> dict[str, Any]:
    """Return the schemas that these operations refer to, and those that these refer to, by name."""
    components = {component for each in operations for component in each.components}
    _, schemas = TypeAdapter.json_schemas(
        [(component.__name__, "validation", TypeAdapter(component)) for component in components],
        ref_template=_REFERENCE + "{model}",
        schema_generator=_Untitled,
    )
    return dict(sorted(schemas["$defs"].items()))


def _named(example: Any, model: str) -> Any:
    return json.loads(json.dumps(example).replace(json.dumps(MODEL), json.dumps(model)))
