"""
An OpenAPI document as a page to read: one file, no script, nothing from elsewhere.

All its words and colours are in templates/, where everything that comes from the document is escaped.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from proxy.openapi.table import WORDS

_TEMPLATES = Path(__file__).with_name("templates")


def render(document: Mapping[str, Any]) -> str:
    """The page of a document that `build_document` wrote."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"kind": _kind, "limits": _limits, "code": _code}
    environment.globals |= {"curl": _curl}
    return environment.get_template("docs.html.jinja").render(document=document)


def _kind(schema: Mapping[str, Any]) -> Markup:
    """A schema in a few words, with links to those that have a name."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return Markup('<a href="#{0}">{0}</a>').format(name)
    if "anyOf" in schema:
        return Markup(" or ").join(dict.fromkeys(_kind(each) for each in schema["anyOf"]))
    if "const" in schema or "enum" in schema:
        values = schema.get("enum", [schema.get("const")])
        return Markup(" or ").join(Markup("<code>{}</code>").format(json.dumps(value)) for value in values)
    kind = schema.get("type", "anything")
    if kind == "array":
        return Markup("list of {}").format(_kind(schema.get("items", {})))
    return escape(" or ".join(kind) if isinstance(kind, list) else kind)


def _limits(schema: Mapping[str, Any]) -> str:
    """What a value must keep to, also that of the one branch that has limits."""
    found = [
        text.format(_plain(schema[key]))
        for key, text in WORDS["limits"].items()
        if schema.get(key) is not None
    ]
    branches = [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else [])]
    return ", ".join([*found, *filter(None, map(_limits, branches))])


def _plain(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _code(text: str) -> Markup:
    """Text with what stands in backticks as code."""
    parts = str(text).split("`")
    marked = [
        Markup("<code>{}</code>").format(part) if number % 2 else escape(part)
        for number, part in enumerate(parts)
    ]
    return Markup("").join(marked)


def _curl(method: str, path: str, operation: Mapping[str, Any]) -> str:
    """A command that calls an operation with its examples."""
    query = {}
    for parameter in operation["parameters"]:
        example = parameter.get("example")
        if parameter["in"] == "path":
            path = path.replace("{" + parameter["name"] + "}", str(example))
        elif parameter["required"]:
            query[parameter["name"]] = example
    lines = [f'curl "$KVSHARE_URL{path}{"?" + urlencode(query) if query else ""}"']
    if operation.get("security"):
        lines.append('-H "Authorization: Bearer $KVSHARE_KEY"')
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content is not None:
        lines.append("-H 'Content-Type: application/json'")
        lines.append("-d " + shlex.quote(json.dumps(content.get("example", {}), ensure_ascii=False)))
    elif method != "get":
        lines.insert(1, f"-X {method.upper()}")
    return " \\\n  ".join(lines)
