"""What the log says of exceptions: never their messages, which may quote a prompt."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from delta_tree import DeltaTree, Span, token_ids
from kvshare.background import Background
from kvshare.embedded.scheduler import Scheduler
from kvshare.reasons import Reason
from kvshare.replay.policies.weightless import UNLIMITED, WeightlessKV, WeightlessSequence, WeightlessTier
from kvshare.safe_logging import Discreet, JsonLines, class_and_place, classes_and_places
from kvshare.sharing.memory_keeper import Computed, MemoryKeeper
from kvshare.sharing.plan import NoPlan
from proxy.request_log import log_failure


def fail() -> None:
    """Raise an error with a cause; both quote a prompt."""
    try:
        raise OSError("SECRET")
    except OSError as exc:
        raise ValueError("SECRET") from exc


def failure() -> Exception:
    try:
        fail()
    except ValueError as exc:
        return exc
    raise AssertionError


def test_an_exception_is_logged_by_class_and_place() -> None:
    """So is each of its causes; what they say stays out."""
    text = class_and_place(failure())
    assert text.startswith("ValueError at test_safe_logging.py:")
    assert ", caused by OSError at test_safe_logging.py:" in text
    assert "SECRET" not in text


def test_an_exception_that_was_not_raised_has_no_place() -> None:
    """Its class is all there is to say."""
    assert class_and_place(ValueError("SECRET")) == classes_and_places(ValueError("SECRET")) == "ValueError"


def check(text: str) -> None:
    """The class and the places of `failure` are told, its message is not."""
    assert "ValueError\n" in text
    assert "caused by OSError\n" in text
    assert "in fail\n" in text
    assert ": SECRET" not in text


def test_the_places_are_those_of_a_traceback() -> None:
    """Each exception of the chain has its own."""
    check(classes_and_places(failure()))


@pytest.mark.parametrize("formatter", [Discreet(), JsonLines()])
def test_what_libraries_log_is_told_the_same_way(formatter: logging.Formatter) -> None:
    """asyncio logs what a task raised that nobody awaited, with its exception."""
    exc = failure()
    record = logging.LogRecord("asyncio", logging.ERROR, "", 0, "never retrieved", (), None)
    record.exc_info = (type(exc), exc, exc.__traceback__)
    line = formatter.format(record)
    check(json.loads(line)["traceback"] if line.startswith("{") else line)


def test_a_request_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The proxy says which one."""
    log_failure("request-7", failure())
    assert "request request-7 failed" in caplog.text
    check(caplog.text)


async def test_work_after_an_answer_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody awaits its result."""
    background = Background()
    background.spawn(asyncio.to_thread(fail))
    await background.settle()
    await asyncio.sleep(0)
    check(caplog.text)


def test_a_computation_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """The worker goes on with the other requests."""
    released: SimpleQueue[object] = SimpleQueue()
    scheduler = Scheduler(chunk_tokens=8, on_release=lambda _, error: released.put(error))
    failing, working = (Mock(cancelled=False, prefilled=False, is_pending=False, tenant="") for _ in range(2))
    failing.advance.side_effect = lambda **_: fail()
    working.advance.side_effect = [True, False]
    scheduler.submit(failing)
    scheduler.submit(working)
    assert type(released.get(timeout=60)) is ValueError
    assert released.get(timeout=60) is None
    scheduler.stop()
    check(caplog.text)


class Panic(BaseException):
    """As pyo3 raises it where Rust code panics."""


def test_a_computation_whose_library_panics() -> None:
    """Its request ends: a client would wait for ever otherwise."""
    released: SimpleQueue[object] = SimpleQueue()
    scheduler = Scheduler(chunk_tokens=8, on_release=lambda _, error: released.put(error))
    panicking = Mock(cancelled=False, prefilled=False, tenant="")
    panicking.advance.side_effect = Panic
    scheduler.submit(panicking)
    assert type(released.get(timeout=10)) is Panic
    scheduler.stop()


class TornSequence(WeightlessSequence):
    """KV that cannot be cut."""

    def cut(self, span: Span) -> WeightlessKV:
        raise failure()


def test_a_prompt_that_cannot_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    """It is counted, and nothing is stored."""
    keeper: MemoryKeeper[WeightlessKV] = MemoryKeeper(
        DeltaTree.open(None, identity=None), WeightlessTier(UNLIMITED), min_tokens=1
    )
    tokens = token_ids(np.arange(50))
    assert keeper.store(Computed("ns", tokens, NoPlan(Reason.OFF), TornSequence(1))) is None
    check(caplog.text)


def test_an_error_of_the_connector(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM goes on as if the connector were not there."""
    connector: Any = pytest.importorskip("kvshare.vllm_connector.connector")
    with connector._contained():
        fail()
    assert "a request is served unshared" in caplog.text or not logging.getLogger("vllm").propagate
    assert ": SECRET" not in caplog.text
    assert sys.exception() is None
