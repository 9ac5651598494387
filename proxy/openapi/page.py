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
    template = environment.get_template("docs.html.jinja")
    return template.render(document=document, limit_texts=WORDS["limits"], curl=_curl)


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
