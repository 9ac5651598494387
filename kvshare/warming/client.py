"""
Sends entries to a server and asks what became of them. Text comes back neither in answers nor in errors: only
counts, and the fixed words of the server's error codes.

Sharing is read from the headers X-KVShare-*, which both engines set. What a prompt was stored as only an
administrator is given, and only after the answer.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from kvshare.http_client import error_code, served_model, session
from kvshare.warming.entries import Place, WarmingEntry

_BUSY = 429
_MOST_BUSY_S = 300.0  # an entry that is refused for so long, as the server is busy, has failed
_RETRY_S = 1.0  # where the server does not say
_SETTLED_S = 120.0  # what is not stored by then, or known not to be, never will be
_FIRST_LOOK_S, _LOOK_S = 0.02, 0.5
_FIELD = re.compile(r"[\w.\[\]]{1,40}")
_PLAN = re.compile(r"exact=(\d+),copied=(\d+),computed=(\d+)")


@dataclass(frozen=True, slots=True)
class WarmingOutcome:
    """The outcome of one entry. Tokens are of its prompt; there are none if it was not answered."""

    place: Place
    request_id: str | None = None
    num_exact: int = 0
    num_copied: int = 0
    num_computed: int = 0
    node: int | None = None  # None: not stored, or not known
    pinned: bool = False
    reason: str | None = None  # why it failed, in a word

    @property
    def num_tokens(self) -> int:
        return self.num_exact + self.num_copied + self.num_computed

    @property
    def is_known(self) -> bool:
        """All of it was stored before; the last token is always computed."""
        return not self.num_copied and self.num_exact > 0 and self.num_computed <= 1


@dataclass(frozen=True, slots=True)
class WarmOptions:
    """Server, keys and pace. `admin_url` None: the same address; `admin_key` None: the same key."""

    url: str
    key: str | None = None
    admin_url: str | None = None
    admin_key: str | None = None
    pin: bool = False
    concurrency: int = 4


class WarmClient:
    """Requests for the first model of one server, whose admin routes may be at another address."""

    def __init__(self, users: aiohttp.ClientSession, admins: aiohttp.ClientSession, model: str) -> None:
        self._users, self._admins, self._model = users, admins, model

    async def may_ask_admin(self) -> bool:
        status, _ = await self._admin("GET", "admin/requests?limit=1")
        return status == 200

    async def send(self, entry: WarmingEntry) -> WarmingOutcome:
        """Send one request, again for as long as the server is busy. A failure is a word in the outcome."""
        body = {"model": self._model, **entry.body}
        deadline = asyncio.get_running_loop().time() + _MOST_BUSY_S
        while True:
            try:
                async with self._users.post(entry.path, json=body, allow_redirects=False) as response:
                    document = await _document(response)
                    if response.status == 200:
                        return _sent(entry.place, response.headers, document)
                    waits_s = _retry_after_s(response.headers)
                    is_late = asyncio.get_running_loop().time() + waits_s > deadline
                    if response.status != _BUSY or is_late:
                        return WarmingOutcome(entry.place, reason=_why(document, response.status))
            except (aiohttp.ClientError, TimeoutError, OSError) as exc:
                return WarmingOutcome(entry.place, reason=type(exc).__name__)
            await asyncio.sleep(waits_s)

    async def stored_as(self, request_id: str) -> int | None:
        """Return the node of a request's prompt, once that is known; None where it was not stored."""
        loop, look_s = asyncio.get_running_loop(), _FIRST_LOOK_S
        deadline = loop.time() + _SETTLED_S
        while loop.time() < deadline:
            status, document = await self._admin("GET", f"admin/requests/{request_id}")
            stored = (document.get("stored") or [{"node": None, "settled": status != 200}])[0]
            if stored["node"] is not None or stored["settled"]:
                return None if stored["node"] is None else int(stored["node"])
            await asyncio.sleep(look_s)
            look_s = min(_LOOK_S, 2 * look_s)
        return None

    async def pin(self, node: int) -> str | None:
        status, document = await self._admin("POST", "admin/pin", json={"node": node})
        return None if status == 200 else _why(document, status)

    async def is_there(self, node: int) -> bool:
        status, _ = await self._admin("GET", f"admin/tree?root={node}&depth=1")
        return status == 200

    async def _admin(self, method: str, path: str, **content: Any) -> tuple[int, dict[str, Any]]:
        """Status and document; status 0 if the server does not answer."""
        try:
            async with self._admins.request(method, path, allow_redirects=False, **content) as response:
                return response.status, await _document(response)
        except (aiohttp.ClientError, TimeoutError, OSError):
            return 0, {}


@asynccontextmanager
async def connected(options: WarmOptions) -> AsyncIterator[WarmClient]:
    """A client of its own connections; addresses with or without /v1. The keys go there and nowhere else."""
    base, admin_base = _base(options.url), _base(options.admin_url or options.url)
    admin = session(admin_base, key=options.admin_key or options.key)
    async with session(base, key=options.key) as users, admin as admins:
        yield WarmClient(users, admins, await served_model(users, base))


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1") + "/"


async def _document(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the answer's JSON object; empty where it is none."""
    try:
        document = await response.json(content_type=None)
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _why(document: Mapping[str, Any], status: int) -> str:
    """Return the error's code, or where it has none the status and the field that is wrong. 0: no answer."""
    if (code := error_code(document)) != "error" and not code.isdigit():
        return code
    error = document.get("error")
    param = error.get("param") if isinstance(error, dict) else None
    field = f" {param}" if isinstance(param, str) and _FIELD.fullmatch(param) else ""
    return f"http_{status}{field}" if status else "unreachable"


def _sent(place: Place, headers: Mapping[str, str], document: Mapping[str, Any]) -> WarmingOutcome:
    """Without the header nothing was planned: all of the prompt was computed."""
    plan = _PLAN.fullmatch(headers.get("X-KVShare-Plan", ""))
    num_tokens = int((document.get("usage") or {}).get("prompt_tokens") or 0)
    exact, copied, computed = map(int, plan.groups()) if plan else (0, 0, num_tokens)
    too_short = "short_prompt" if headers.get("X-KVShare-Reason") == "short_prompt" else None
    request_id = headers.get("X-KVShare-Request")
    return WarmingOutcome(place, request_id, exact, copied, computed, reason=too_short)


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds; a date, which no server of ours gives, counts as nothing said."""
    try:
        return max(0.0, float(headers.get("Retry-After", _RETRY_S)))
    except ValueError:
        return _RETRY_S
