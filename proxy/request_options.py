"""
What a request says about sharing: its `kvshare` object, its Cache-Control header, the settings' default.

Read here for both engines, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from aiohttp import web
from pydantic import BaseModel, ConfigDict

from kvshare.requests import SharingMode
from proxy.context import SERVER
from proxy.request_body import at_most, validated

MAX_KEYS = 16  # of the `kvshare` object, unknown ones included


class KVShareObject(BaseModel):
    """The `kvshare` object of a body: how much of other prompts it accepts, and whether it is stored."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    mode: Literal["off", "exact", "approx"] | None = None  # None: the request leaves it to the settings
    no_store: bool | None = None
    rules: bool | None = None  # whether the operator's rules act on it; `prompt_rules` reads it first


KVShareField = Annotated[KVShareObject, at_most(MAX_KEYS)] | None


class _Body(BaseModel):
    """The only part of a relayed body that is the proxy's own."""

    model_config = ConfigDict(extra="ignore", strict=True)

    kvshare: KVShareField = None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """How a request may be shared, and whether its prompt may be stored."""

    mode: SharingMode
    store: bool


def parse_kvshare(document: Mapping[str, Any]) -> KVShareObject | None:
    """The `kvshare` object of a relayed body. Raises RequestError."""
    return validated(_Body, document).kvshare


def request_options(request: web.Request, given: KVShareObject | None) -> RequestOptions:
    """
    The options of `request`, whose body has `given`. Body and header decide together, the stricter wins.

    `no-cache` shares nothing, `no-store` stores nothing.
    """
    given = given or KVShareObject()
    headers = request.headers.getall("Cache-Control", [])
    directives = {directive.strip().lower() for header in headers for directive in header.split(",")}
    mode = SharingMode(given.mode or request.app[SERVER].settings.sharing.mode)
    return RequestOptions(
        mode=SharingMode.OFF if "no-cache" in directives else mode,
        store=not given.no_store and "no-store" not in directives,
    )
