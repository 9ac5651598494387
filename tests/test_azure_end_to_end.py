"""Azure's client of the openai package, against the real command: its paths, header and version."""

import openai
import pytest

from tests.conftest import Server

MODEL = "kvshare-demo"
VERSION = "2024-10-21"
TURN = "Write about the weather in Lisbon, for people who have never been there."


def client_for(server: Server, name: str, deployment: str | None = None) -> openai.AzureOpenAI:
    return openai.AzureOpenAI(
        azure_endpoint=server.url,
        azure_deployment=deployment,
        api_version=VERSION,
        api_key=server.key(name),
        max_retries=0,
    )


def test_it_chats_streams_and_completes(server: Server) -> None:
    """The model that a call names is in the path; a second chat reuses what the first has computed."""
    with client_for(server, "ann") as client:
        first = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": TURN}], max_tokens=8, temperature=0
        )
        stream = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": TURN}],
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        completion = client.completions.create(model=MODEL, prompt="The weather", max_tokens=2)
        response = client.responses.create(model=MODEL, input=TURN, max_output_tokens=2)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == first.choices[0].message.content != ""
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens
    assert completion.usage is not None
    assert completion.usage.completion_tokens == 2
    assert response.model == MODEL


def test_the_deployment_is_the_model_whatever_the_body_names(server: Server) -> None:
    """As with Azure, whose deployments have names of their own."""
    turns: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": TURN}]
    with client_for(server, "ann", MODEL) as client:
        answer = client.chat.completions.create(model="gpt-4o", messages=turns, max_tokens=2)
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


def test_its_paths_ask_for_a_key_and_keep_tenants_apart(server: Server) -> None:
    """An unknown key is refused, and another tenant gets nothing of what ann has stored."""
    turns: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "user", "content": TURN * 8 + " Use short sentences."}
    ]
    with client_for(server, "nobody") as client, pytest.raises(openai.AuthenticationError):
        client.chat.completions.create(model=MODEL, messages=turns, max_tokens=2)
    cached = []
    for name in ("ann", "cid", "bob"):
        with client_for(server, name) as client:
            answer = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=2)
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        cached.append(0 if details is None else details.cached_tokens or 0)
    prompt = answer.usage.prompt_tokens
    assert cached[1] == 0
    assert cached[2] > prompt / 2
