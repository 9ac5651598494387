"""
Finds the formats that an answer must follow in a body for vLLM, under vLLM's, OpenAI's and Anthropic's names.

Values are not checked: vLLM refuses those of a wrong type.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvshare.fleet.format_guard import AnswerFormat

# Members of a body that have a format in OpenAI's or Anthropic's form.
_FORMATS = ("response_format", "output_format")
_NESTED_FORMATS = {"text": "format", "output_config": "format"}
_GUIDED = ("json", "regex", "choice", "grammar")
_STRUCTURED = (*_GUIDED, "structural_tag")
_TOOL_SCHEMAS = ("parameters", "input_schema")


def formats_of(document: Mapping[str, Any]) -> list[AnswerFormat]:
    """Return all formats of a body; of tools, if they may be called. RecursionError if nested too deeply."""
    return list(_formats(document))


def _formats(document: Mapping[str, Any]) -> Iterator[AnswerFormat]:
    for name in _FORMATS:
        yield from _of_format(document.get(name), name)
    for name, inner in _NESTED_FORMATS.items():
        yield from _of_format(_mapping(document.get(name)).get(inner), f"{name}.{inner}")
    for kind in _GUIDED:
        yield from _given(kind, document.get(f"guided_{kind}"), f"guided_{kind}")
    structured = _mapping(document.get("structured_outputs"))
    for kind in _STRUCTURED:
        yield from _given(kind, structured.get(kind), f"structured_outputs.{kind}")
    if document.get("tool_choice") != "none":
        for name in ("tools", "functions"):
            for tool in _list(document.get(name)):
                yield from _of_tool(tool, name)


def _of_format(written: object, param: str) -> Iterator[AnswerFormat]:
    written = _mapping(written)
    if written.get("type") == "structural_tag":
        yield from _given("structural_tag", written, param)
    named = _mapping(written.get("json_schema"))  # usually it has a name and a schema
    levels = [(written, "schema"), (named, "schema"), (named, "json_schema")]
    if named.keys().isdisjoint(("schema", "json_schema")):
        levels.append((written, "json_schema"))
    for place, name in levels:
        yield from _given("json", place.get(name), param)


def _of_tool(tool: object, param: str) -> Iterator[AnswerFormat]:
    for place in (_mapping(tool), _mapping(_mapping(tool).get("function"))):
        for name in _TOOL_SCHEMAS:
            yield from _given("json", place.get(name), param)
    for inner in _list(_mapping(tool).get("tools")):  # Responses: a namespace of tools
        yield from _of_tool(inner, param)


def _given(kind: str, value: object, param: str) -> Iterator[AnswerFormat]:
    """Yield a format as text, whether it was sent as text or as JSON."""
    if isinstance(value, Mapping) or (isinstance(value, list) and kind == "choice"):
        yield AnswerFormat(kind, json.dumps(value), param)
    elif isinstance(value, str) and value:
        if kind == "json" and not _is_json(value):
            return
        yield AnswerFormat(kind, value, param)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()
