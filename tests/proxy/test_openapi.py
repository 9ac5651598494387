"""The documentation says what the server does: each route, body and example; and it needs no network."""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from pydantic import TypeAdapter

from kvshare.settings import Settings
from proxy.app import build_admin_app, build_app
from proxy.openapi.document import GENERATED, RELAYED, build_document
from proxy.openapi.operation import Operation
from proxy.openapi.routes import operations_of, render
from tests.fake_vllm import running_vllm
from tests.proxy.conftest import Server, chat, running_server, settings_with
from tests.proxy.fake_engine import Behaviour, FakeEngine
from tests.proxy.relay.relay_server import running_relay


def registered(app: web.Application) -> set[tuple[str, str]]:
    """Method and pattern of each route; HEAD goes with GET, and a slash at the end makes no other route."""
    routes = ((route.method, resource.canonical) for resource in app.router.resources() for route in resource)
    return {(method, path) for method, path in routes if method != "HEAD" and not path.endswith("/")}


def check_complete(found: set[tuple[str, str]], routes: set[tuple[str, str]]) -> None:
    """Each route has a row and each row a route; one that takes any method has a row for some."""
    any_method = {path for method, path in routes if method == "*"}
    assert {key for key in found if key[1] not in any_method} == {key for key in routes if key[0] != "*"}
    assert {path for _, path in found} >= any_method


def row(method: str, path: str) -> Operation:
    (found,) = [each for each in GENERATED if (each.method.lower(), each.route) == (method, path)]
    return found


def documented(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}


def references(document: object) -> Iterator[str]:
    if isinstance(document, dict):
        if isinstance(target := document.get("$ref"), str):
            yield target
        for value in document.values():
            yield from references(value)
    elif isinstance(document, list):
        for value in document:
            yield from references(value)


async def fetch(server: Server) -> dict[str, Any]:
    response = await server.get("/openapi.json")
    assert (response.status, response.content_type) == (200, "application/json")
    document: dict[str, Any] = json.loads(await response.read())
    return document


def front(**overrides: object) -> Settings:
    return settings_with(**overrides)


@pytest.mark.parametrize("admin_port", [None, 0])
async def test_each_route_is_documented_and_no_other(admin_port: int | None) -> None:
    """Of one port or two: what is registered is in the document, and the other way round."""
    app = build_app(front(server__admin_port=admin_port), FakeEngine())
    for each in (app, build_admin_app(app)):
        rows = operations_of(each, is_relay=False)
        check_complete({(row.method, row.route) for row in rows}, registered(each))


async def test_each_route_before_vllm_is_documented(tmp_path: Path) -> None:
    """What is passed on whatever the method has a row for some; the document says where vLLM's own is."""
    async with running_vllm() as vllm, running_relay(tmp_path, vllm) as relay:
        response = await relay.send("/openapi.json", method="GET")
        document = await response.json()
        routes = registered(relay.app)
        page = await (await relay.send("/docs", method="GET")).text()
    check_complete(documented(document), routes)
    assert "/openapi.json cannot be reached through this server" in document["info"]["description"]
    assert "cannot be reached through this server" in page


async def test_it_is_there_before_the_engine_is() -> None:
    """While the model loads its name is not known; afterwards it stands in the examples."""
    async with running_server(Behaviour(start_s=0.2), wait=False) as server:
        assert (await server.get("/docs")).status == 200
        await server.lifecycle.wait_started()
        assert '"model": "echo"' in json.dumps(await fetch(server))


def test_each_row_is_a_route_of_some_server() -> None:
    """A row whose route is gone goes too."""
    served = registered(build_app(front(), FakeEngine()))
    assert {row.route for row in GENERATED} <= {path for _, path in served}


@pytest.mark.parametrize("is_relay", [False, True])
def test_each_reference_leads_somewhere(is_relay: bool) -> None:
    """And each component is referred to."""
    rows = RELAYED if is_relay else GENERATED
    document = build_document(rows, model="m", asks_for_keys=True, is_relay=is_relay)
    names = {target.removeprefix("#/components/schemas/") for target in references(document)}
    assert names == document["components"]["schemas"].keys()
    ids = [each["operationId"] for methods in document["paths"].values() for each in methods.values()]
    assert len(ids) == len(set(ids)) == len(rows)


