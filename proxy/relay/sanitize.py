"""
Removes headers and members from a relayed request that would give a client more than it may ask for, and
adds the proxy's own members.

A client must not name KV itself (`kv_transfer_params`), nor choose whose prefix cache it shares: its
`cache_salt` only divides the cache of its owner, and vLLM gets a salt made of both. All of these are removed
on every route, and the client's key, too. So are ids of media; embeddings in place of media are refused (see
`media_parts.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from multidict import CIMultiDict, CIMultiDictProxy

from kvshare.errors import ErrorCode, RequestError
from proxy.errors import HttpError
from proxy.relay.media_parts import without_media_ids
from proxy.sse import dump

_FORBIDDEN = frozenset({"kv_transfer_params", "ec_transfer_params", "cache_salt"})
_XARGS = "vllm_xargs"  # vLLM merges its entries with `kv_transfer_params`
_OWN = "kvshare"

# Routes of vLLM 0.32 that refuse `cache_salt`. All others get one: a route that does not know it ignores it.
_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_UNSALTED = ("/v1/messages/count_tokens", *_ADAPTERS)

# RFC 9110, 7.6.1, and other headers that concern only one connection.
_HOP_BY_HOP = frozenset(
    """
    connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding
    upgrade
    """.split()  # noqa: SIM905  names, one after the other, read best so
)
_NOT_SENT_ON = _HOP_BY_HOP | frozenset(
    """
    host authorization x-api-key api-key cookie content-length content-encoding expect cache-control
    x-request-id x-data-parallel-rank traceparent
    """.split()  # noqa: SIM905
)
_CORS = "access-control-"


def sanitized(raw: bytes | None, document: Mapping[str, Any], *, path: str = "") -> bytes:
    """
    Return a body without members that a client must not send. `raw`: the same body as bytes, returned if
    nothing is removed; None if `document` is no longer what the client sent, so that it must be serialised.
    `path`: its route, if known.

    Raises RequestError for a body that is nested too deeply to be serialised, and for embeddings of media.
    """
    try:
        anonymous = without_media_ids(document, path=path)
        clean = {name: value for name, value in anonymous.items() if name not in _FORBIDDEN and name != _OWN}
        is_same = raw is not None and anonymous is document and len(clean) == len(document)
        xargs = document.get(_XARGS)
        if isinstance(xargs, Mapping) and not _FORBIDDEN.isdisjoint(xargs):
            clean[_XARGS] = {name: value for name, value in xargs.items() if name not in _FORBIDDEN}
            is_same = False
        return raw if raw is not None and is_same else dump(clean)
    except RecursionError:
        raise RequestError("The JSON body is nested too deeply.") from None


def with_members(raw: bytes, added: Mapping[str, bytes]) -> bytes:
    """Add members, whose values are JSON, to the end of a JSON object; every other byte stays."""
    if not added:
        return raw
    close = raw.rindex(b"}")
    comma = b"" if raw[:close].rstrip().endswith(b"{") else b","
    members = b",".join(b'"%s":%s' % (name.encode("ascii"), value) for name, value in added.items())
    return b"".join((raw[:close], comma, members, raw[close:]))


def takes_salt(raw_path: str) -> bool:
    """Return whether a JSON body to this route gets its owner's `cache_salt`."""
    return _path(raw_path).rstrip("/") not in _UNSALTED


def check_form(raw: bytes) -> None:
    """Check a form, which is relayed unchanged, for members that would be removed. Raises RequestError."""
    for name in _FORBIDDEN:
        if name.encode() in raw:
            raise RequestError(f"Unsupported parameter: '{name}'.", param=name)


def check_path(raw_path: str) -> None:
    """
    Check that a path is below /v1, however it is written: nothing else is relayed.

    Raises:  HttpError 400
    """
    path = _path(raw_path)
    segments = path.split("/")[1:]
    odd = "%" in path or "\\" in path or re.search(r"[\x00-\x1f\x7f]", path)
    if odd or segments[0] != "v1" or any(segment in (".", "..") for segment in segments):
        raise HttpError(400, ErrorCode.BAD_PATH, "This path cannot be passed on.")


def is_for_operators(raw_path: str) -> bool:
    """
    Return whether a route needs an admin key: adapters are read from files on the server, and a rendered
    prompt contains the salt of its owner.
    """
    path = _path(raw_path).rstrip("/")
    return path in _ADAPTERS or path.rpartition("/")[2] in ("render", "derender")


def upstream_path(raw_path: str) -> str:
    """
    Return the path for vLLM, with its query, and without a slash at its end: vLLM would redirect that to its
    own address, which clients may not reach.
    """
    path, mark, query = raw_path.partition("?")
    return path.rstrip("/") + mark + query


def headers_to_upstream(headers: CIMultiDictProxy[str]) -> dict[str, str]:
    """Return a client's headers without those that concern only this connection, and without its key."""
    named = _named_by_connection(headers)
    return {name: value for name, value in headers.items() if name.lower() not in _NOT_SENT_ON | named}


def headers_to_client(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """
    Return vLLM's headers without those that concern only the connection to it, and without CORS permissions:
    by default vLLM permits web pages of any origin.
    """
    dropped = _HOP_BY_HOP | _named_by_connection(headers)
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in dropped and not name.lower().startswith(_CORS)
    )


def _named_by_connection(headers: CIMultiDictProxy[str]) -> frozenset[str]:
    listed = ",".join(headers.getall("Connection", []))
    return frozenset(name.strip().lower() for name in listed.split(",") if name.strip())


def _path(raw_path: str) -> str:
    """Return the path as vLLM's router reads it: decoded once, without the query."""
    return unquote(raw_path.partition("?")[0], errors="replace")
