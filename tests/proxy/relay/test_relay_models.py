"""`/v1/models` in front of vLLM: as it is for OpenAI's clients, in Anthropic's form for theirs."""

from __future__ import annotations

import anthropic
import pytest

from tests.fake_vllm import MODEL, FakeVllm
from tests.proxy.relay.relay_server import Relay


async def test_openais_form_is_vllms_own(relay: Relay) -> None:
    """Byte for byte what vLLM lists."""
    listed = await (await relay.http.get(f"{relay.url}/v1/models")).json()
    assert listed["data"][0] == {"id": MODEL, "parent": None, "max_model_len": 4096}


async def test_anthropics_client_lists_models_and_adapters(relay: Relay, vllm: FakeVllm) -> None:
    """The real client reads the list, and finds each by its name."""
    vllm.behaviour.adapters = ("poet",)
    async with anthropic.AsyncAnthropic(base_url=relay.url, api_key="none", max_retries=0) as client:
        page = await client.models.list()
        adapter = await client.models.retrieve("poet")
        with pytest.raises(anthropic.NotFoundError):
            await client.models.retrieve("other")
    assert [(model.id, model.max_input_tokens) for model in page.data] == [(MODEL, 4096), ("poet", None)]
    assert adapter == page.data[1]
