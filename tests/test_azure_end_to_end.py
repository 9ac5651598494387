"""Azure's client of the openai package, against the real command: its paths, header and version."""

import time
from typing import Any

import openai
import pytest

from kvshare_lab.demo_model.pairs import near_duplicate_pairs
from tests.conftest import Server

MODEL = "kvshare-demo"
VERSION = "2024-10-21"
OWN = {"cache_salt": "azure"}  # other tests of this server find nothing of these


def turns_of(seed: int) -> list[Any]:
    """A conversation that the demo model knows."""
    return next(near_duplicate_pairs(seed=seed, count=1)).donor_messages


def client_for(server: Server, name: str, deployment: str | None = None) -> openai.AzureOpenAI:
    return openai.AzureOpenAI(
        azure_endpoint=server.url,
        azure_deployment=deployment,
        api_version=VERSION,
        api_key=server.key(name),
        max_retries=0,
    )


def test_it_chats_streams_and_completes(server: Server) -> None:
    """The model that a call names is in the path; a stream has what a plain answer has."""
    turns = turns_of(71)
    with client_for(server, "ann") as client:
        first = client.chat.completions.create(
            model=MODEL, messages=turns, max_tokens=8, temperature=0, extra_body=OWN
        )
        stream = client.chat.completions.create(
            model=MODEL,
            messages=turns,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=OWN,
        )
        chunks = list(stream)
        completion = client.completions.create(model=MODEL, prompt="The weather", max_tokens=2)
        response = client.responses.create(model=MODEL, input="The weather", max_output_tokens=2)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == first.choices[0].message.content != ""
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens > 0
    assert completion.usage is not None
    assert 0 < completion.usage.completion_tokens <= 2
    assert response.model == MODEL


def test_the_deployment_is_the_model_whatever_the_body_names(server: Server) -> None:
    """As with Azure, whose deployments have names of their own."""
    turns = turns_of(72)
    with client_for(server, "ann", MODEL) as client:
        answer = client.chat.completions.create(model="gpt-4o", messages=turns, max_tokens=2, extra_body=OWN)
    assert answer.model == MODEL
    with client_for(server, "ann", "other") as client, pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model=MODEL, messages=turns, max_tokens=2)


def test_models_are_listed_and_texts_embedded(server: Server) -> None:
    """The other routes that the server has."""
    with client_for(server, "ann") as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL
        vectors = client.embeddings.create(model=MODEL, input=["a text", "another"])
    assert [len(entry.embedding) for entry in vectors.data] == [384, 384]


def cached(server: Server, name: str, turns: list[Any], **kvshare: object) -> tuple[int, int]:
    """Tokens of the prompt that were reused for this key, and all of them."""
    with client_for(server, name) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=turns, max_tokens=2, extra_body={**OWN, "kvshare": kvshare}
        )
    usage = answer.usage
    assert usage is not None
    details = usage.prompt_tokens_details
    return (0 if details is None else details.cached_tokens or 0), usage.prompt_tokens


def test_its_paths_ask_for_a_key_and_keep_tenants_apart(server: Server) -> None:
    """An unknown key is refused; what ann has stored is for her tenant."""
    turns = turns_of(73)
    with pytest.raises(openai.AuthenticationError):
        cached(server, "nobody", turns)
    cached(server, "ann", turns)
    deadline = time.monotonic() + 60
    # It is stored after the answer.
    while (found := cached(server, "bob", turns, no_store=True))[0] < found[1] / 2:
        assert time.monotonic() < deadline, found
    assert cached(server, "cid", turns)[0] == 0
