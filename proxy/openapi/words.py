"""Texts that the document and the page have for every route alike."""

from __future__ import annotations

from collections.abc import Mapping

ABOUT = (
    "An OpenAI-shaped server, which shares the KV cache between similar prompts. Errors have one shape, also "
    "for routes and methods that are not here (404, 405) and for bytes that are not an HTTP request (400)."
)
ABOUT_RELAY = (
    "Answers come from vLLM. Everything under /v1 is passed on to it: its own documentation says what these "
    "routes take. Its /openapi.json cannot be reached through this server, which passes on nothing but /v1."
)
REFUSALS: Mapping[int, str] = {
    400: "The request is wrong; `param` names the field.",
    401: "No key, or an unknown one.",
    403: "This key, or this client, may not use this route.",
    404: "There is no such model or entry.",
    408: "The body came too slowly.",
    413: "The body is larger than `server.max_body_bytes`.",
    415: "The body is not declared as `application/json`, or its `Content-Encoding` cannot be undone.",
    429: "The queue is full; `Retry-After` says when to try again.",
    500: "The engine failed.",
    502: "vLLM does not answer, or not as it must.",
    503: "The server loads its model, or shuts down; before vLLM also: no replica takes requests.",
    504: "vLLM was silent for too long.",
}
OF_BODIES = (400, 408, 413, 415)
"""The refusals that every body can get."""
SECURITY_SCHEMES = {  # a request has one of them
    "bearer": {"type": "http", "scheme": "bearer", "description": "A key of `auth.keys`."},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same."},
}
REQUEST_ID = "X-Request-Id"
HEADERS: Mapping[str, str] = {
    REQUEST_ID: "The request's own id, or one that was made.",
    "X-KVShare-Request": "Our id of a generating request, for /admin/requests/{id}.",
    "X-KVShare-Decision": "exact, approx or full: what was planned.",
    "X-KVShare-Plan": "Tokens by where their KV comes from.",
    "X-KVShare-Reason": "Why nothing, or no more, was shared.",
}
LIMITS: Mapping[str, str] = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "{} or more characters",
    "maxLength": "at most {} characters",
    "minItems": "{} or more",
    "maxItems": "at most {}",
    "pattern": "like {}",
    "default": "default {}",
}
"""Keywords of JSON Schema, as the page has them."""
