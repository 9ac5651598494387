"""/v1/embeddings, through the real client."""

from __future__ import annotations

import base64
import struct
from typing import Literal

import openai
import pytest

from tests.proxy.conftest import Server, running_server
from tests.proxy.fake_engine import Behaviour


@pytest.mark.parametrize("encoding", ["float", openai.omit])
@pytest.mark.parametrize(("given", "lengths"), [("abc", [3]), (["a", "bb"], [1, 2])])
async def test_texts_become_vectors(
    server: Server, encoding: Literal["float"] | openai.Omit, given: str | list[str], lengths: list[int]
) -> None:
    """In order, with the tokens that were read. Left to itself the client asks for base64 and decodes it."""
    async with server.client() as client:
        answer = await client.embeddings.create(model="lengths", input=given, encoding_format=encoding)
    assert answer.model == "lengths"
    assert [entry.index for entry in answer.data] == list(range(len(lengths)))
    for entry, length in zip(answer.data, lengths, strict=True):
        assert entry.embedding == [float(place == length) for place in range(8)]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(lengths)


async def test_base64_is_little_endian_float32(server: Server) -> None:
    """As OpenAI's API has it."""
    body = {"model": "lengths", "input": "abc", "encoding_format": "base64"}
    document = await (await server.post("/v1/embeddings", body)).json()
    raw = base64.b64decode(document["data"][0]["embedding"])
    assert struct.unpack("<8f", raw) == (0, 0, 0, 1, 0, 0, 0, 0)


@pytest.mark.parametrize("model", ["echo", "lengths"])
async def test_two_names_lead_to_it(server: Server, model: str) -> None:
    """Clients with one model for everything send that name; the answer says what embedded."""
    async with server.client() as client:
        answer = await client.embeddings.create(model=model, input="a", dimensions=8)
    assert answer.model == "lengths"


@pytest.mark.parametrize(
    ("given", "status", "param", "code"),
    [
        ({"input": ""}, 400, "input", None),
        ({"input": []}, 400, "input", None),
        ({"input": ["a", ""]}, 400, "input[1]", None),
        ({"input": ["a", None]}, 400, "input[1]", None),
        ({"input": [1, 2]}, 400, "input[0]", None),
        ({"input": [[1, 2]]}, 400, "input[0]", None),
        ({"input": None}, 400, "input", None),
        ({"input": ["a"] * 2049}, 400, "input", None),
        ({"dimensions": 4}, 400, "dimensions", "unsupported_parameter"),
        ({"encoding_format": "hex"}, 400, "encoding_format", None),
        ({"model": "other"}, 404, "model", "model_not_found"),
    ],
)
async def test_what_cannot_be_embedded_is_refused(
    server: Server, given: dict[str, object], status: int, param: str, code: str | None
) -> None:
    """A wrong form is a 400 that names the field."""
    response = await server.post("/v1/embeddings", {"model": "lengths", "input": "a"} | given)
    error = (await response.json())["error"]
    assert (response.status, error["param"], error["code"]) == (status, param, code), error


async def test_a_server_without_an_embedder_says_so() -> None:
    """Not every server has one."""
    async with running_server(Behaviour(has_no_embedder=True)) as server:
        response = await server.post("/v1/embeddings", {"model": "lengths", "input": "a"})
        assert (await response.json())["error"]["code"] == "no_embedder"
