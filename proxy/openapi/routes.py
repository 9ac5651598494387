"""
Serves /openapi.json and /docs. They need no API key: they name routes, types and the model, and no prompts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from aiohttp import web

from proxy.context import SERVER
from proxy.openapi.document import build_document
from proxy.openapi.page import render
from proxy.openapi.table import GENERATED, RELAYED, Operation

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


class Documentation:
    """Both documents, cached, and rebuilt when the name of the served model changes."""

    def __init__(self, app: web.Application, *, is_relay: bool) -> None:
        self._app = app
        self._is_relay = is_relay
        self._model: str | None = None
        self._document = self._page = b""

    async def document(self, request: web.Request) -> web.Response:
        """GET /openapi.json"""
        self._write()
        return web.Response(body=self._document, content_type="application/json")

    async def page(self, request: web.Request) -> web.Response:
        """GET /docs"""
        self._write()
        headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=headers)

    def _write(self) -> None:
        server = self._app[SERVER]
        model = server.engine.card.model_id
        if model == self._model:
            return
        document = build_document(
            operations_of(self._app, is_relay=self._is_relay),
            model=model,
            asks_for_keys=not server.keyring.is_open,
            is_relay=self._is_relay,
        )
        self._document, self._page = json.dumps(document).encode(), render(document).encode()
        self._model = model


def add_routes(app: web.Application, *, is_relay: bool) -> None:
    documentation = Documentation(app, is_relay=is_relay)
    app.router.add_get("/openapi.json", documentation.document)
    app.router.add_get("/docs", documentation.page)


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
