"""The part of the self-test that copies, made to fail: what a GPU does wrong is noticed before requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import Span
from tests.kvshare.vllm_connector.worker.copy_case import BLOCKS, new_cache, new_store, pretended
from tests.kvshare.vllm_connector.worker.small_worker import one_rank

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.device import Device

Call = Callable[..., Any]
BLOCK_IDS = tuple(range(BLOCKS - 1, 3, -1))


def checked(device: Device, dtype: str = "float32") -> str | None:
    from kvshare.vllm_connector.worker.copy_test import CopyTest

    cache = new_cache(dtype, 2, 4)
    store = new_store(cache)
    problem = CopyTest(cache, store, device, block_ids=BLOCK_IDS).check()
    assert not store.ids()
    return problem


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("buffer_bytes", [None, 1 << 20, 3000])
def test_right_copies_pass(buffer_bytes: int | None, dtype: str) -> None:
    """Of a CPU and of a GPU, whose staging holds a segment or a part of it. Nothing stays stored."""
    from kvshare.vllm_connector.worker.device import Device

    assert checked(Device() if buffer_bytes is None else pretended(buffer_bytes), dtype) is None


def other_blocks(call: Call, cache: Any, staging: Any, block_ids: Any, batch: Any) -> None:
    call(cache, staging, block_ids[::-1], batch)


def other_sums(call: Call, *given: Any) -> Any:
    return call(*given) + 1


def other_tokens(call: Call, cache: Any, load: Any) -> Any:
    load.copies = [
        replace(copy, source=Span(copy.source.start - 1, copy.source.end - 1)) for copy in load.copies
    ]
    return call(cache, load)


def other_positions(call: Call, cache: Any, load: Any) -> Any:
    load.copies = [replace(copy, shift=copy.shift + bool(copy.shift)) for copy in load.copies]
    return call(cache, load)


def one_slot_more(call: Call, cache: Any, *given: Any) -> None:
    call(cache, *given)
    slots = cache.slots(BLOCK_IDS, Span(0, 1))
    cache.write_layer(4, *(2 * [cache.caches[0].new_ones(1, 2, 4)]), slots)


def no_difference(call: Call, *given: Any) -> Any:
    return call(*given) & False


def failing(*_: Any) -> None:
    raise RuntimeError("an illegal memory access")


@pytest.mark.parametrize(
    ("name", "wrong", "problem"),
    [
        ("gather", other_blocks, "saved rows are not those"),
        ("sums", other_sums, "sums of saved rows"),
        ("begin_load", other_tokens, "loaded rows are not those"),
        ("begin_load", other_positions, "rows that were moved"),
        ("scatter", one_slot_more, "slots that are not its own"),
        ("compare", no_difference, "damaged segment is not noticed"),
        ("compare", lambda call, *given: call(*given) | True, "taken for a damaged one"),
        ("up", failing, "RuntimeError: an illegal memory access"),
    ],
)
def test_wrong_copies_fail(name: str, wrong: Call, problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is wrong."""
    device: Any = pretended(1 << 20)
    call = getattr(device._gpu, name)
    monkeypatch.setattr(device._gpu, name, lambda *given: wrong(call, *given), raising=False)
    assert problem in (checked(device) or "")


@pytest.mark.parametrize(("works_without", "warns"), [(True, True), (False, False)])
def test_kernels_that_copy_wrongly_are_not_used(works_without: bool, warns: bool) -> None:
    """What torch and vLLM have takes their place; if that is wrong, too, nothing is shared."""
    from kvshare.vllm_connector.worker.start import Attached, WorkerStart

    wrong = SimpleNamespace(gather=failing, place=failing, sums=failing)
    device: Any = pretended(1 << 20, wrong)
    if not works_without:
        device._gpu.down = failing
    cache = new_cache("float32", 2, 4)
    attached: Any = Attached(cache, None, new_store(cache))  # type: ignore[arg-type]  # computes no model
    start: Any = WorkerStart.__new__(WorkerStart)
    object.__setattr__(start, "device", device)
    with one_rank():
        warnings, problem = start._check_copies(attached, BLOCK_IDS)
    assert [("without kernels of our own" in each) for each in warnings] == ([True] if warns else [])
    assert (problem is None) is works_without
    assert device._gpu._kernels is None
