"""Keys decide who asks and whose KV is shared; nothing in the body does."""

from __future__ import annotations

import hashlib
from typing import Any

import openai
import pytest
from yarl import URL

from kvshare.errors import ConfigError
from kvshare.settings import KeySettings
from proxy.auth import Keyring, owner_of
from tests.proxy.conftest import Server, chat, key_of, running_server

TEXT = "the same long prompt for everybody"


async def cached_tokens(server: Server, name: str, **extra: object) -> int:
    """Ask as `name`; how many tokens came from somebody's KV."""
    response = await server.post(
        "/v1/chat/completions", chat(TEXT, **extra), Authorization=f"Bearer {key_of(name)}"
    )
    assert response.status == 200
    return int((await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_an_unknown_key_is_401(guarded: Server) -> None:
    """The openai client sees an authentication error with OpenAI's code."""
    async with guarded.client("sk-unknown") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "a"}])
    assert caught.value.code == "invalid_api_key"
    assert not guarded.engine.requests


@pytest.mark.parametrize(
    "authorization",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic c2s6",
        "sk-alice",
        "Bearer sk-alice x",
        "Bearer sk-älice",
        "Bearer SK-ALICE",
    ],
)
async def test_what_is_no_known_key_is_401(guarded: Server, authorization: str) -> None:
    """A missing, malformed or near key is refused before the body is looked at."""
    response = await guarded.post("/v1/chat/completions", b"{", Authorization=authorization)
    assert response.status == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert (await response.json())["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/echo", "/%76%31/models", "//v1/models"])
async def test_every_route_under_v1_asks_for_a_key(guarded: Server, path: str) -> None:
    """Routes are closed unless they are listed as open, however their path is spelled."""
    async with guarded.http.get(URL(guarded.url + path, encoded=True)) as response:
        assert response.status == (404 if path.startswith("//") else 401)


async def test_health_asks_for_no_key(guarded: Server) -> None:
    """Probes have no key."""
    assert (await guarded.get("/health")).status == 200
    assert (await guarded.get("/ready")).status == 200


async def test_the_scheme_is_case_insensitive(guarded: Server) -> None:
    """HTTP says that "bearer" is "Bearer"."""
    assert (await guarded.get("/v1/models", Authorization="bearer sk-alice")).status == 200


async def test_a_key_as_anthropics_clients_send_it(guarded: Server) -> None:
    """`x-api-key` and `api-key` are keys on every route; a bearer beside it counts alone."""
    assert (await guarded.get("/v1/models", **{"x-api-key": "sk-alice"})).status == 200
    assert (await guarded.get("/v1/models", **{"x-api-key": "sk-unknown"})).status == 401
    assert (await guarded.get("/v1/models", **{"api-key": "sk-alice"})).status == 200
    assert (await guarded.get("/v1/models", **{"api-key": "sk-unknown"})).status == 401
    both = {"x-api-key": "sk-alice", "Authorization": "Bearer sk-unknown"}
    assert (await guarded.get("/v1/models", **both)).status == 401


async def test_keys_of_one_tenant_share(guarded: Server) -> None:
    """What alice asked serves bob, who has the same tenant."""
    assert await cached_tokens(guarded, "alice") == 0
    assert await cached_tokens(guarded, "bob") > 0


@pytest.mark.parametrize("other", ["eve", "carol"])
async def test_strangers_share_nothing(guarded: Server, other: str) -> None:
    """Another tenant and a private key of the same tenant see none of alice's KV, nor she of theirs."""
    await cached_tokens(guarded, "alice")
    assert await cached_tokens(guarded, other) == 0
    assert len(guarded.engine.stored) == 2


async def test_private_keys_share_with_themselves_only(guarded: Server) -> None:
    """carol finds her own prompt again; dave, private too, does not."""
    assert await cached_tokens(guarded, "carol") == 0
    assert await cached_tokens(guarded, "carol") > 0
    assert await cached_tokens(guarded, "dave") == 0


async def test_the_body_cannot_choose_the_namespace(guarded: Server) -> None:
    """user, prompt_cache_key and the like are no identity."""
    await cached_tokens(guarded, "alice", user="alice")
    hints = {"user": "alice", "prompt_cache_key": "acme", "tenant": "acme"}
    assert await cached_tokens(guarded, "eve", **hints) == 0
    assert await cached_tokens(guarded, "eve", **hints, cache_salt="acme") == 0  # new, as a part of eve's own


