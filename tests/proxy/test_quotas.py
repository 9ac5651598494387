"""What a tenant may ask for, and what its clients learn of it: by the real clients, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from kvshare.errors import ErrorCode
from kvshare.settings import Access, TenantSettings
from proxy.errors import HttpError
from proxy.quotas import Allowance, Quotas, duration
from tests.proxy.conftest import Server, chat, eventually, key_of, key_settings, running_server
from tests.proxy.fake_engine import Behaviour

HELLO: Any = [{"role": "user", "content": "hello"}]


def limited(*tenants: Mapping[str, object]) -> dict[str, Any]:
    return {"auth__keys": key_settings(), "auth__tenants": list(tenants)}


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key_of(name)}"}


async def statuses(server: Server, *names: str) -> list[int]:
    """Of one request each, one after the other."""
    return [(await server.post("/v1/chat/completions", chat(), **bearer(name))).status for name in names]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def quotas(clock: Clock, **limits: Any) -> Quotas:
    return Quotas(Access(tenants=(TenantSettings(name="acme", **limits),)), clock=clock)


def left(of: Quotas, *, ask_first: bool = True) -> int:
    """What acme has left, after a request of its."""
    allowance = ask(of) if ask_first else of.allowance("acme")
    assert allowance is not None
    return allowance.remaining


def ask(of: Quotas, tenant: str = "acme") -> Allowance | None:
    with of.admitted(tenant):
        return of.allowance(tenant)


def test_requests_come_back_evenly() -> None:
    """All at once after a quiet minute, then one each 60 / limit seconds; what is refused takes none."""
    clock = Clock()
    of = quotas(clock, requests_per_minute=3)
    assert [left(of) for _ in range(3)] == [2, 1, 0]
    for _ in range(5):
        with pytest.raises(HttpError) as caught:
            ask(of)
    headers = caught.value.reply.headers
    assert (headers["Retry-After"], headers["retry-after-ms"]) == ("20", "20000")
    clock.now += 19.9
    with pytest.raises(HttpError):
        ask(of)
    clock.now += 0.2
    assert left(of) == 0
    clock.now += 3600
    assert of.allowance("acme") == Allowance(3, 3, 0.0)
    assert ask(of, "other") is None


def test_another_limit_leaves_the_same_share() -> None:
    """A tenant that has used half of its requests has half of the new ones; without a limit it has all."""
    clock = Clock()
    of = quotas(clock, requests_per_minute=4)
    ask(of), ask(of)
    of.use(Access(tenants=(TenantSettings(name="*", requests_per_minute=100),)))
    assert left(of, ask_first=False) == 50
    of.use(Access())
    assert of.allowance("acme") is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0ms"), (0.12, "120ms"), (8.64, "8.64s"), (360, "6m0s"), (61.2, "1m2s")]
)
def test_durations_are_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


async def test_the_openai_client_learns_its_limit() -> None:
    """All keys of a tenant use one limit; the client's error is that of rate limits, with both headers."""
    async with (
        running_server(**limited({"name": "acme", "requests_per_minute": 2})) as server,
        server.client(key_of("alice")) as alice,
        server.client(key_of("bob")) as bob,
    ):
        raw = await alice.chat.completions.with_raw_response.create(model="echo", messages=HELLO)
        names = [f"x-ratelimit-{part}-requests" for part in ("limit", "remaining", "reset")]
        assert [raw.headers[name] for name in names[:2]] == ["2", "1"]
        assert 0 < float(raw.headers[names[2]].removesuffix("s")) <= 30
        assert await statuses(server, "carol", "eve") == [200, 200]  # a private key of it; another tenant
        with pytest.raises(openai.RateLimitError) as caught:
            await bob.chat.completions.create(model="echo", messages=HELLO)
        assert caught.value.code == ErrorCode.RATE_LIMIT_EXCEEDED
        headers = caught.value.response.headers
        assert [headers[name] for name in names[:2]] == ["2", "0"]
        assert 0 < int(headers["retry-after"]) <= 30
        assert 0 < int(headers["retry-after-ms"]) <= 30_000
        other = await server.post("/v1/chat/completions", chat(), **bearer("eve"))
        assert not any(name in other.headers for name in names)
        assert len(server.engine.requests) == 4


