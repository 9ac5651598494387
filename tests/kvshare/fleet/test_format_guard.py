"""Formats that would end a vLLM: compiled here first, once, and all of a request together."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import pytest_asyncio

from kvshare.errors import UnsupportedFormatError
from kvshare.fleet import format_guard
from kvshare.fleet.format_guard import AnswerFormat, FormatGuard
from kvshare.fleet.replica import Fleet, Replica
from kvshare.grammar_pool.pool import GrammarPool
from tests.kvshare.fleet.real_control import info_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
# In vLLM llguidance compiles them together, as xgrammar has no `multipleOf`, and that ends the process.
ENDS = {"a": {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 3}}
OTHER = {"b": {"type": "integer", "multipleOf": 3}}
WITHOUT_END = {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#"}, "minItems": 1}}}


def schema(properties: object, param: str = "tools.0") -> AnswerFormat:
    return AnswerFormat("json", json.dumps({"type": "object", "properties": properties}), param)


def fleet_of(*backends: str | None) -> Fleet:
    """Replicas with these compilers; None: it has not said."""
    replicas = [Replica(str(number), vllm=None, control=None) for number in range(len(backends))]  # type: ignore[arg-type]
    for replica, backend in zip(replicas, backends, strict=True):
        replica.info = info_of(settings={} if backend is None else {"structured_outputs_backend": backend})
    return Fleet(replicas)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[GrammarPool]:
    """The processes that compile, for all tests: the first one takes a second to start."""
    pool = GrammarPool(lambda: {"kind": "vllm"})
    yield pool
    pool.close()


@pytest.fixture
def guard(pool: GrammarPool) -> FormatGuard:
    guard = FormatGuard(fleet_of(None))
    guard._pool.close()
    guard._pool = pool
    return guard


async def test_what_has_compiled_once_is_not_compiled_again(
    guard: FormatGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of the tools, whoever asks, and wherever in the request they are."""
    one, two = schema({"a": {"type": "string"}}), schema({"b": {"type": "string"}})
    await guard.check([one, two], key="k")
    monkeypatch.setattr(guard, "_pool", None)  # no process is left to ask
    await guard.check([two, one], key="other")
    await guard.check([AnswerFormat(two.kind, two.text, "elsewhere"), one, one], key="k")


async def test_what_ends_the_compiler_is_refused_together_and_not_alone(guard: FormatGuard) -> None:
    """With the place of the first; the next request is served."""
    await guard.check([schema(ENDS)], key="k")
    await guard.check([schema(OTHER)], key="k")
    with pytest.raises(UnsupportedFormatError, match="its compiler failed") as error:
        await guard.check([schema({**ENDS, **OTHER}, "response_format")], key="k")
    assert error.value.param == "response_format"
    await guard.check([AnswerFormat("regex", "[a-z]+", "guided_regex")], key="k")


@pytest.mark.parametrize("text", ["[", "(?P<n"])
async def test_what_a_compiler_refuses_is_left_for_vllm_to_say(guard: FormatGuard, text: str) -> None:
    """It neither ends nor occupies it, and vLLM's words for it are better."""
    await guard.check([AnswerFormat("regex", text, "guided_regex")], key="k")


@pytest.mark.parametrize(
    ("formats", "reason", "param"),
    [
        ([schema({}), AnswerFormat("json", json.dumps(WITHOUT_END), "tools.1")], "without end", "tools.1"),
        (
            [AnswerFormat("regex", "a" * (2**20 + 1), "r")],
            "have 1048577 characters, expected at most 1048576",
            "r",
        ),
        (
            [AnswerFormat("regex", "a" * 2**19, "r"), AnswerFormat("regex", "b" * 2**20, "s")],
            "characters",
            "r",
        ),
    ],
)
async def test_what_can_be_seen_is_refused_without_a_process(
    guard: FormatGuard, formats: list[AnswerFormat], reason: str, param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema without a finite answer, and texts that are too long, all together."""
    monkeypatch.setattr(guard, "_pool", None)
    with pytest.raises(UnsupportedFormatError, match=reason) as error:
        await guard.check(formats, key="k")
    assert error.value.param == param


async def test_another_compiler_over_there_is_another_question(guard: FormatGuard) -> None:
    """What has compiled for one may end another."""
    await guard.check([schema({})], key="k")
    guard._fleet = fleet_of("guidance", None)
    await guard.check([schema({})], key="k")
    guard._fleet = fleet_of(None, "guidance")
    await guard.check([schema({})], key="k")
    assert len(guard._passed) == 2
    guard._fleet = fleet_of()  # none is connected: as one that does not say
    await guard.check([schema({})], key="k")
    assert len(guard._passed) == 2


async def test_only_so_many_are_remembered(guard: FormatGuard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were asked for last."""
    monkeypatch.setattr(format_guard, "_MAX_REMEMBERED", 2)
    formats = [AnswerFormat("choice", json.dumps([str(number)]), "c") for number in range(3)]
    for number in (0, 1, 0, 2):
        await guard.check([formats[number]], key="k")
    monkeypatch.setattr(guard, "_pool", None)
    for number in (0, 2):
        await guard.check([formats[number]], key="k")
    assert len(guard._passed) == 2


@pytest.mark.parametrize("installed", [True, False])
async def test_a_server_without_xgrammar_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, installed: bool
) -> None:
    """When it starts."""
    module = ModuleType("xgrammar")
    module.__spec__ = ModuleSpec("xgrammar", None)
    monkeypatch.setitem(sys.modules, "xgrammar", module if installed else None)  # None: it is not found
    FormatGuard(fleet_of()).close()
    assert caplog.text.count("tried with llguidance only") == (not installed)
