"""Azure's paths in front of vLLM: it is asked by its own, for the model that the path names."""

from __future__ import annotations

import openai
import pytest

from tests.fake_vllm import MODEL, FakeVllm
from tests.proxy.conftest import eventually
from tests.proxy.relay.relay_server import Relay, chat_body

_VERSION = "2024-10-21"


def client_for(relay: Relay, deployment: str | None = None) -> openai.AsyncAzureOpenAI:
    return openai.AsyncAzureOpenAI(
        azure_endpoint=relay.url,
        azure_deployment=deployment,
        api_version=_VERSION,
        api_key="none",
        max_retries=10,  # its first call imports for seconds, in which a replica misses health checks
    )


async def test_a_chat_is_planned_as_by_openais_path(relay: Relay, vllm: FakeVllm) -> None:
    """vLLM gets the ticket of a near-duplicate, and neither Azure's path nor its version."""
    for place in ("Faro", "Lagos"):
        async with client_for(relay, MODEL) as client:
            await client.chat.completions.create(
                model="gpt-4o",
                messages=chat_body(place)["messages"],
                extra_query={"other": "1"},
            )
        await eventually(lambda: relay.num_nodes > 0 and bool(relay.engine.fleet.sharing()))
    chats = [seen for seen in vllm.seen if seen.path == "/v1/chat/completions?other=1"]
    assert [seen.body["model"] for seen in chats] == [MODEL, MODEL]
    assert all("api-key" not in {name.lower() for name in seen.headers} for seen in chats)
    ticket = chats[-1].ticket
    assert ticket is not None
    assert ticket.copies


async def test_other_routes_reach_vllm_by_their_own_paths(relay: Relay, vllm: FakeVllm) -> None:
    """The list of models and completions are answered; embeddings are whatever vLLM says of them."""
    async with client_for(relay) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        await client.completions.create(model=MODEL, prompt="a b c")
    embedded = await relay.send(f"/openai/deployments/{MODEL}/embeddings?api-version=1", {"input": "a"})
    assert await embedded.json() == {"path": "/v1/embeddings"}
    assert [seen.path for seen in vllm.seen] == ["/v1/completions", "/v1/embeddings"]
    assert vllm.seen[-1].body["model"] == MODEL


@pytest.mark.parametrize(
    "path", [f"/openai/deployments/{MODEL}/embedding%73", f"/%6Fpenai/deployments/{MODEL}/embeddings/"]
)
async def test_other_spellings_of_a_path_are_the_same(relay: Relay, vllm: FakeVllm, path: str) -> None:
    embedded = await relay.send(path, {"input": "a"})
    assert await embedded.json() == {"path": "/v1/embeddings"}
    assert vllm.seen[-1].body["model"] == MODEL