async def test_the_anthropic_client_learns_its_limit() -> None:
    """In its own words."""
    limit = limited({"name": "*", "requests_per_minute": 1})
    async with running_server(**limit) as server, server.anthropic(key_of("alice")) as client:
        raw = await client.messages.with_raw_response.create(model="echo", messages=HELLO, max_tokens=5)
        assert raw.headers["anthropic-ratelimit-requests-limit"] == "1"
        assert raw.headers["anthropic-ratelimit-requests-reset"].endswith("Z")
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(model="echo", messages=HELLO, max_tokens=5)
        assert caught.value.response.headers["anthropic-ratelimit-requests-remaining"] == "0"
        assert await statuses(server, "eve") == [200]  # each tenant has its own


async def test_what_computes_nothing_is_free() -> None:
    """The list of models, probes and operators' routes take no request; a wrong body does."""
    async with running_server(**limited({"name": "acme", "requests_per_minute": 1})) as server:
        for path in ("/v1/models", "/health", "/admin/stats", "/metrics", "/nothing"):
            await server.get(path, **bearer("root"))
        assert (await server.post("/admin/evict", {"all": True}, **bearer("root"))).status == 200
        assert (await server.post("/v1/chat/completions", {}, **bearer("root"))).status == 400
        assert await statuses(server, "root") == [429]


async def test_streams_say_it_too_and_a_wrong_key_takes_nothing() -> None:
    async with running_server(**limited({"name": "acme", "requests_per_minute": 2})) as server:
        await server.post("/v1/chat/completions", chat(), Authorization="Bearer sk-none")
        response = await server.post("/v1/chat/completions", chat(stream=True), **bearer("alice"))
        assert response.headers["x-ratelimit-remaining-requests"] == "1"


async def test_a_tenant_has_so_many_requests_at_a_time() -> None:
    """The next one is refused until one ends, also one whose client goes away; others are not affected."""
    async with running_server(
        Behaviour(prefill_s=60.0), **limited({"name": "acme", "max_in_flight": 2})
    ) as server:
        async with aiohttp.ClientSession() as session:
            streams = [
                await session.post(
                    f"{server.url}/v1/chat/completions", json=chat(stream=True), headers=bearer(name)
                )
                for name in ("alice", "carol")
            ]
            await eventually(lambda: server.engine.num_running == 2)
            refused = await server.post("/v1/chat/completions", chat(), **bearer("bob"))
            assert (refused.status, (await refused.json())["error"]["code"]) == (429, ErrorCode.TENANT_BUSY)
            assert (refused.headers["Retry-After"], refused.headers["retry-after-ms"]) == ("1", "1000")
            other = asyncio.ensure_future(server.post("/v1/chat/completions", chat(), **bearer("eve")))
            await eventually(lambda: server.engine.num_running == 3)
            other.cancel()
            await asyncio.gather(other, return_exceptions=True)
            for stream in streams:
                stream.close()
        await eventually(lambda: server.engine.num_running == 0)
        server.engine.behaviour.prefill_s = 0.0
        assert await statuses(server, "alice", "bob") == [200, 200]


async def flooded(*tenants: Mapping[str, object], num_taken: int) -> int:
    """
    The status of another tenant's request while one has sent 20 that do not end, of which so many are taken.
    """
    behaviour = Behaviour(prefill_s=60.0, max_running=4, max_waiting=4)
    async with running_server(behaviour, **limited(*tenants)) as server:
        flood = [
            asyncio.ensure_future(server.post("/v1/chat/completions", chat(), **bearer("alice")))
            for _ in range(20)
        ]
        await eventually(lambda: sum(task.done() for task in flood) == 20 - num_taken)
        await eventually(lambda: server.engine.num_running + server.engine.num_waiting == num_taken)
        behaviour.prefill_s = 0.0
        other = asyncio.ensure_future(server.post("/v1/chat/completions", chat(), **bearer("eve")))
        await eventually(lambda: other.done() or server.engine.num_waiting == num_taken - 3)
        for task in flood:
            task.cancel()
        await asyncio.gather(*flood, return_exceptions=True)
        return (await other).status


async def test_one_tenants_flood_leaves_another_its_share() -> None:
    """Without limits it takes all places of the server's queue, and another tenant's requests are refused."""
    assert await flooded(num_taken=8) == 429
    assert await flooded({"name": "*", "max_in_flight": 6}, num_taken=6) == 200
