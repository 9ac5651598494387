"""Whose schema is compiled when: hostile ones of one key, and of many, delay no other key."""

import asyncio
import time

import pytest

from kvshare.errors import OverloadedError
from kvshare.grammar_pool.limits import COMPILE_S
from kvshare.grammar_pool.pool import GrammarPool
from kvshare.grammar_pool.turns import MAX_COMPILING, MAX_WAITING
from tests.kvshare.grammar_pool.schemas import (
    FINE,
    TAKES_LONG,
    cancelled,
    compiles,
)


async def test_a_key_with_eight_hostile_schemas_delays_no_other(pool: GrammarPool) -> None:
    """One is compiled, four wait, the others are refused at once; another key's is compiled meanwhile."""
    await compiles(pool, FINE)
    hostile = [asyncio.create_task(compiles(pool, {**TAKES_LONG, "title": str(i)})) for i in range(8)]
    await asyncio.sleep(0.2)
    refused = [task for task in hostile if task.done()]
    assert len(refused) == 8 - 1 - MAX_WAITING
    assert all(isinstance(task.exception(), OverloadedError) for task in refused)
    for key in ("bob", "cid"):
        await compiles(pool, FINE, key=key)
    assert sum(task.done() for task in hostile) == len(refused)
    await cancelled(hostile)


async def test_hostile_schemas_of_many_keys_delay_no_other(pool: GrammarPool) -> None:
    """Beyond what is compiled at a time, the one under way for longest gives way."""
    await compiles(pool, FINE)
    hostile = [asyncio.create_task(compiles(pool, TAKES_LONG, key=f"key {i}")) for i in range(MAX_COMPILING)]
    await asyncio.sleep(0.2)
    await compiles(pool, FINE, key="bob")
    done = [task for task in hostile if task.done()]
    assert len(done) == 1
    assert "other clients' schemas waited" in str(done[0].exception())
    await cancelled(hostile)


async def test_a_wait_for_other_keys_ends(pool: GrammarPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many of them compile."""
    monkeypatch.setattr("kvshare.grammar_pool.turns.MAX_COMPILING", 1)
    monkeypatch.setattr("kvshare.grammar_pool.turns._SHARE_S", 60.0)
    compiling = asyncio.create_task(compiles(pool, TAKES_LONG))
    await asyncio.sleep(0.2)
    monkeypatch.setattr("kvshare.grammar_pool.pool.ANSWER_S", 0.2)
    async with asyncio.timeout(60):
        with pytest.raises(OverloadedError, match="other keys"):
            await compiles(pool, FINE, key="bob")
    await cancelled([compiling])


async def test_the_prompts_of_one_request_wait_together(pool: GrammarPool) -> None:
    """Equal grammars count once, so that a list of prompts with one schema is not refused."""
    await asyncio.gather(*(compiles(pool, FINE) for _ in range(3 * MAX_WAITING)))


async def test_a_client_that_leaves_frees_the_turn_of_its_key(pool: GrammarPool) -> None:
    """The process that compiles is ended at once."""
    await compiles(pool, FINE)
    leaving = asyncio.create_task(compiles(pool, TAKES_LONG))
    await asyncio.sleep(0.2)
    await cancelled([leaving])
    began = time.monotonic()
    await compiles(pool, FINE)
    assert time.monotonic() - began < COMPILE_S - 1  # its turn would have ended later
