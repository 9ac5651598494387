"""The process that reads the tokenizer: it starts late, dies, and is replaced."""

import asyncio
import gc
import signal
import sys
import time

import pytest

from kvshare.errors import EngineError, OverloadedError, ShuttingDownError, UnsupportedFormatError
from kvshare.grammar_pool.frames import Kind
from kvshare.grammar_pool.pool import GrammarPool
from tests.kvshare.grammar_pool.schemas import (
    FINE,
    TOKEN_OF_QUOTE,
    cancelled,
    compiles,
    lark,
    reply,
)


async def test_a_dead_first_process_is_replaced(pool: GrammarPool) -> None:
    """The next schema compiles; what runs in other processes goes on."""
    running, _ = await pool.compiled(lark({"type": "string"}), key="ann", param="tools")
    template = pool._spawned
    assert template is not None
    template._process.kill()
    template._process.wait()
    await compiles(pool, FINE)
    running.take(0, TOKEN_OF_QUOTE)
    assert (await reply(running)).kind is Kind.TAKEN
    running.close()


async def test_a_first_process_that_ends_before_it_forks_is_replaced(pool: GrammarPool) -> None:
    """The schema is not blamed for it: it compiles in the next one."""
    await compiles(pool, FINE)
    template = pool._spawned
    assert template is not None
    template._process.send_signal(signal.SIGSTOP)  # it takes the request, and does nothing
    waiting = asyncio.create_task(compiles(pool, FINE))
    await asyncio.sleep(0.1)
    template._process.kill()
    await waiting


async def test_faults_of_the_server_are_not_the_schemas(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first process that starts slowly, or not at all, or that is being stopped."""

    def slowly() -> dict[str, str]:
        time.sleep(0.5)
        return {}

    slow = GrammarPool(slowly)
    monkeypatch.setattr("kvshare.grammar_pool.pool.ANSWER_S", 0.1)
    with pytest.raises(OverloadedError, match="still starts"):
        await compiles(slow, FINE)
    slow.close()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match="does not start"):
        await compiles(pool, FINE)
    pool.close()
    with pytest.raises(ShuttingDownError):
        await compiles(pool, FINE)


async def test_closing_while_the_first_process_starts_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """As the client that waited for it has left."""

    def slowly() -> dict[str, str]:
        time.sleep(0.3)
        return {"kind": "llguidance", "tokenizer": "{}"}

    pool = GrammarPool(slowly)
    waiting = asyncio.create_task(pool.compiled(lark(FINE), key="ann", param="tools"))
    await asyncio.sleep(0.1)
    await cancelled([waiting])
    pool.close()
    starting, pool._starting = pool._starting, None
    assert starting is not None
    await asyncio.wait([starting])
    del starting, waiting
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_an_unreadable_tokenizer_is_said() -> None:
    """By the error of the request that would need it; the pool can be closed."""
    pool = GrammarPool(
        lambda: {"kind": "llguidance", "tokenizer": "{}", "vocab_size": 5, "eos_token_ids": [2]}
    )
    with pytest.raises(UnsupportedFormatError, match="with this model's tokenizer"):
        await pool.compiled(lark(FINE), key="ann", param="tools")
    pool.close()