async def test_names_cannot_be_made_to_collide() -> None:
    """Tenant and key name are framed: no choice of either reaches another's namespace."""
    keys = [
        ("b", "a", "private"),
        ('b"]', 'a", "', "private"),
        ("", '["a", "b"]', "private"),
        ("x", '["a", "b"]', "tenant"),
        ("b", "a", "tenant"),
    ]
    made = (KeySettings.model_construct(name=name, tenant=of, scope=scope) for name, of, scope in keys)
    assert len({owner_of(key) for key in made}) == len(keys)


async def test_without_keys_there_is_one_local_namespace(server: Server) -> None:
    """No keys configured: whatever key a client sends, everybody is the local tenant."""
    for key in ("one", "two"):
        async with server.client(key) as client:
            await client.chat.completions.create(model="echo", messages=[{"role": "user", "content": "a"}])
    assert {request.namespace.tenant for request in server.engine.requests} == {"local"}
    assert len(server.engine.stored) == 1


@pytest.mark.parametrize("same", ["name", "sha256"])
def test_keys_that_cannot_be_told_apart_are_refused(same: str) -> None:
    """Two keys with one name would share a private namespace; two with one hash would be one."""
    entries: list[dict[str, Any]] = [
        {"name": f"key{number}", "sha256": hashlib.sha256(bytes([number])).hexdigest(), "tenant": "t"}
        for number in range(2)
    ]
    entries[1][same] = entries[0][same]
    with pytest.raises(ConfigError, match=same):
        Keyring([KeySettings(**entry) for entry in entries])


ADMIN_ROUTES = [
    "/admin/status",
    "/admin/activity",
    "/admin/stats",
    "/admin/tree",
    "/admin/node/1",
    "/admin/diff?a=1&b=2",
    "/metrics",
]


@pytest.mark.parametrize("path", ADMIN_ROUTES)
async def test_admin_routes_need_an_admin_key(guarded: Server, path: str) -> None:
    """No key is 401, a key for inference 403, an admin's 200, even from a loopback address."""
    assert (await guarded.get(path)).status == 401
    response = await guarded.get(path, Authorization="Bearer sk-alice")
    assert response.status == 403
    assert (await response.json())["error"]["type"] == "permission_error"
    assert (await guarded.get(path, Authorization="Bearer sk-root")).status == 200


async def test_an_admin_key_may_infer(guarded: Server) -> None:
    """An administrator asks like the other keys of the tenant."""
    await cached_tokens(guarded, "alice")
    assert await cached_tokens(guarded, "root") > 0


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},  # another port of this machine
        {"Sec-Fetch-Site": "none"},  # an address that was typed in
        {"Sec-Fetch-Site": "same-origin", "Origin": "https://evil.example"},
        {"Sec-Fetch-Site": "same-origin", "Host": "rebound.example"},
        {"Sec-Fetch-Site": "same-origin", "X-Forwarded-For": "203.0.113.9"},
        {"Origin": "null"},
        {"X-Forwarded-For": "203.0.113.9"},
        {"Forwarded": "for=203.0.113.9"},
        {"Host": "evil.example"},
    ],
)
async def test_admin_without_keys_is_for_local_programs(server: Server, headers: dict[str, str]) -> None:
    """A web page, a forwarded request and a rebound name come from loopback but are not local."""
    assert (await server.get("/admin/stats")).status == 200
    response = await server.get("/admin/stats", **headers)
    assert response.status == 403


async def test_a_page_of_the_server_itself_is_local(server: Server) -> None:
    """The dashboard in a browser on the server's machine: no keys are configured, and none is needed."""
    own = {"Sec-Fetch-Site": "same-origin"}
    assert (await server.get("/admin/stats", **own)).status == 200
    assert (await server.post("/admin/evict", {"all": True}, Origin=server.url, **own)).status == 200


async def test_the_admin_port_takes_the_operator_routes_away() -> None:
    """With admin_port the main port has no /metrics and no /admin, and the admin port no /v1."""
    async with running_server(server__admin_port=0) as server:
        assert (await server.get("/metrics")).status == 404
        assert (await server.get("/admin/stats")).status == 404
    async with running_server(server__admin_port=0, admin=True) as server:
        assert (await server.get("/metrics")).status == 200
        assert (await server.get("/admin/stats")).status == 200
        assert (await server.post("/v1/chat/completions", chat())).status == 404
