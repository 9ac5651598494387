"""The pool, real compilers and hostile schemas: each costs its own request, and no other key waits for it."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from kvshare.errors import OverloadedError, UnsupportedFormatError
from kvshare.grammar_pool.frames import Kind
from kvshare.grammar_pool.limits import MEMORY_BYTES
from kvshare.grammar_pool.pool import GrammarPool
from tests.kvshare.grammar_pool.schemas import (
    BEYOND_A_LIMIT,
    CRASHES,
    FINE,
    TAKES_LONG,
    TAKES_MEMORY,
    TOKEN_OF_QUOTE,
    compiles,
    lark,
    reply,
)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (CRASHES, f"its compiler failed, or needed more than {MEMORY_BYTES // 2**20} MiB"),
        ({"const": -(2**63)}, "its compiler failed"),
        (TAKES_MEMORY, "needed more than|took more than"),  # a busy machine is slow
    ],
)
async def test_what_ends_its_compiler_is_refused(pool: GrammarPool, schema: object, said: str) -> None:
    """The next schema compiles, and this process has not grown."""
    await compiles(pool, FINE)
    before = resident_bytes()
    with pytest.raises(UnsupportedFormatError, match=said) as refusal:
        await compiles(pool, schema)
    assert refusal.value.param == "tools"
    assert resident_bytes() - before < 50 * 2**20
    await compiles(pool, FINE)


async def test_what_takes_long_is_refused(pool: GrammarPool) -> None:
    """The process ends with it, as its limit is its own: nobody computes on."""
    async with asyncio.timeout(60):
        with pytest.raises(UnsupportedFormatError, match=BEYOND_A_LIMIT):
            await compiles(pool, TAKES_LONG)


async def test_what_the_answers_of_a_key_hold_is_limited(
    pool: GrammarPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one key, whatever it is; what its answers held is free when they end."""
    monkeypatch.setattr("kvshare.grammar_pool.held_memory.HELD_BYTES", 12 * 2**20)
    holds_memory = lark({"type": "array", "minItems": 200_000, "items": FINE})  # about 25 MiB
    first, _ = await pool.compiled(holds_memory, key="ann", param="tools")
    with pytest.raises(OverloadedError, match="12 MiB"):
        await pool.compiled(holds_memory, key="ann", param="tools")
    other, _ = await pool.compiled(holds_memory, key="bob", param="tools")
    first.close()
    first.close()
    again, _ = await pool.compiled(holds_memory, key="ann", param="tools")
    again.close()
    other.close()
    assert not pool._held._bytes


async def test_an_answer_whose_process_ends_is_broken_off(pool: GrammarPool) -> None:
    """With the reason; another answer goes on."""
    schema = lark({"type": "string"})
    broken, _ = await pool.compiled(schema, key="ann", param="response_format")
    other, _ = await pool.compiled(schema, key="bob", param="response_format")
    quote = TOKEN_OF_QUOTE
    assert broken.pid is not None
    os.kill(broken.pid, signal.SIGKILL)
    broken.take(0, quote)
    with pytest.raises(UnsupportedFormatError, match="too much time or memory"):
        await reply(broken)
    other.take(0, quote)
    assert (await reply(other)).kind is Kind.TAKEN
    assert (await reply(other)).kind is Kind.MASK
    broken.close()
    other.close()


async def test_a_slow_process_holds_its_caller_up_once(pool: GrammarPool) -> None:
    """Not once for each choice: other requests have their turn after that."""
    matcher, _ = await pool.compiled(lark({"type": "string"}), key="ann", param="tools")
    assert matcher.pid is not None
    os.kill(matcher.pid, signal.SIGSTOP)
    choices, wait_s = range(8), 1.0
    for choice in choices:
        matcher.take(choice, TOKEN_OF_QUOTE)
    began = time.monotonic()
    assert [matcher.poll(choice, wait_s=wait_s) for choice in choices] == [None] * len(choices)
    assert time.monotonic() - began < wait_s * len(choices) / 2
    os.kill(matcher.pid, signal.SIGCONT)
    assert (await reply(matcher, 7)).kind is Kind.TAKEN
    matcher.close()


async def test_a_look_without_waiting_takes_no_wait_away(pool: GrammarPool) -> None:
    """The next poll waits for the reply, although the one before has found none."""
    matcher, _ = await pool.compiled(lark({"type": "string"}), key="ann", param="tools")
    assert matcher.pid is not None
    os.kill(matcher.pid, signal.SIGSTOP)
    matcher.take(0, TOKEN_OF_QUOTE)
    assert matcher.poll(0, wait_s=0.0) is None
    asyncio.get_running_loop().run_in_executor(None, continue_soon, matcher.pid)
    frame = matcher.poll(0, wait_s=30.0)
    assert frame is not None
    assert frame.kind is Kind.TAKEN
    matcher.close()


def continue_soon(pid: int) -> None:
    time.sleep(0.1)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has this policy")
async def test_what_follows_an_answer_takes_no_processor_from_the_model(pool: GrammarPool) -> None:
    """The thread that sends a token is not interrupted for the reply."""
    matcher, _ = await pool.compiled(lark(FINE), key="ann", param="tools")
    assert matcher.pid is not None
    assert os.sched_getscheduler(matcher.pid) == os.SCHED_BATCH
    matcher.close()


async def test_closing_ends_the_process(pool: GrammarPool) -> None:
    """None is left when its answer is over."""
    matcher, _ = await pool.compiled(lark(FINE), key="ann", param="tools")
    pid = matcher.pid
    assert pid is not None
    matcher.close()
    for _ in range(6000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the process still runs")


def test_a_worker_imports_no_large_library() -> None:
    """A process for each grammar must be small."""
    code = "import sys, kvshare.grammar_pool.worker, llguidance; print([*sys.modules])"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "transformers", "aiohttp"} & set(modules.replace("'", "").strip("[]\n").split(", "))


@pytest.mark.parametrize(
    ("work", "status"),
    [
        ("while True: pass", -signal.SIGPROF),
        ("time.sleep(1.5)", 0),
        ("compute(0.6); worker._limit_cpu(1.0); compute(0.6)", 0),
    ],
)
def test_a_mask_is_limited_by_what_it_computes(work: str, status: int) -> None:
    """
    Not by how long it takes: a process that a busy machine lets wait breaks no answer off. Nor by what
    earlier masks have taken. The system counts in ticks, on a busy machine roughly.
    """
    code = """
import time, kvshare.grammar_pool.worker as worker
def compute(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until: pass
worker._limit_cpu(1.0)
"""
    assert subprocess.run([sys.executable, "-c", code + work], check=False).returncode == status
