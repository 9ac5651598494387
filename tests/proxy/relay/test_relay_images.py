"""Requests with images: planned by the digests that vLLM gives them, never by what a client calls them."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from delta_tree import Span, token_ids
from kvshare.reasons import Reason
from kvshare.vllm_protocol.media import Medium, identified
from kvshare.vllm_protocol.messages import digest_of
from tests.fake_vllm import MODEL, Behaviour, FakeVllm, running_vllm
from tests.proxy.relay.bodies import ask
from tests.proxy.relay.relay_server import FORM, LOCAL_SALT, Relay, running_relay

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PIXELS = "data:image/png;base64,AAAA"
IMAGES: dict[str, dict[str, Any]] = {
    CHAT: {"type": "image_url", "image_url": {"url": PIXELS}},
    RESPONSES: {"type": "input_image", "image_url": PIXELS},
    MESSAGES: {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
}
PLACE = Span(60, 90)  # of the image, in the tokens that vLLM renders
KV = "kv_transfer_params"
ONE, OTHER = (hashlib.sha256(word.encode()).hexdigest() for word in ("one", "other"))


def _turn(parts: list[Any]) -> dict[str, Any]:
    return {"role": "user", "content": parts}


# Where vLLM's routes read parts of contents.
MEDIA_ROUTES: list[tuple[str, Callable[[list[Any]], dict[str, Any]]]] = [
    (CHAT, lambda parts: {"messages": [_turn(parts)]}),
    (f"{CHAT}/batch", lambda parts: {"messages": [[_turn(parts)], [_turn(parts)]]}),
    (RESPONSES, lambda parts: {"input": [{"type": "message", **_turn(parts)}]}),
    (RESPONSES, lambda parts: {"input": [{"type": "function_call_output", "call_id": "1", "output": parts}]}),
    (MESSAGES, lambda parts: {"messages": [_turn([{"type": "tool_result", "content": parts}])]}),
    ("/v1/embeddings", lambda parts: {"messages": [_turn(parts)]}),
    ("/v1/embeddings", lambda parts: {"input": [_turn(parts)]}),
    ("/v1/embeddings", lambda parts: {"input": [[_turn(parts)], [_turn(parts)]]}),
    ("/v1/rerank", lambda parts: {"query": {"content": parts}, "documents": ["text"]}),
    ("/v1/rerank", lambda parts: {"query": "text", "documents": ["text", {"content": parts}]}),
    ("/v1/rerank", lambda parts: {"query": "text", "documents": {"content": parts}}),
    ("/v1/score", lambda parts: {"data_1": "text", "data_2": [{"content": parts}]}),
    ("/v1/score", lambda parts: {"data_1": {"content": parts}, "data_2": "text"}),
    ("/v1/score", lambda parts: {"text_1": {"content": parts}, "text_2": [{"content": parts}]}),
    ("/v1/score", lambda parts: {"queries": [{"content": parts}], "documents": ["text"]}),
    ("/v1/score", lambda parts: {"queries": "text", "items": [{"content": parts}]}),
]


def features(digest: str, place: Span = PLACE) -> dict[str, Any]:
    placed = {"offset": place.start, "length": len(place)}
    return {"mm_hashes": {"image": [digest]}, "mm_placeholders": {"image": [placed]}, "kwargs_data": None}


def turns_of(path: str, place: str, **image: Any) -> dict[str, Any]:
    kind = "input_text" if path == RESPONSES else "text"
    content = [{"type": kind, "text": FORM.format(place=place)}, {**IMAGES[path], **image}]
    return {"input" if path == RESPONSES else "messages": [{"role": "user", "content": content}]}


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    """It renders an image into the tokens of PLACE."""
    async with running_vllm(Behaviour(can_share_media=True, features=features(ONE))) as running:
        yield running


@pytest.fixture
async def relay(vllm: FakeVllm, tmp_path: Path) -> AsyncIterator[Relay]:
    async with running_relay(tmp_path, vllm) as running:
        yield running


def planned_tokens(vllm: FakeVllm, digest: str) -> Any:
    rendered = token_ids(vllm.tokens_of(vllm.generated[-1].body))
    return identified(rendered, [Medium(PLACE, digest)])


@pytest.mark.parametrize("path", IMAGES)
async def test_the_same_image_is_copied_with_its_text(relay: Relay, vllm: FakeVllm, path: str) -> None:
    """On every route. vLLM renders without the image's tensors, and is given no tokens back."""
    for place in ("Rome", "Oslo"):
        await ask(relay, path, place, **turns_of(path, place))
    first, second = vllm.tickets
    assert first.copies == ()
    assert second.prompt_digest == digest_of(planned_tokens(vllm, ONE))
    assert any(copy.target.start <= PLACE.start and PLACE.end <= copy.target.end for copy in second.copies)
    assert second.order is None
    assert [seen.body["mm_payload"] for seen in vllm.rendered] == ["none"] * 2
    for seen in vllm.generated:
        assert "mm_payload" not in seen.body
        assert "prompt_token_ids" not in seen.body["kv_transfer_params"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
async def test_another_image_of_the_same_size_is_not(relay: Relay, vllm: FakeVllm, path: str) -> None:
    """Whatever a client calls it: neither it, nor what is behind it, is copied."""
    await ask(relay, path, "Rome", **turns_of(path, "Rome", uuid="cat"))
    vllm.behaviour.features = features(OTHER)
    await ask(relay, path, "Rome", **turns_of(path, "Rome", uuid="cat"))
    assert all(copy.target.end <= PLACE.start for copy in vllm.tickets[1].copies)
    assert vllm.tickets[1].prompt_digest == digest_of(planned_tokens(vllm, OTHER))
    for seen in (*vllm.rendered, *vllm.generated):
        (turn,) = seen.body["input" if path == RESPONSES else "messages"]
        assert turn["content"][1] == IMAGES[path]


@pytest.mark.parametrize(("path", "of_parts"), MEDIA_ROUTES)
async def test_no_route_takes_an_id_of_a_client(
    relay: Relay, vllm: FakeVllm, path: str, of_parts: Callable[[list[Any]], dict[str, Any]]
) -> None:
    """Also one that names another tenant's image by its digest."""
    vllm.behaviour.features = None  # there is no text around the image
    image = IMAGES[RESPONSES if path == RESPONSES else CHAT]
    await relay.send(path, {"model": MODEL, **of_parts([{**image, "uuid": ONE}, {**image, "uuid": None}])})
    (seen,) = vllm.seen
    given = {name: value for name, value in seen.body.items() if name not in ("cache_salt", KV)}
    assert given == {"model": MODEL, **of_parts([image, image])}


@pytest.mark.parametrize(("path", "of_parts"), MEDIA_ROUTES)
@pytest.mark.parametrize("kind", ["image_embeds", "audio_embeds", "video_embeds"])
async def test_no_route_takes_embeddings(
    relay: Relay, vllm: FakeVllm, path: str, of_parts: Callable[[list[Any]], dict[str, Any]], kind: str
) -> None:
    """Behind the type of an image, too: with an id beside them vLLM goes by their name."""
    for part in ({"type": kind}, {"type": "input_image", "detail": "auto", kind: "AAAA", "uuid": "cat"}):
        response = await relay.send(path, {"model": MODEL, **of_parts([part])})
        assert (response.status, kind in await response.text()) == (400, True)
    assert vllm.seen == []


async def test_what_is_asked_of_tokenize_has_no_ids_either(tmp_path: Path) -> None:
    """With an id, vLLM takes what says that it is text for the image beside it."""
    part = {"type": "text", "text": FORM.format(place="Rome"), "image_url": PIXELS}
    async with running_vllm(Behaviour(renders=False)) as vllm, running_relay(tmp_path, vllm) as relay:
        await ask(relay, CHAT, "Rome", messages=[{"role": "user", "content": [{**part, "uuid": ONE}]}])
        bodies = [*vllm.tokenized, vllm.generated[0].body]
        assert [body["messages"][0]["content"] for body in bodies] == [[part]] * 2


@pytest.mark.parametrize(
    "found",
    [
        features("cat"),
        features(ONE, Span(60, 68)),  # too few tokens for its digest
        features(ONE, Span(60, 60_000)),  # beyond the prompt's end
        features(ONE) | {"mm_hashes": {"image": [ONE, ONE]}},
        {"mm_hashes": {"audio": [ONE]}, "mm_placeholders": {"audio": [{"offset": 60, "length": 30}]}},
        {"mm_hashes": {"image": [ONE]}, "mm_placeholders": {"image": [{"offset": "60", "length": 30}]}},
        {
            "mm_hashes": {"image": [ONE, OTHER]},
            "mm_placeholders": {"image": [{"offset": 60, "length": 30}, {"offset": 70, "length": 30}]},
        },
        ["image"],
    ],
)
async def test_what_vllm_does_not_identify_is_not_planned(
    relay: Relay, vllm: FakeVllm, found: object
) -> None:
    vllm.behaviour.features = found
    await ask(relay, CHAT, "Rome", **turns_of(CHAT, "Rome"))
    assert vllm.tickets == []
    assert relay.counts.unshared[Reason.MULTIMODAL] == 1


@pytest.mark.parametrize("can_share", [True, False])
async def test_images_are_rendered_only_where_that_can_help(
    relay: Relay, vllm: FakeVllm, can_share: bool
) -> None:
    """Neither an address, which vLLM would fetch twice, nor what no replica could share."""
    if can_share:
        turns = turns_of(CHAT, "Rome", image_url={"url": "https://example.org/cat.png"})
    else:
        turns = turns_of(CHAT, "Rome")
        for replica in relay.engine.fleet.sharing():
            object.__setattr__(replica.info, "can_share_media", False)
    await ask(relay, CHAT, "Rome", **turns)
    assert vllm.rendered == []
    assert vllm.generated[0].body["messages"] == turns["messages"]
    assert vllm.generated[0].body["cache_salt"] == LOCAL_SALT
    assert relay.counts.unshared[Reason.MULTIMODAL] == 1
