"""Warming over real sockets: the front around an engine of echoes, and the proxy before a fake vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvshare.errors import UnreachableError, UpstreamError
from kvshare.logs.rows import RowFault
from kvshare.warming.client import WarmOptions
from kvshare.warming.entries import Place, WarmingEntry
from kvshare.warming.run import warm
from tests.fake_vllm import FakeVllm
from tests.proxy.conftest import Server, eventually, key_of, running_server
from tests.proxy.fake_engine import Behaviour
from tests.proxy.relay.relay_server import FORM, running_relay


def entry(text: str, line: int = 1, **body: object) -> WarmingEntry:
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1, "temperature": 0, **body}
    return WarmingEntry(Place("file", line), "v1/chat/completions", chat)


async def warmed(url: str, *entries: WarmingEntry, **options: Any) -> dict[str, Any]:
    """It has an event loop of its own, as on the command line."""
    return await asyncio.to_thread(warm, entries, WarmOptions(url, **options))


async def num_answered(server: Server, *, status: int) -> int:
    """Chats that were answered so."""
    text = await (await server.get("/metrics")).text()
    samples = [
        sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "kvshare_requests_total"
    ]
    route = "/v1/chat/completions"
    return sum(
        int(sample.value)
        for sample in samples
        if (sample.labels["endpoint"], sample.labels["status"]) == (route, str(status))
    )


async def test_in_front_of_vllm_prompts_are_stored_pinned_and_then_known(
    tmp_path: Path, vllm: FakeVllm
) -> None:
    """The counts come from the headers, the nodes from the admin routes; the first user finds all of it."""
    async with running_relay(tmp_path, vllm) as relay:
        texts = [FORM.format(place=place) + place * 40 for place in ("Rome", "Oslo")]
        entries = [entry(text, line, kvshare={"mode": "exact"}) for line, text in enumerate(texts, 1)]
        first = await warmed(relay.url, *entries, pin=True, concurrency=1)
        assert (first["entries"], first["stored"], first["known"], first["failed"]) == (2, 2, 0, 0)
        nodes = relay.engine.sharing.tree.nodes()
        assert [prompt["node"] for prompt in first["prompts"]] == [node.node_id for node in nodes]
        assert relay.engine.sharing.tree.pinned() == {node.node_id for node in nodes}
        lengths = [len(vllm.tokens_of(seen.body)) for seen in vllm.generated]
        assert [prompt["tokens"] for prompt in first["prompts"]] == lengths
        assert first["tokens"] == first["computed"] + first["exact"] == sum(lengths)

        again = await warmed(relay.url, *entries, concurrency=1)
        assert (again["stored"], again["known"], again["computed"]) == (0, 2, 2)
        assert [prompt["node"] for prompt in again["prompts"]] == [node.node_id for node in nodes]
        assert relay.num_nodes == 2


async def test_what_a_replica_retains_nothing_of_has_failed(tmp_path: Path, vllm: FakeVllm) -> None:
    """The request was answered, and nobody will find it."""
    vllm.behaviour.stores = False
    async with running_relay(tmp_path, vllm) as relay:
        document = await warmed(relay.url, entry(FORM))
        assert (document["stored"], document["failed"]) == (0, 1)
        assert document["failures"] == [{"file": "file", "line": 1, "label": None, "reason": "not_stored"}]


async def test_a_busy_server_is_asked_again_when_it_says() -> None:
    """429 with Retry-After; nothing is lost."""
    behaviour = Behaviour(prefill_s=1.0, max_running=1, max_waiting=0)
    async with running_server(behaviour) as server:
        entries = [entry(f"text {number}", number) for number in range(3)]
        document = await warmed(server.url, *entries, concurrency=3)
        assert (document["entries"], document["failed"]) == (3, 0)
        assert await num_answered(server, status=429) > 0
        served = {request.prompt.text.last_user_turn for request in server.engine.requests}
        assert served == {"text 0", "text 1", "text 2"}


async def test_without_an_admin_key_nobody_says_what_was_stored(guarded: Server) -> None:
    """The counts of tokens are there; "stored" is null, and no node is named."""
    document = await warmed(guarded.url, entry("some text"), key=key_of("alice"))
    assert (document["tokens"], document["failed"], document["stored"], document["evicted"]) == (
        *(15, 0),
        *(None, None),
    )
    assert document["prompts"][0]["node"] is None
    assert {request.namespace.tenant for request in guarded.engine.requests} == {"acme"}


async def test_pinning_without_an_admin_key_is_refused_before_anything_is_sent(guarded: Server) -> None:
    with pytest.raises(UpstreamError, match="--admin-key"):
        await warmed(guarded.url, entry("some text"), key=key_of("alice"), pin=True)
    assert not guarded.engine.requests


async def test_a_wrong_key_and_nobody_there_are_said(guarded: Server) -> None:
    with pytest.raises(UpstreamError, match="401"):
        await warmed(guarded.url, entry("some text"), key="wrong")
    with pytest.raises(UnreachableError):
        await warmed("http://127.0.0.1:9", entry("some text"))


async def test_each_failure_has_its_line_and_a_word(server: Server) -> None:
    """The server's code, or the status and the field; never the text, nor the server's message."""
    entries = [
        WarmingEntry(Place("file", 1), reason=RowFault.BAD_JSON),
        entry("SECRET " * 300, 2),
        entry("SECRET", 3, model="another"),
        entry("SECRET", 4, messages=[{"role": "SECRET", "content": "SECRET"}]),
        entry("SECRET", 5, kvshare={"SECRET": 1}),
        WarmingEntry(Place("file", 6), "v1/nothing", {}),
    ]
    document = await warmed(server.url, *entries, concurrency=2)
    assert [(failure["line"], failure["reason"]) for failure in document["failures"]] == [
        (1, "bad_json"),
        (2, "context_length_exceeded"),
        (3, "model_not_found"),
        (4, "http_400 messages[0].role"),
        (5, "unknown_parameter"),
        (6, "not_found"),
    ]
    assert (document["entries"], document["failed"], document["complete"]) == (6, 6, True)
    assert "SECRET" not in str(document)


async def test_no_more_are_sent_at_a_time_than_asked_for() -> None:
    """A server that takes two refuses none; the document has them in the file's order."""
    async with running_server(Behaviour(prefill_s=0.05, max_running=2, max_waiting=0)) as server:
        entries = [entry("text" * (7 - number), number) for number in range(6)]
        document = await warmed(server.url, *entries, concurrency=2)
        assert [prompt["line"] for prompt in document["prompts"]] == list(range(6))
        assert await num_answered(server, status=429) == 0
        assert await num_answered(server, status=200) == 6


async def test_a_reader_that_fails_stops_it_with_its_own_error(server: Server) -> None:
    def failing() -> Iterator[WarmingEntry]:
        yield entry("text")
        raise UnreachableError("there", "as the test wants it")

    with pytest.raises(UnreachableError, match="as the test wants it"):
        await asyncio.to_thread(warm, failing(), WarmOptions(server.url))
    await eventually(lambda: server.engine.num_running == 0)
