"""The JSON schema that an answer must follow: `response_format`, and vLLM's names for the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvshare.errors import RequestError, UnsupportedParameterError
from proxy.wrong_values import found, invalid

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def answer_schema(
    response_format: object, guided_json: object, structured_outputs: object
) -> Mapping[str, Any] | None:
    """
    None: any text.

    Raises:  RequestError if a format has no known form, or if there is more than one
    """
    schemas = {
        "response_format": _response_format(response_format),
        "guided_json": _schema("guided_json", guided_json),
        "structured_outputs": _structured_outputs(structured_outputs),
    }
    given = {param: schema for param, schema in schemas.items() if schema is not None}
    if len(given) > 1:
        *_, last = given
        names = " and ".join(f"'{param}'" for param in given)
        raise RequestError(f"Send only one of {names}: each is the answer's format.", param=last)
    return next(iter(given.values()), None)


def _response_format(given: object) -> Mapping[str, Any] | None:
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(given, dict) or kind not in ("text", "json_object", "json_schema"):
        raise invalid("response_format.type", "expected 'text', 'json_object' or 'json_schema'")
    if kind == "text":
        return None
    if kind == "json_object":
        return _ANY_OBJECT
    outer = given.get("json_schema")
    if not isinstance(outer, dict) or outer.get("schema") is None:
        raise invalid("response_format.json_schema", "expected an object with 'schema', a JSON schema")
    return _schema("response_format.json_schema.schema", outer["schema"])


def _structured_outputs(given: object) -> Mapping[str, Any] | None:
    """Of vLLM's constraints the two that ask for JSON."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise invalid("structured_outputs", f"expected an object, got {found(given)}")
    for name in ("regex", "choice", "grammar", "structural_tag"):
        if given.get(name) is not None:
            raise UnsupportedParameterError(
                f"structured_outputs.{name}", "this server knows 'json' and 'json_object' only"
            )
    if given.get("json_object"):
        return _ANY_OBJECT
    return _schema("structured_outputs.json", given.get("json"))


def _schema(param: str, schema: object) -> Mapping[str, Any] | None:
    """A schema as an object or as its JSON text."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise invalid(param, "expected a JSON schema, got a string that is no JSON") from None
    if schema is None or isinstance(schema, dict):
        return schema
    raise invalid(param, f"expected a JSON schema, got {found(schema)}")
