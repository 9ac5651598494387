"""
Sends the dashboard's files. They hold no data and ask for no key: the page asks for an admin key, and reads
the other routes below /admin with it.

The policy lets the page load what this server sends and nothing else, run no script that is written into it,
and appear in no other page.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aiohttp import web

from kvshare.errors import ErrorCode
from proxy.context import SERVER
from proxy.errors import HttpError

STATIC = Path(__file__).with_name("static")
_KINDS: Mapping[str, str] = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_FILES: Mapping[str, bytes] = {
    path.name: path.read_bytes() for path in sorted(STATIC.iterdir()) if path.suffix in _KINDS
}
_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # another version of the server has other files
}


def add_routes(app: web.Application) -> None:
    app.router.add_get("/admin/ui", page)
    app.router.add_get("/admin/ui/", page)
    app.router.add_get("/admin/ui/{name}", file)


async def page(request: web.Request) -> web.StreamResponse:
    """
    GET /admin/ui: the page, which learns whether keys are asked for.

    Its files are named relative to /admin/ui/, so that a reverse proxy may add a prefix.
    """
    if not request.path.endswith("/"):
        return web.Response(status=308, headers={**_HEADERS, "Location": "ui/"})
    keys = b"no" if request.app[SERVER].keyring.is_open else b"yes"
    return _sent("index.html", _FILES["index.html"].replace(b'data-keys=""', b'data-keys="' + keys + b'"'))


async def file(request: web.Request) -> web.StreamResponse:
    """GET /admin/ui/{name}: a style sheet, a module or a picture."""
    name = request.match_info["name"]
    if name not in _FILES:
        raise HttpError(404, ErrorCode.NOT_FOUND, "The dashboard has no such file.")
    return _sent(name, _FILES[name])


def _sent(name: str, body: bytes) -> web.Response:
    kind = _KINDS[Path(name).suffix]
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=_HEADERS)
