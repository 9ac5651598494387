"""
Serves the document as JSON, /openapi.json, and as a page to read, /docs. Neither needs an API key: they name
routes, types and the model, and no prompts.

The page is one file, without scripts and without anything from elsewhere. All its words and colours are in
templates/, where everything that comes from the document is escaped.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from aiohttp import web
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from proxy.context import SERVER
from proxy.openapi.document import GENERATED, RELAYED, build_document
from proxy.openapi.operation import Operation
from proxy.openapi.words import LIMITS

_TEMPLATES = Path(__file__).with_name("templates")
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def add_routes(app: web.Application, *, is_relay: bool) -> None:
    @lru_cache(maxsize=1)
    def written(model: str, asks_for_keys: bool) -> tuple[bytes, bytes]:
        """Document and page, written again when another model is served, or the first key comes."""
        document = build_document(
            operations_of(app, is_relay=is_relay),
            model=model,
            asks_for_keys=asks_for_keys,
            is_relay=is_relay,
        )
        return json.dumps(document).encode(), render(document).encode()

    async def document(request: web.Request) -> web.Response:
        body, _ = written(app[SERVER].engine.card.model_id, not app[SERVER].keyring.is_open)
        return web.Response(body=body, content_type="application/json")

    async def page(request: web.Request) -> web.Response:
        _, body = written(app[SERVER].engine.card.model_id, not app[SERVER].keyring.is_open)
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)

    app.router.add_get("/openapi.json", document)
    app.router.add_get("/docs", page)


def operations_of(app: web.Application, *, is_relay: bool) -> Sequence[Operation]:
    """The documented operations whose routes are registered; "*" stands for each method."""
    registered = {
        (route.method, resource.canonical) for resource in app.router.resources() for route in resource
    }
    return [
        operation
        for operation in (RELAYED if is_relay else GENERATED)
        if {(operation.method, operation.route), ("*", operation.route)} & registered
    ]


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
    return template.render(document=document, limit_texts=LIMITS, curl=_curl)


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
