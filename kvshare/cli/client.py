"""
Asks a running server: KVShare's admin routes, or those of vLLM and of the connector in it. The only file of
the command line that talks HTTP.

Neither proxies nor redirects are followed: a key goes to the named host and nowhere else.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from kvshare.errors import KVShareError, UnreachableError


class AnswerError(KVShareError):
    """The server answered, but not with what was asked for."""

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(f"{url} answered {status}: {message}")
        self.status = status
        self.message = message


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """None: urllib then raises the redirect as an HTTPError."""


class JsonClient:
    """The JSON routes of the server at `url` (http or https; checked by the caller)."""

    _key_hint = ""

    def __init__(self, url: str, *, key: str | None, timeout_s: float = 10.0) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Accept": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._timeout_s = timeout_s
        self._opener = build_opener(ProxyHandler({}), _NoRedirect())

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object at `path`; None values are left out of the query."""
        pairs = {name: _text(value) for name, value in (query or {}).items() if value is not None}
        return self._document(self._open(f"{path}?{urlencode(pairs)}" if pairs else path))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that the server answers to this body."""
        return self._document(self._open(path, json.dumps(body).encode()))

    def ping(self, path: str) -> None:
        """Raises as the others do, whatever the answer's body is."""
        self._open(path)

    def _document(self, payload: bytes) -> dict[str, Any]:
        document = _parse(payload)
        if not isinstance(document, dict):
            raise AnswerError(self._url, 200, "not a JSON object; is that a KVShare server?")
        return document

    def _open(self, path: str, body: bytes | None = None) -> bytes:
        """What comes back of a GET, or of a POST where there is a body."""
        type_of_body = {} if body is None else {"Content-Type": "application/json"}
        request = Request(self._url + path, data=body, headers={**self._headers, **type_of_body})
        try:
            with self._opener.open(request, timeout=self._timeout_s) as response:
                payload: bytes = response.read()
        except HTTPError as exc:
            with exc:
                raise self._refusal(exc.code, exc.read()) from exc
        except URLError as exc:
            raise UnreachableError(self._url, str(exc.reason)) from exc
        except (OSError, http.client.HTTPException) as exc:
            raise UnreachableError(self._url, str(exc) or type(exc).__name__) from exc
        return payload

    def _refusal(self, status: int, payload: bytes) -> AnswerError:
        document = _parse(payload)
        error = document.get("error") if isinstance(document, dict) else None
        message = error.get("message") if isinstance(error, dict) else error  # the connector's are plain text
        text = str(message or http.client.responses.get(status, "no reason given"))
        if status in (401, 403):
            text += self._key_hint
        return AnswerError(self._url, status, text)


class AdminClient(JsonClient):
    """The admin routes of `kvshare serve`."""

    _key_hint = " (give an admin key with --key or KVSHARE_ADMIN_KEY)"


def _parse(payload: bytes) -> object:
    try:
        return json.loads(payload)
    except ValueError:
        return None


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
