"""
Who shares with whom: for each dimension of identity, two requests that agree in it share, and two that differ
in it alone do not. What a client can reach is asked over HTTP; the rest is asked of the engine in this
process.
"""

from __future__ import annotations

import asyncio
import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delta_tree import TokenIds, token_ids
from kvshare.namespace import Namespace
from tests.conftest import Server
from tests.kvshare.embedded.tiny_engine import engine_at, events, prompt, report_of, request

MODEL = "kvshare-demo"
WORDS = ("harbour", "amber", "ledger", "north", "nobody", "seven", "launch", "Weasel", "may", "know", "code")
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
NOT_STORED = {"kvshare": {"no_store": True}}
_numbers = count()


@dataclass(frozen=True)
class By:
    """Who asks over HTTP: an API key, and what the body says about identity."""

    key: str
    claims: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def salted(key: str, salt: str | None) -> By:
        return By(key, {"cache_salt": salt})


def body_for(route: str, text: str) -> dict[str, Any]:
    """A request for at most two tokens, on any route that generates."""
    if route == "/v1/completions":
        return {"model": MODEL, "prompt": text, "max_tokens": 2}
    if route == "/v1/responses":
        return {"model": MODEL, "input": text, "max_output_tokens": 16}
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 2}


def send(server: Server, path: str, body: Mapping[str, Any], key: str) -> tuple[int, Mapping[str, str], Any]:
    """Status, headers and document of an answer."""
    headers = {"Authorization": f"Bearer {server.key(key)}", "Content-Type": "application/json"}
    asked = urllib.request.Request(server.url + path, data=json.dumps(body).encode(), headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, dict(answer.headers), json.load(answer)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, dict(refused.headers), json.load(refused)


class OverHttp:
    """Asks the real server, as its clients do."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def new_prompt(self) -> str:
        number = next(_numbers)
        return f"{number} " + " ".join(random.Random(f"identity {number}").choices(WORDS, k=80))

    def edited(self, text: str) -> str:
        words = text.split()
        return " ".join([*words[:50], "instead", *words[51:]])

    def reused(self, *asked: tuple[By, str], store: bool = True) -> list[int]:
        """Of prompts that are sent together: how many tokens of each came from stored KV."""
        with ThreadPoolExecutor(len(asked)) as threads:
            return list(threads.map(lambda one: self.reused_on(ROUTES[0], *one, store=store), asked))

    def reused_on(self, route: str, by: By, text: str, *, store: bool = True) -> int:
        body = {**body_for(route, text), **by.claims, **({} if store else NOT_STORED)}
        status, headers, document = send(self.server, route, body, by.key)
        assert status == 200, document
        self.server.settle()
        plan = dict(part.split("=") for part in headers["X-KVShare-Plan"].split(","))
        return int(plan["exact"]) + int(plan["copied"])


class InProcess:
    """Asks the embedded engine, with a tiny model, in any namespace: who asks are fields of it."""

    def __init__(self, folder: Path) -> None:
        self._runner = asyncio.Runner()
        self._engine = engine_at(folder)
        self._runner.run(self._engine.start())

    def close(self) -> None:
        self._runner.run(self._engine.stop())
        self._runner.close()

    def new_prompt(self) -> TokenIds:
        return prompt(200, seed=next(_numbers))

    def edited(self, tokens: TokenIds) -> TokenIds:
        return token_ids(np.concatenate([prompt(20, seed=next(_numbers)), tokens[10:]]))

    def reused(self, *asked: tuple[Mapping[str, str], TokenIds], store: bool = True) -> list[int]:
        return self._runner.run(self._reused(asked, store=store))

    async def _reused(
        self, asked: tuple[tuple[Mapping[str, str], TokenIds], ...], *, store: bool
    ) -> list[int]:
        wanted = [(changes, await request(self._engine, tokens, max_tokens=1)) for changes, tokens in asked]
        own = [
            replace(one, namespace=replace(one.namespace, **changes), store=store) for changes, one in wanted
        ]
        found = await asyncio.gather(*(events(self._engine, one) for one in own))
        return [report_of(each[-1]).num_cached for each in found]


@pytest.fixture
def over_http(server: Server) -> OverHttp:
    return OverHttp(server)


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    asked = InProcess(tmp_path_factory.mktemp("identity"))
    yield asked
    asked.close()


# Who asks first; who shares with that; who does not, and differs in this dimension alone.
CLIENTS: dict[str, tuple[By, By, By]] = {
    "tenant": (By("ann"), By("bob"), By("cid")),
    "scope": (By("ann"), By("bob"), By("dot")),
    "key of a private scope": (By("dot"), By("dot"), By("eve")),
    "cache_salt": (By.salted("ann", "a"), By.salted("bob", "a"), By.salted("bob", "b")),
    "a cache_salt and none": (By.salted("ann", "a"), By.salted("ann", "a"), By("ann")),
    "no cache_salt and one": (By("ann"), By.salted("bob", None), By.salted("ann", "a")),
    "tenant under one cache_salt": (By.salted("ann", "a"), By.salted("bob", "a"), By.salted("cid", "a")),
    "scope under one cache_salt": (By.salted("ann", "a"), By.salted("bob", "a"), By.salted("dot", "a")),
    "private key under one cache_salt": (By.salted("dot", "a"), By.salted("dot", "a"), By.salted("eve", "a")),
    "case of a cache_salt": (By.salted("ann", "a"), By.salted("ann", "a"), By.salted("ann", "A")),
    "space in a cache_salt": (By.salted("ann", "a"), By.salted("ann", "a"), By.salted("ann", "a ")),
    "form of a cache_salt": (
        By.salted("ann", "\u00e9"),
        By.salted("ann", "\u00e9"),
        By.salted("ann", "e\u0301"),
    ),
    "end of a long cache_salt": (
        *(By.salted("ann", "x" * 128), By.salted("ann", "x" * 128)),
        By.salted("ann", "x" * 127 + "y"),
    ),
    "a cache_salt like another tenant": (By("cid"), By("cid"), By.salted("ann", "south")),
    "a cache_salt like its own tenant": (By("ann"), By("ann"), By.salted("ann", "north")),
}
NAMESPACES: dict[str, tuple[dict[str, str], dict[str, str], dict[str, str]]] = {
    f"field {entry.name}": ({entry.name: "a"}, {entry.name: "a"}, {entry.name: "b"})
    for entry in fields(Namespace)
}


@pytest.mark.parametrize("dimension", [*CLIENTS, *NAMESPACES])
def test_who_differs_in_one_dimension_shares_nothing(dimension: str, request: pytest.FixtureRequest) -> None:
    """Neither an equal prompt, nor a near-duplicate, nor one that is computed at the same time."""
    asked = request.getfixturevalue("over_http" if dimension in CLIENTS else "in_process")
    first, equal, other = (CLIENTS | NAMESPACES)[dimension]
    stored = asked.new_prompt()
    assert asked.reused((first, stored)) == [0]
    for probe in (stored, asked.edited(stored)):
        assert asked.reused((other, probe), store=False) == [0]
        assert asked.reused((equal, probe), store=False)[0] > 100
    apart, together = asked.new_prompt(), asked.new_prompt()
    assert asked.reused((first, apart), (other, apart)) == [0, 0]
    assert max(asked.reused((first, together), (equal, together))) > 100


@pytest.mark.parametrize("route", ROUTES)
def test_a_cache_salt_divides_on_every_route(over_http: OverHttp, route: str) -> None:
    """Also for the route that plans without computing, which needs an admin's key."""
    text, one, other = over_http.new_prompt(), By.salted("root", "a"), By.salted("root", "b")
    assert over_http.reused_on(route, one, text) == 0
    assert over_http.reused_on(route, other, text, store=False) == 0
    assert over_http.reused_on(route, one, text, store=False) > 100
    explain = f"/admin/explain?api={route.removeprefix('/v1/').removesuffix('/completions')}"
    for by, shares in ((other, False), (one, True)):
        status, _, document = send(over_http.server, explain, {**body_for(route, text), **by.claims}, by.key)
        assert status == 200, document
        assert bool(document["donors"]) is shares


@pytest.mark.parametrize("route", [*ROUTES, "/v1/messages/count_tokens", "/v1/embeddings", "/admin/explain"])
@pytest.mark.parametrize("place", ["cache_salt", "vllm_xargs.cache_salt"])
def test_what_is_no_salt_is_refused(server: Server, route: str, place: str) -> None:
    """Taken as none, it would share what the client asked to keep apart."""
    body = body_for(ROUTES[0], "Hello.") | ({"input": "Hello."} if "embed" in route else {})
    for salt in ("", 5, 0, True, False, 1.5, [], ["a"], {}, {"a": "b"}, "x" * 129):
        wrong = {"cache_salt": salt} if place == "cache_salt" else {"vllm_xargs": {"cache_salt": salt}}
        status, _, document = send(server, route, body | wrong, "root")
        assert status == 400
        assert place in document["error"]["message"]
        assert "xxx" not in json.dumps(document)
        if "messages" not in route:  # Anthropic's errors name no parameter
            assert document["error"]["param"] == place


def test_a_pin_opens_a_prompt_to_no_other_part(over_http: OverHttp) -> None:
    """Pinned without a salt or with one: it is only kept from eviction."""
    parts = (By("root"), By.salted("root", "a"))
    for pinned, other in (parts, parts[::-1]):
        text = over_http.new_prompt()
        assert over_http.reused((pinned, text)) == [0]
        assert over_http.reused((pinned, text), store=False)[0] > 100  # waits until it is stored
        node = node_of(over_http.server, pinned, text)
        status, _, document = send(over_http.server, "/admin/pin", {"node": node}, "root")
        assert status == 200, document
        assert over_http.reused((other, text), store=False) == [0]
        send(over_http.server, "/admin/unpin", {"node": node}, "root")


def node_of(server: Server, by: By, text: str) -> int:
    """The stored prompt that this request would copy from."""
    body = {**body_for(ROUTES[0], text), **by.claims}
    _, _, document = send(server, "/admin/explain", body, by.key)
    return int(document["donors"][0]["node"])


def test_no_administrator_reads_a_cache_salt(over_http: OverHttp) -> None:
    """A salted part is one more namespace, by its digest."""
    secret = "salt-of-the-earth"
    assert over_http.reused((By.salted("ann", secret), over_http.new_prompt())) == [0]
    for route in ("/metrics", "/admin/stats", "/admin/tree", "/admin/requests"):
        headers = {"Authorization": f"Bearer {over_http.server.key('root')}"}
        asked = urllib.request.Request(over_http.server.url + route, headers=headers)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            assert secret not in answer.read().decode()
