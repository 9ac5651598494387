"""Embedded engines that share a real Redis: each finds the others' KV, and none needs the store."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delta_tree import TokenIds, token_ids
from kvshare.admin import Evict
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.requests import SharingMode
from tests.kvshare.embedded.sharing_engines import NO_DISK, OWN_DISK, WAIT_S, asked, running, until_known
from tests.kvshare.embedded.tiny_engine import prompt, stored
from tests.redis_server import RedisServer, needs_redis, redis_at

pytestmark = needs_redis
DONOR = prompt(300)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_at(folder) as started:
        yield started


def edited() -> TokenIds:
    tokens = np.array(DONOR)
    tokens[120:124] = 17
    return token_ids(tokens)


def tier(engine: EmbeddedEngine, name: str) -> Any:
    return next(each for each in engine.status().tiers if each.name == name)


@pytest.mark.parametrize("disk", [OWN_DISK, NO_DISK])
async def test_a_server_that_joins_finds_what_others_have(
    tmp_path: Path, server: RedisServer, disk: int | None
) -> None:
    """The same text and the same tokens reused as by the server that computed it; the first one has ended."""
    async with running(tmp_path / "a", server, disk=disk) as first:
        await stored(first, DONOR)
        await until_known(first, 1)
        before = [await asked(first, tokens) for tokens in (DONOR, edited())]
        full = await asked(first, edited(), SharingMode.OFF)
    async with running(tmp_path / "b", server, disk=disk) as second:
        await until_known(second, 1)
        assert tier(second, "shared").num_segments >= 1
        after = [await asked(second, tokens) for tokens in (edited(), DONOR)][::-1]
        assert tier(second, "shared").num_hits >= 1
        other = await asked(second, DONOR, tenant="another")
    for one, two in zip(before, after, strict=True):
        assert one.text == two.text
        assert one.report.num_cached == two.report.num_cached > 200
    assert full.text
    assert other.report.num_cached == 0


async def test_servers_find_each_others_new_prompts(tmp_path: Path, server: RedisServer) -> None:
    """While both run, in both directions, and a chat goes on at the other server."""
    longer = token_ids(np.concatenate([DONOR, prompt(60, seed=1)]))
    async with running(tmp_path / "a", server) as one, running(tmp_path / "b", server) as two:
        await stored(one, DONOR)
        await until_known(two, 1)
        answer = await stored(two, longer)
        assert answer.report.num_exact >= 299
        await until_known(one, 2)
        assert (await asked(one, longer)).report.num_exact == len(longer) - 1


async def test_other_weights_and_another_key_find_nothing(tmp_path: Path, server: RedisServer) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    given: dict[str, Any] = {"shared_tier.seal_key_file": str(key)}
    async with running(tmp_path / "a", server) as first:
        await stored(first, DONOR)
        await until_known(first, 1)
        async with (
            running(tmp_path / "b", server, seed=1) as other,
            running(tmp_path / "c", server, **given) as sealed,
            running(tmp_path / "d", server) as same,
        ):
            await until_known(same, 1)
            await asyncio.sleep(2)  # so long others look, too
            assert other.status().num_nodes == sealed.status().num_nodes == 0


async def test_servers_with_the_same_key_share(tmp_path: Path, server: RedisServer) -> None:
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    given: dict[str, Any] = {"shared_tier.seal_key_file": str(key)}
    async with (
        running(tmp_path / "a", server, **given) as one,
        running(tmp_path / "b", server, **given) as two,
    ):
        await stored(one, DONOR)
        await until_known(two, 1)
        assert (await asked(two, DONOR)).report.num_exact == len(DONOR) - 1


async def test_what_an_administrator_deletes_is_deleted_everywhere(
    tmp_path: Path, server: RedisServer
) -> None:
    """In the store, in the servers that run, and for those that join."""
    async with running(tmp_path / "a", server) as one, running(tmp_path / "b", server) as two:
        await stored(one, DONOR)
        await until_known(two, 1)
        await two.execute(Evict(all=True, dry_run=False))
        await until_known(one, 0)
        async with running(tmp_path / "c", server) as third:
            await asyncio.sleep(2)
            assert third.status().num_nodes == 0
    assert not server.client().keys("kvshare1:*:[op]:*")


@pytest.mark.parametrize("disk", [OWN_DISK, NO_DISK])
async def test_a_store_that_dies_harms_nobody(tmp_path: Path, server: RedisServer, disk: int | None) -> None:
    """Requests are answered as without it; another that begins empty is used from then on."""
    async with (
        running(tmp_path / "a", server, disk=disk) as one,
        running(tmp_path / "b", server, disk=disk) as two,
    ):
        await stored(one, DONOR)
        await until_known(two, 1)
        right = await asked(one, edited(), SharingMode.OFF)
        server.kill()
        answer = await asked(two, edited())  # its KV was in the store only
        assert (answer.text, answer.report.num_cached) == (right.text, 0)
        assert (await asked(one, DONOR)).report.num_exact == len(DONOR) - 1
        await stored(one, prompt(200, seed=5))
        again = server.again()
        try:
            async with asyncio.timeout(WAIT_S):
                while not again.client().keys("kvshare1:*:p:*"):
                    await stored(one, prompt(200, seed=int(asyncio.get_running_loop().time())))
                    await asyncio.sleep(0.5)
            assert (await asked(two, DONOR)).text == (await asked(one, DONOR)).text
        finally:
            again.kill()


async def test_a_start_without_the_store_is_a_start(
    tmp_path: Path, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.kill()
    async with running(tmp_path / "a", server) as engine:
        await stored(engine, DONOR)
        assert (await asked(engine, DONOR)).report.num_exact == len(DONOR) - 1
        async with asyncio.timeout(WAIT_S):
            while "the shared store is not used: it cannot be reached" not in caplog.text:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert tier(engine, "shared").problem


async def test_a_segment_that_the_store_lost_is_computed_again(tmp_path: Path, server: RedisServer) -> None:
    async with running(tmp_path / "a", server) as one:
        await stored(one, DONOR)
        await until_known(one, 1)
        right = (await asked(one, DONOR, SharingMode.OFF)).text
    async with running(tmp_path / "b", server, disk=NO_DISK) as two:
        await until_known(two, 1)
        client = server.client()
        client.delete(*client.keys("kvshare1:*:o:*"))
        assert (await asked(two, DONOR)).text == right
        await two.settle()
        assert two.status().num_nodes == 0  # nothing is left that cannot be read
        await stored(two, DONOR)
        assert (await asked(two, DONOR)).report.num_exact == len(DONOR) - 1


async def test_a_server_killed_while_it_writes_harms_nobody(tmp_path: Path, server: RedisServer) -> None:
    """Segments without a record, and half of a record: nobody is informed of them, or believes it."""
    async with running(tmp_path / "a", server) as one:
        await stored(one, DONOR)
        await until_known(one, 1)
    client = server.client()
    (name,) = client.keys("kvshare1:*:p:*")
    client.set(name, client.get(name)[:-5])
    async with running(tmp_path / "b", server) as two:
        await asyncio.sleep(2)
        assert two.status().num_nodes == 0
        await stored(two, DONOR)
        assert (await asked(two, DONOR)).report.num_exact == len(DONOR) - 1
