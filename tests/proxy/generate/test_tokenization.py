"""/tokenize, /detokenize and /version, in vLLM's shapes."""

from __future__ import annotations

import pytest

import kvshare
from tests.proxy.conftest import Server


async def test_a_text_and_back(server: Server) -> None:
    """A text has the tokens of a completion's prompt; they have that text."""
    document = await (await server.post("/tokenize", {"model": "echo", "prompt": "hi é"})).json()
    assert document == {
        "count": 5,
        "max_model_len": 1000,
        "tokens": list("hi é".encode()),
        "token_strs": None,
    }
    response = await server.post("/detokenize", {"model": "echo", "tokens": document["tokens"]})
    assert await response.json() == {"prompt": "hi é"}


async def test_a_chat(server: Server) -> None:
    """A chat has the tokens that a chat completion of it would have, tools included."""
    body = {"messages": [{"role": "user", "content": "hi"}], "return_token_strs": True}
    document = await (await server.post("/tokenize", body)).json()
    assert document["count"] == len(document["tokens"]) == len("<user>hi")
    assert document["token_strs"] == list("<user>hi")
    await server.post("/tokenize", body | {"tools": [{"type": "function", "function": {"name": "f"}}]})
    assert [len(seen.tools) for seen in server.engine.chats] == [0, 1]
    assert not server.engine.requests


async def test_version(server: Server) -> None:
    """What is served."""
    assert await (await server.get("/version")).json() == {"version": kvshare.__version__}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": False}, 400, "add_special_tokens"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [256]}, 400, "tokens"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused(
    server: Server, path: str, body: object, status: int, param: str
) -> None:
    """A wrong form is a 400 that names the field."""
    response = await server.post(path, body)
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (status, param), error
