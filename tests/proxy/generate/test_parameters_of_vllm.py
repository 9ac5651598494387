"""No parameter of vLLM's APIs is ignored by accident: each is read, refused, or listed as a hint."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from proxy.generate.chat.bodies import ChatBody, CompletionBody
from proxy.generate.messages.bodies import CountTokensBody, MessagesBody
from proxy.generate.models import EmbeddingBody
from proxy.generate.responses.bodies import ResponsesBody
from proxy.generate.unsupported import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    UnsupportedParameters,
)
from tests.proxy.conftest import Server

_BESIDE_THE_MODELS = {"cache_salt"}  # read with the key, of every body

APIS = [
    ("ChatCompletionRequest", ChatBody, CHAT),
    ("CompletionRequest", CompletionBody, COMPLETIONS),
    ("ResponsesRequest", ResponsesBody, RESPONSES),
    ("AnthropicMessagesRequest", MessagesBody, MESSAGES),
    ("AnthropicCountTokensRequest", CountTokensBody, MESSAGES),
    ("EmbeddingCompletionRequest", EmbeddingBody, EMBEDDINGS),
]


@cache
def vllm_classes() -> Mapping[str, ast.ClassDef]:
    """The classes of vLLM's protocols, by name: its source is read, since importing vLLM takes 20 s."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed here")
    files = (Path(spec.origin).parent / "entrypoints").rglob("protocol.py")
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text("utf-8")))]
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


def fields_of(name: str) -> set[str]:
    """The fields of a model of vLLM, with those of its parents."""
    found = vllm_classes().get(name)
    if found is None:
        return set()
    own = {
        node.target.id
        for node in found.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
        and not ast.unparse(node.annotation).startswith("ClassVar")
    }
    return own.union(*(fields_of(ast.unparse(base)) for base in found.bases))


@pytest.mark.parametrize(("name", "body", "api"), APIS)
def test_each_parameter_of_vllm_is_known(
    name: str, body: type[BaseModel], api: UnsupportedParameters
) -> None:
    """What vLLM reads and this server does not is refused, or has no effect on the answer."""
    theirs = fields_of(name)
    assert "model" in theirs
    known = body.model_fields.keys() | api.refused.keys() | api.hints | _BESIDE_THE_MODELS
    assert theirs - known == set()


@pytest.mark.parametrize(("_", "body", "api"), APIS)
def test_no_parameter_is_in_two_lists(_: str, body: type[BaseModel], api: UnsupportedParameters) -> None:
    """A parameter that is read is not refused, and one that is refused is no hint."""
    assert api.refused.keys() & api.hints == set()
    assert body.model_fields.keys() & (api.refused.keys() | api.hints) == set()


CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES: Sequence[tuple[UnsupportedParameters, str, dict[str, Any]]] = [
    (CHAT, "/v1/chat/completions", CHAT_BODY),
    (COMPLETIONS, "/v1/completions", {"prompt": "hi"}),
    (RESPONSES, "/v1/responses", {"input": "hi"}),
    (MESSAGES, "/v1/messages", {**CHAT_BODY, "max_tokens": 4}),
    (EMBEDDINGS, "/v1/embeddings", {"input": "hi"}),
]


@pytest.mark.parametrize(("api", "path", "body"), ROUTES)
async def test_what_asks_for_something_is_refused_and_what_asks_for_nothing_passes(
    server: Server, api: UnsupportedParameters, path: str, body: dict[str, Any]
) -> None:
    """Each row of the table: its neutral values are answered, another is a 400 that names it and says why."""
    for name, row in api.refused.items():
        for value in (None, *row.neutral):
            response = await server.post(path, {"model": "echo", **body, name: value})
            assert response.status == 200, (name, value, await response.text())
        response = await server.post(path, {"model": "echo", **body, name: {"other": 7}})
        message = (await response.json())["error"]["message"]
        assert (response.status, message.split(":")[0]) == (400, "Unsupported parameter"), (name, message)
        assert f"'{name}'" in message
