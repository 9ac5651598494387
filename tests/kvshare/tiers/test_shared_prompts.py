"""Records of prompts in a real Redis, and news of them: what is believed, and who hears of it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from delta_tree import Piece, PieceTable, token_ids
from kvshare.tenants import NamespaceOwner
from kvshare.tiers.shared_prompts import PromptExchange, RecordError, SharedPrompt
from kvshare.tiers.shared_start import open_shared_tier
from tests.kvshare.tiers.stored import NAMESPACE, form, segment
from tests.redis_server import RedisServer, needs_redis, redis_at

pytestmark = needs_redis
OWNER = NamespaceOwner("t", "tenant")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_at(tmp_path_factory.mktemp("redis")) as started:
        yield started


_OPENED: list[PromptExchange] = []


@pytest.fixture(autouse=True)
def _emptied(server: RedisServer) -> Iterator[None]:
    with server.client() as client:
        client.flushall()
        yield
    while _OPENED:
        _OPENED.pop().store.backend.close()


def exchange(server: RedisServer, *, is_sealed: bool = False) -> PromptExchange:
    settings: dict[str, Any] = {}
    if is_sealed:
        settings["seal_key_file"] = str(server.folder / "seal")
        (server.folder / "seal").write_text("ab" * 32)
    _OPENED.append(PromptExchange(open_shared_tier(server.settings(**settings), form()).store))
    return _OPENED[-1]


def prompt(number: int, *, token: int = 5) -> SharedPrompt:
    """Its tokens tell nothing of the number of its one segment."""
    described, _ = segment(number)
    tokens = token_ids(np.full(described.num_tokens, token))
    pieces = PieceTable([Piece(described.segment_id, 0, described.num_tokens)])
    return SharedPrompt(NAMESPACE, tokens, pieces, (described,), OWNER)


def put(given: PromptExchange, number: int) -> None:
    described, _ = segment(number)
    given.store.put(given.store.segment_key(described), b"a segment")


def all_reported(given: PromptExchange) -> dict[str, bool]:
    """Names, and whether each is there; the last that was said of it."""
    found = {}
    while page := given.reported():
        found.update({each.name: each.prompt is not None for each in page})
    return found


@pytest.mark.parametrize("is_sealed", [False, True])
def test_who_was_away_hears_of_deletions(server: RedisServer, is_sealed: bool) -> None:
    """Unless the prompt is there again; also if there is no room for older prompts."""
    one = exchange(server, is_sealed=is_sealed)
    gone, again, there = prompt(1, token=5), prompt(2, token=6), prompt(3, token=7)
    names = [one.name_of(NAMESPACE, each.token_ids) for each in (gone, again, there)]
    for each in (gone, again, there):
        one.publish(each)
    one.revoke(names[:2])
    one.publish(again)
    assert all_reported(exchange(server, is_sealed=is_sealed)) == dict(
        zip(names, (False, True, True), strict=True)
    )
    without_room = exchange(server, is_sealed=is_sealed)
    without_room.stop_looking_back()
    assert all_reported(without_room) == {names[0]: False}


def test_a_record_whose_segments_have_ended_is_replaced(server: RedisServer) -> None:
    """And one that cannot be read; others are told. One that holds stays."""
    one, other = exchange(server), exchange(server)
    put(one, 1)
    assert one.publish(prompt(1))
    put(other, 2)
    assert not other.publish(prompt(2))
    client = server.client()
    client.delete(one.store.segment_key(segment(1)[0]))
    listening = exchange(server)
    all_reported(listening)
    assert other.publish(prompt(2))
    (reported,) = listening.reported()
    assert reported.prompt is not None
    assert reported.prompt.segments == (segment(2)[0],)
    client.set(reported.name, b"half a rec")
    assert one.publish(prompt(2))
    assert not other.publish(prompt(2))


def test_news_that_were_not_sealed_are_none(server: RedisServer) -> None:
    """With a key: neither a plain message, nor one that was sealed with the other sign."""
    one, other = exchange(server, is_sealed=True), exchange(server, is_sealed=True)
    one.publish(prompt(1))
    (name,) = all_reported(other)
    client, channel = server.client(), f"{one.store.prefix}:news"
    ((_, fields),) = client.xrange(channel)
    client.delete(name)
    client.xadd(channel, {b"m": b"-" + name.encode()})
    client.xadd(channel, {b"m": b"-" + fields[b"m"][1:]})
    client.xadd(channel, {b"m": b""})
    assert all_reported(other) == {}
    assert other.num_damaged == 3
    one.revoke([name])
    assert all_reported(other) == {name: False}


def test_what_has_a_record_is_not_deleted(server: RedisServer) -> None:
    one, other = exchange(server), exchange(server)
    one.publish(prompt(1))
    (name,) = all_reported(other)
    server.client().xadd(f"{one.store.prefix}:news", {b"m": b"-" + name.encode()})
    assert all_reported(other) == {}


def test_news_end_some_weeks_after_the_last(server: RedisServer) -> None:
    one = exchange(server)
    assert not one.has_lost()
    one.publish(prompt(1))
    for name in ("news", "epoch"):
        assert 7 * 86400 < server.client().ttl(f"{one.store.prefix}:{name}") <= 30 * 86400


def _changed(**given: object) -> bytes:
    """A record with other fields, and a right check."""
    line, _, rest = prompt(1).to_bytes()[16:].partition(b"\n")
    body = json.dumps({**json.loads(line), **given}).encode() + b"\n" + rest
    return xxhash.xxh3_128_digest(body) + body


@pytest.mark.parametrize(
    "given",
    [
        {"namespace": 5},
        {"namespace": "\ud800" * 64},
        {"namespace": "../x"},
        {"owner": {"tenant": 5, "scope": "tenant"}},
        {"owner": {"tenant": "\ud800", "scope": "tenant"}},
        {"owner": {"tenant": "t", "scope": "tenant", "is_divided": 1}},
        {"owner": []},
        {"num_tokens": "8"},
        {"segments": [[float("inf"), 0, 8, 0, 1, 1]]},
        {"segments": [1]},
    ],
)
def test_a_forged_record_is_none(given: dict[str, object]) -> None:
    assert SharedPrompt.from_bytes(_changed()).owner == OWNER
    with pytest.raises(RecordError):
        SharedPrompt.from_bytes(_changed(**given))


def test_a_deeply_nested_record_is_none(server: RedisServer, tmp_path: Path) -> None:
    body = b"[" * 200_000 + b"\n"
    one, other = exchange(server), exchange(server)
    one.publish(prompt(1))
    (name,) = all_reported(one)
    server.client().set(name, xxhash.xxh3_128_digest(body) + body)
    assert all_reported(other) == {}
    assert other.num_damaged == 1