async def test_the_bodies_are_those_that_are_checked(server: Server) -> None:
    """Names, types, limits and what is required come from the models themselves."""
    chat = (await fetch(server))["components"]["schemas"]["ChatBody"]
    assert set(chat["required"]) == {"model", "messages"}
    assert {"minimum": 0, "maximum": 2} in [
        {name: value for name, value in branch.items() if name != "type"}
        for branch in chat["properties"]["temperature"]["anyOf"]
    ]


async def test_each_example_is_accepted(server: Server) -> None:
    """Examples are for copying: with the served model's name, each is answered, in the documented shape."""
    document = await fetch(server)
    answered = await server.post("/v1/chat/completions", chat())
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if "200" not in operation["responses"]:
                continue  # a route that is not here, and says so
            url = path.replace("requests/{id}", f"requests/{answered.headers['X-KVShare-Request']}")
            query = {}
            for parameter in operation["parameters"]:
                if parameter["in"] == "path":
                    url = url.replace("{" + parameter["name"] + "}", str(parameter["example"]))
                elif parameter["in"] == "query" and parameter["required"]:
                    query[parameter["name"]] = str(parameter["example"])
            content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
            sent = {"json": content["example"]} if content else {}
            async with server.http.request(method, server.url + url, params=query, **sent) as response:
                assert response.status == 200, (url, await response.text())
                assert str(response.status) in operation["responses"]
                assert response.content_type in operation["responses"]["200"]["content"]
                shape = row(method, path).answers[200].media.get(response.content_type)
                if shape is not None:
                    TypeAdapter(shape).validate_json(await response.read())


async def test_keys_are_asked_for_where_there_are_some(server: Server, guarded: Server) -> None:
    """Both routes are open; what others ask for depends on the settings."""
    open_document, guarded_document = await fetch(server), await fetch(guarded)
    assert "securitySchemes" not in open_document["components"]
    asking = {
        path
        for path, methods in guarded_document["paths"].items()
        if any("security" in operation for operation in methods.values())
    }
    is_open = {"/health", "/ready", "/status", "/openapi.json", "/docs", "/admin/ui", "/admin/ui/{name}"}
    assert asking == guarded_document["paths"].keys() - is_open
    for path in asking - {"/v1/models/{model}"}:
        for method, operation in guarded_document["paths"][path].items():
            url = guarded.url + re.sub(r"\{.*\}", "1", path)
            async with guarded.http.request(method, url, json={}) as response:
                assert response.status == 401
                assert "401" in operation["responses"]
    assert (await guarded.get("/docs")).status == 200


async def test_the_page_has_every_route_and_loads_nothing(guarded: Server) -> None:
    """One file: no script, no address of elsewhere, and a policy that would stop both."""
    response = await guarded.get("/docs")
    page = html.unescape(await response.text())
    assert response.content_type == "text/html"
    assert "default-src 'none'" in response.headers["Content-Security-Policy"]
    assert "<script" not in page
    assert set(re.findall(r"https?://[\w.]+", page)) == {"http://localhost"}
    document = await fetch(guarded)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert f'<section id="{operation["operationId"]}">' in page
            assert f'curl "$KVSHARE_URL{path.partition("{")[0]}' in page, (method, path)
    for name in document["components"]["schemas"]:
        assert f'<section id="{name}">' in page


def test_the_page_escapes_what_is_not_its_own() -> None:
    """A model's name comes from a folder or a client's settings, and into a shell's example."""
    model = "<b>it's</b>"
    page = render(build_document(GENERATED, model=model, asks_for_keys=False, is_relay=False))
    assert model not in page
    assert "&lt;b&gt;" in page
    command = next(each for each in re.findall(r"<pre>(.*?)</pre>", page, re.DOTALL) if "-d " in each)
    body = shlex.split(html.unescape(command).replace("\\\n", " "))[-1]
    assert json.loads(body)["model"] == model
