"""`/v1/models` as Anthropic's clients expect it, through the real client over a real socket."""

from __future__ import annotations

import anthropic
import pytest

from proxy.anthropic_models import page_of
from tests.proxy.conftest import Server, key_of, key_settings, running_server

VERSION = {"anthropic-version": "2023-06-01"}


async def test_anthropics_client_lists_models(server: Server) -> None:
    """The real client reads the list, and finds the model by its name."""
    async with server.anthropic() as client:
        page = await client.models.list()
        found = await client.models.retrieve("echo")
    assert [(model.type, model.id, model.display_name) for model in page.data] == [("model", "echo", "echo")]
    assert (page.has_more, page.first_id, page.last_id) == (False, "echo", "echo")
    assert found == page.data[0]
    assert found.max_input_tokens == server.engine.card.max_model_len
    assert found.created_at.timestamp() == server.engine.card.created


async def test_other_clients_get_openais_form(server: Server) -> None:
    """Only the header makes the difference."""
    listed = await (await server.get("/v1/models")).json()
    assert (listed["object"], listed["data"][0]["object"]) == ("list", "model")


async def test_errors_are_in_anthropics_words(server: Server) -> None:
    """An unknown model is a not_found_error, which the client raises as such."""
    async with server.anthropic() as client:
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.models.retrieve("other")
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    refused = await server.get("/v1/models?limit=0", **VERSION)
    assert refused.status == 400
    assert (await refused.json())["error"]["type"] == "invalid_request_error"


async def test_a_wrong_key_is_refused_in_anthropics_words() -> None:
    """Also on this route, which both APIs have."""
    async with running_server(auth__keys=key_settings()) as server:
        async with server.anthropic("sk-unknown") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.models.list()
        async with server.anthropic(key_of("alice")) as client:
            assert (await client.models.list()).data[0].id == "echo"
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_pages() -> None:
    """`limit`, `after_id` and `before_id` cut a list as Anthropic does."""
    cards = [{"id": name, "created": 0} for name in "abcde"]

    def ids(**query: str) -> tuple[str, bool]:
        page = page_of(cards, query)
        return "".join(model["id"] for model in page["data"]), page["has_more"]

    assert ids() == ("abcde", False)
    assert ids(limit="2") == ("ab", True)
    assert ids(limit="2", after_id="b") == ("cd", True)
    assert ids(limit="2", after_id="d") == ("e", False)
    assert ids(limit="2", before_id="d") == ("bc", True)
    assert ids(before_id="a") == ("", False)
