"""The pool, real compilers and hostile schemas: each costs its own request, and no other key waits for it."""

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import pytest_asyncio

from kvshare.demo import MODEL_PATH
from kvshare.errors import EngineError, OverloadedError, ShuttingDownError, UnsupportedFormatError
from kvshare.grammar_pool.frames import Frame, Kind
from kvshare.grammar_pool.limits import COMPILE_S, MEMORY_BYTES
from kvshare.grammar_pool.matcher import RemoteMatcher
from kvshare.grammar_pool.pool import MAX_COMPILING, MAX_WAITING, GrammarPool

CRASHES = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 3}
TAKES_LONG = {"type": "integer", "multipleOf": 2**31}
TAKES_MEMORY = {"type": "array", "minItems": 2**40, "items": {"enum": [1]}}
FINE = {"enum": [1]}
TOKENIZER = (MODEL_PATH / "tokenizer.json").read_text(encoding="utf-8")


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[GrammarPool]:
    opened = GrammarPool(
        lambda: {"kind": "llguidance", "tokenizer": TOKENIZER, "vocab_size": 1536, "eos_token_ids": [2]}
    )
    yield opened
    opened.close()


async def compiles(pool: GrammarPool, schema: object, *, key: str = "ann") -> None:
    matcher, mask = await pool.compiled(lark(schema), key=key, param="tools")
    matcher.close()
    assert mask


def lark(schema: object) -> dict[str, str]:
    return {"lark": f"start: json\njson: %json {json.dumps(schema)}"}


async def reply(matcher: RemoteMatcher, choice: int = 0) -> Frame:
    for _ in range(5000):
        if (frame := matcher.poll(choice, wait_s=0.0)) is not None:
            return frame
        await asyncio.sleep(0.001)
    pytest.fail("no reply")


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


async def test_what_takes_long_is_refused_in_ten_seconds(pool: GrammarPool) -> None:
    """The process ends with it, as its limit is its own: nobody computes on."""
    began = time.monotonic()
    with pytest.raises(UnsupportedFormatError, match=f"more than ({COMPILE_S:g} s|512 MiB)"):
        await compiles(pool, TAKES_LONG)
    assert time.monotonic() - began < 10


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
    monkeypatch.setattr("kvshare.grammar_pool.pool.MAX_COMPILING", 1)
    monkeypatch.setattr("kvshare.grammar_pool.pool._SHARE_S", 60.0)
    compiling = asyncio.create_task(compiles(pool, TAKES_LONG))
    await asyncio.sleep(0.2)
    monkeypatch.setattr("kvshare.grammar_pool.pool.ANSWER_S", 0.2)
    async with asyncio.timeout(2):
        with pytest.raises(OverloadedError, match="other keys"):
            await compiles(pool, FINE, key="bob")
    await cancelled([compiling])


async def test_the_prompts_of_one_request_wait_together(pool: GrammarPool) -> None:
    """Equal grammars count once, so that a list of prompts with one schema is not refused."""
    await asyncio.gather(*(compiles(pool, FINE) for _ in range(3 * MAX_WAITING)))


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


async def test_a_client_that_leaves_frees_the_turn_of_its_key(pool: GrammarPool) -> None:
    """The process that compiles is ended at once."""
    await compiles(pool, FINE)
    leaving = asyncio.create_task(compiles(pool, TAKES_LONG))
    await asyncio.sleep(0.2)
    await cancelled([leaving])
    began = time.monotonic()
    await compiles(pool, FINE)
    assert time.monotonic() - began < COMPILE_S / 2


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
    choices, wait_s = range(8), 0.1
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


async def test_closing_ends_the_process(pool: GrammarPool) -> None:
    """None is left when its answer is over."""
    matcher, _ = await pool.compiled(lark(FINE), key="ann", param="tools")
    pid = matcher.pid
    assert pid is not None
    matcher.close()
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the process still runs")


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


def test_a_worker_imports_no_large_library() -> None:
    """A process for each grammar must be small."""
    code = "import sys, kvshare.grammar_pool.worker, llguidance; print([*sys.modules])"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "transformers", "aiohttp"} & set(modules.replace("'", "").strip("[]\n").split(", "))


@pytest.mark.parametrize(
    ("work", "status"),
    [
        ("while True: pass", -signal.SIGPROF),
        ("time.sleep(0.5)", 0),
        ("compute(0.15); worker._limit_cpu(0.2); compute(0.15)", 0),
    ],
)
def test_a_mask_is_limited_by_what_it_computes(work: str, status: int) -> None:
    """
    Not by how long it takes: a process that a busy machine lets wait breaks no answer off. Nor by what
    earlier masks have taken.
    """
    code = """
import time, kvshare.grammar_pool.worker as worker
def compute(seconds):
    until = time.process_time() + seconds
    while time.process_time() < until: pass
worker._limit_cpu(0.2)
"""
    assert subprocess.run([sys.executable, "-c", code + work], check=False).returncode == status


async def cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    with suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks, return_exceptions=True)


TOKEN_OF_QUOTE = json.loads(TOKENIZER)["model"]["vocab"]['"']
