"""Embedded engines over a real Redis: what is deleted is deleted everywhere, and no fault ends sharing."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from delta_tree import MetadataStoreError, NodeId
from kvshare.admin import Evict
from kvshare.sharing.memory_keeper import MemoryKeeper
from kvshare.tiers.shared_prompts import PromptExchange, SharedPrompt
from tests.kvshare.embedded.sharing_engines import NO_DISK, WAIT_S, asked, running, until_known
from tests.kvshare.embedded.tiny_engine import prompt, stored
from tests.redis_server import RedisServer, needs_redis, redis_at

pytestmark = needs_redis
DONOR = prompt(300)
EVERYTHING = Evict(all=True, dry_run=False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_at(folder) as started:
        yield started


async def until_empty(server: RedisServer) -> None:
    """Until no segment and no record is there."""
    async with asyncio.timeout(WAIT_S):
        while server.client().keys("kvshare1:*:[op]:*"):  # noqa: ASYNC110  there is no event
            await asyncio.sleep(0.1)


async def test_a_server_that_was_down_deletes_what_was_deleted(tmp_path: Path, server: RedisServer) -> None:
    """What it has on disk, too."""
    async with running(tmp_path / "a", server) as one:
        await stored(one, DONOR)
        await until_known(one, 1)
    async with running(tmp_path / "b", server) as two:
        await until_known(two, 1)
        await two.execute(EVERYTHING)
    assert not server.client().keys("kvshare1:*:[op]:*")  # a stop waits for that
    async with running(tmp_path / "a", server) as one:
        await until_known(one, 0)


async def test_each_servers_own_copy_is_deleted(tmp_path: Path, server: RedisServer) -> None:
    """Of a prompt that two have computed at the same time."""
    async with running(tmp_path / "a", server) as one, running(tmp_path / "b", server) as two:
        await asyncio.gather(stored(one, DONOR), stored(two, DONOR))
        await until_known(one, 1)
        await until_known(two, 1)
        await two.execute(EVERYTHING)
        await until_known(one, 0)
        await until_empty(server)


async def test_what_is_deleted_while_it_is_reported_is_not_left(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = PromptExchange.publish
    async with running(tmp_path / "a", server) as one:

        def deleted_first(exchange: PromptExchange, prompt: SharedPrompt) -> bool:
            one.server.runtime.keeper.execute(EVERYTHING)
            is_new = publish(exchange, prompt)
            published.append(prompt)
            return is_new

        published: list[SharedPrompt] = []
        monkeypatch.setattr(PromptExchange, "publish", deleted_first)
        await stored(one, DONOR)
        async with asyncio.timeout(WAIT_S):
            while not published:  # noqa: ASYNC110  there is no event
                await asyncio.sleep(0.05)
        await until_empty(server)


async def test_faults_do_not_end_the_exchange(
    tmp_path: Path, server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that nobody has thought of; and a disk that is full while a prompt is to be deleted."""
    revoke, has_lost, faults = MemoryKeeper.revoke, PromptExchange.has_lost, [0, 0]

    def full_at_first(keeper: MemoryKeeper[Any], node_id: NodeId) -> None:
        faults[0] += 1
        if faults[0] <= 2:
            raise MetadataStoreError(tmp_path, "the disk is full")
        revoke(keeper, node_id)

    def wrong_at_first(exchange: PromptExchange) -> bool:
        faults[1] += 1
        if faults[1] <= 2:
            raise ZeroDivisionError
        return has_lost(exchange)

    monkeypatch.setattr(MemoryKeeper, "revoke", full_at_first)
    monkeypatch.setattr(PromptExchange, "has_lost", wrong_at_first)
    async with running(tmp_path / "a", server) as one, running(tmp_path / "b", server) as two:
        await stored(one, DONOR)
        await until_known(two, 1)
        await two.execute(EVERYTHING)
        await until_known(one, 0)
    assert faults[0] == 3
    assert caplog.text.count("what another server deleted stays for now") == 1
    assert "prompts are not exchanged" in caplog.text


async def test_a_store_that_lost_all_is_filled_from_memory(tmp_path: Path, server: RedisServer) -> None:
    """By a server without a disk: no prompt of its own needs to be computed again for others."""
    async with running(tmp_path / "a", server, disk=NO_DISK) as one:
        await stored(one, DONOR)
        await until_known(one, 1)
        server.client().flushall()
        async with asyncio.timeout(WAIT_S):
            while not server.client().keys("kvshare1:*:p:*"):  # noqa: ASYNC110  there is no event
                await asyncio.sleep(0.1)
        async with running(tmp_path / "b", server, disk=NO_DISK) as two:
            await until_known(two, 1)
            assert (await asked(two, DONOR)).report.num_exact == len(DONOR) - 1
