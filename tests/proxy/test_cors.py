"""A web page of another origin may use /v1 if the settings list it, and never an operator's route."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from kvshare.errors import ConfigError
from proxy.app import serve
from tests.fake_vllm import Behaviour, FakeVllm, running_vllm
from tests.proxy.conftest import Server, chat, key_settings, running_server, settings_with
from tests.proxy.fake_engine import FakeEngine
from tests.proxy.relay.relay_server import chat_body, running_relay

PAGE = "https://chat.example"
OTHER = "https://evil.example"
CHAT = "/v1/chat/completions"
REQUESTED = "authorization,content-type,x-api-key,x-stainless-lang"
ALLOW = "Access-Control-Allow-"


async def ask_first(server: Server, path: str, origin: str) -> aiohttp.ClientResponse:
    """A browser's preflight for a POST with the headers of OpenAI's client."""
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": REQUESTED,
    }
    async with server.http.options(server.url + path, headers=headers) as response:
        await response.read()
        return response


def permissions(response: aiohttp.ClientResponse) -> dict[str, str]:
    """Every header that lets a page do something."""
    return {name: value for name, value in response.headers.items() if name.startswith("Access-Control-")}


async def test_nothing_is_allowed_by_default(server: Server) -> None:
    """Without the setting no origin may ask, and no answer may be read."""
    refused = await ask_first(server, CHAT, PAGE)
    assert refused.status == 403
    assert "server.cors_origins" in (await refused.json())["error"]["message"]
    answered = await server.post(CHAT, chat(), Origin=PAGE)
    assert permissions(refused) == permissions(answered) == {}


async def test_a_listed_origin_may_call_v1() -> None:
    """Preflights are answered, without a key; answers can be read with the headers that are ours."""
    async with running_server(server__cors_origins=[PAGE], auth__keys=key_settings()) as server:
        granted = await ask_first(server, CHAT, PAGE)
        answered = await server.post(CHAT, chat(), Origin=PAGE, Authorization="Bearer sk-alice")
        streamed = await server.post(CHAT, chat(stream=True), Origin=PAGE, Authorization="Bearer sk-alice")
        without_key = await server.post(CHAT, chat(), Origin=PAGE)
        unknown = await server.get("/v1/nothing", Origin=PAGE)
    assert granted.status == 204
    assert granted.headers[f"{ALLOW}Headers"] == REQUESTED
    assert "POST" in granted.headers[f"{ALLOW}Methods"]
    assert (without_key.status, unknown.status) == (401, 404)
    for response in (granted, answered, streamed, without_key, unknown):
        assert response.headers[f"{ALLOW}Origin"] == PAGE
        assert response.headers["Vary"] == "Origin"
        assert response.headers[f"{ALLOW}Credentials"] == "true"
    exposed = set(streamed.headers["Access-Control-Expose-Headers"].split(", "))
    assert {"X-Request-Id", "X-KVShare-Request", "X-KVShare-Rules"} <= exposed


@pytest.mark.parametrize("origin", [OTHER, "null", "https://chat.example:444", "https://chat.example.evil"])
async def test_other_origins_may_not(origin: str) -> None:
    """An origin is scheme, host and port, exactly."""
    async with running_server(server__cors_origins=[PAGE]) as server:
        refused = await ask_first(server, CHAT, origin)
        answered = await server.post(CHAT, chat(), Origin=origin)
    assert refused.status == 403
    assert permissions(refused) == permissions(answered) == {}
    assert answered.headers["Vary"] == "Origin"


async def test_any_origin_may_without_credentials() -> None:
    """ "*" allows every page, and no cookies."""
    async with running_server(server__cors_origins=["*"]) as server:
        granted = await ask_first(server, CHAT, OTHER)
        answered = await server.post(CHAT, chat(), Origin=OTHER)
    for response in (granted, answered):
        assert response.headers[f"{ALLOW}Origin"] == "*"
        assert f"{ALLOW}Credentials" not in response.headers
        assert "Vary" not in response.headers


@pytest.mark.parametrize("path", ["/admin/stats", "/%61dmin/stats", "/admin", "/admin/nothing", "/metrics"])
@pytest.mark.parametrize("origins", [[PAGE], ["*"]])
async def test_operators_routes_are_never_for_pages(path: str, origins: list[str]) -> None:
    """However the path is written, whatever the settings say."""
    async with running_server(server__cors_origins=origins) as server:
        refused = await ask_first(server, path, PAGE)
        answered = await server.get(path, Origin=PAGE)
    assert refused.status == 403
    assert permissions(refused) == permissions(answered) == {}


async def test_vllms_own_permissions_are_not_passed_on(tmp_path: Path) -> None:
    """vLLM allows every origin; before it, only the front's settings count, and preflights end there."""
    behaviour = Behaviour(headers={f"{ALLOW}Origin": "*", "Server": "uvicorn", "Vary": "X"})
    async with running_vllm(behaviour) as vllm:
        await relayed(vllm, tmp_path / "closed", origins=[], expected=None)
        await relayed(vllm, tmp_path / "open", origins=[PAGE], expected=PAGE)


async def relayed(vllm: FakeVllm, store: Path, *, origins: list[str], expected: str | None) -> None:
    """Ask through a relay with these origins; which origin the answers allow."""
    async with running_relay(store, vllm, server__cors_origins=origins) as relay:
        before = len(vllm.seen)
        asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
        for path in (CHAT, "/v1/embeddings"):
            response = await relay.send(path, method="OPTIONS", **asks)
            assert response.headers.get(f"{ALLOW}Origin") == expected
        assert len(vllm.seen) == before
        answered = await relay.send(CHAT, chat_body("Rome", stream=True), Origin=PAGE)
        assert answered.status == 200
        assert answered.headers.getall(f"{ALLOW}Origin", [None]) == [expected]
        assert answered.headers.getall("Server") == ["kvshare"]
        assert answered.headers.getall("Vary") == ["X", *(["Origin"] if expected else [])]


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "https://Chat.example", "null", ""]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    """What no browser sends would never match."""
    with pytest.raises(ConfigError, match=r"server\.cors_origins"):
        settings_with(server__cors_origins=[origin])


async def test_any_origin_without_keys_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Then every page that is open in a browser near the server may use it."""
    for origins, keys in ((["*"], []), ([PAGE], []), (["*"], key_settings())):
        caplog.clear()
        listening = asyncio.get_running_loop().create_future()
        settings = settings_with(server__cors_origins=origins, auth__keys=keys)
        task = asyncio.create_task(serve(settings, FakeEngine(), on_listening=listening.set_result))
        await listening
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert ("every web page" in caplog.text) == (origins == ["*"] and not keys)
