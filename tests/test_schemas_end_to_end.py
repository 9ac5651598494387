"""Schemas that would end, choke or deceive the server: the real command, real compilers, real processes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import jsonschema
import pytest
import pytest_asyncio

from tests.conftest import Server
from tests.kvshare.grammar_pool.schemas import BEYOND_A_LIMIT, TAKES_LONG, TAKES_MEMORY
from tests.schema_places import PLACES, request_at

MODEL = "kvshare-demo"
LOWEST, HIGHEST = -(2**63), 2**63 - 1
BIG = 1234567890123456789  # more than 53 bits
ENDLESS = "each answer would contain another one, without end"
CHANGED = "would come back as another number"
PARAMS = {
    "chat": "response_format",
    "completion": "response_format",
    "guided": "guided_json",
    "text": "text.format",
    "chat tool": "tools",
    "lenient tool": "tools",
    "responses tool": "tools",
}  # Anthropic's errors name none


def of(schema: object) -> dict[str, Any]:
    """An object that must have it: arguments of tools are objects."""
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "additionalProperties": False}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (of({"type": "integer", "minimum": LOWEST, "maximum": LOWEST + 3}), "needs more than 64 bits"),
    (of({"type": "integer", "exclusiveMinimum": LOWEST - 1, "exclusiveMaximum": LOWEST + 9}), "64 bits"),
    (of({"type": ["integer", "null"], "minimum": HIGHEST - 3, "maximum": HIGHEST}), "64 bits"),
    (of({"minimum": 2**63}), "needs more than 64 bits"),
    (of({"enum": [BIG]}), CHANGED),
    (of({"const": 2**64 - 1}), CHANGED),
    (of({"const": LOWEST}), CHANGED),
    (of({"anyOf": [{"type": "string"}, {"const": [{"n": -BIG}]}]}), CHANGED),
    (
        of({"$ref": "#/$defs/a"})
        | {"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}},
        ENDLESS,
    ),
    (of({"$ref": "#/default"}) | {"default": {"const": BIG}}, "points to what is not a schema"),
    (of({"type": "integer", "$id": ""}), "have the same $id"),
    (of({"$ref": "json-schema:///"}), ENDLESS),
    (of({"$ref": "#"}), ENDLESS),
    (of({"allOf": [{"type": "object"}, {"$ref": "#"}]}), ENDLESS),
    (
        of({"$ref": "#/definitions/a"})
        | {"definitions": {"a": of({"$ref": "#/definitions/b"}), "b": of({"$ref": "#/definitions/a"})}},
        ENDLESS,
    ),
    (
        of({"anyOf": [of({"$ref": "#"}), {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}]}),
        ENDLESS,
    ),
]


@pytest_asyncio.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def send(
    http: aiohttp.ClientSession, server: Server, place: str, schema: dict[str, Any], *, key: str = "ann"
) -> tuple[int, dict[str, Any]]:
    """
    The status, and the document. A server whose compilers had no time, as on a busy machine, is asked again:
    it says so.
    """
    path, body = request_at(place, schema, model=MODEL, max_tokens=12)
    headers = {"Authorization": f"Bearer {server.key(key)}"}
    for _ in range(20):
        async with http.post(server.url + path, json=body, headers=headers) as response:
            found = response.status, await response.json(loads=strict_json)
        if response.status not in (429, 503):
            break
        await asyncio.sleep(1)
    return found


def strict_json(text: str) -> Any:
    return json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize("place", PLACES)
async def test_what_no_answer_can_follow_is_refused(
    http: aiohttp.ClientSession, server: Server, place: str
) -> None:
    """Wherever it is: with the reason and the place, and the next request is answered."""
    for schema, reason in REFUSED:
        status, document = await send(http, server, place, schema)
        assert status == 400, (schema, document)
        assert reason in document["error"]["message"], (schema, document)
        assert document["error"].get("param") == PARAMS.get(place)
    status, document = await send(http, server, place, of({"enum": [7]}))
    assert status == 200, document


async def test_a_schema_that_takes_long_costs_its_own_request(
    http: aiohttp.ClientSession, server: Server
) -> None:
    """Other keys' schemas compile meanwhile, also after one has ended the process that compiled it."""
    hostile = asyncio.create_task(send(http, server, "chat", TAKES_LONG, key="eve"))
    greedy = asyncio.create_task(send(http, server, "chat", TAKES_MEMORY, key="dot"))
    for number in range(3):
        assert (await send(http, server, "chat", of({"enum": [number]}), key="bob"))[0] == 200
    assert not hostile.done()
    for task in (greedy, hostile):  # of time or of memory, as the machine has it
        status, document = await task
        assert status == 400
        assert re.search(BEYOND_A_LIMIT, document["error"]["message"])
    assert (await send(http, server, "chat", of({"enum": [7]}), key="eve"))[0] == 200


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "format": "int64", "minimum": LOWEST, "maximum": HIGHEST},
        {"type": "integer", "format": "uint64", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "integer", "exclusiveMinimum": LOWEST, "exclusiveMaximum": 2**63},
        {"type": "integer", "minimum": LOWEST},
        {"type": ["integer", "null"], "maximum": HIGHEST},
        {"const": 2**53},
        {"enum": [2**60, -(2**62)]},  # floats hold them
        {"type": "number", "format": "double", "minimum": -1e308, "maximum": 1e308, "multipleOf": 0.5},
    ],
)
async def test_numbers_as_generators_bound_them_are_answered(
    http: aiohttp.ClientSession, server: Server, schema: dict[str, Any]
) -> None:
    """With a number within the bounds."""
    for place in ("chat", "chat tool"):
        status, document = await send(http, server, place, of(schema))
        assert status == 200, document
        (choice,) = document["choices"]
        calls = choice["message"].get("tool_calls")
        text = calls[0]["function"]["arguments"] if calls else choice["message"]["content"]
        if choice["finish_reason"] != "length":
            jsonschema.validate(json.loads(text), of(schema))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("num_levels", [120, 150])
async def test_a_deep_schema_is_refused(
    http: aiohttp.ClientSession, server: Server, place: str, num_levels: int
) -> None:
    """By whichever limit it meets first; also where the answer says what the request was."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(num_levels):
        schema = of(schema)
    status, document = await send(http, server, place, schema)
    assert status == 400
    assert document["error"]["message"]
