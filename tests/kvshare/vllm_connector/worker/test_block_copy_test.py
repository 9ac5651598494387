"""The part of the self-test that copies from blocks to others, made to fail: nothing is copied so then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import Span
from tests.kvshare.vllm_connector.worker.copy_case import BLOCKS, copy_blocks, new_cache, pretended

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.block_rows import BlockCopy
    from kvshare.vllm_connector.worker.device import Device

Copy = Callable[[Any, Sequence["BlockCopy"]], None]
BLOCK_IDS = tuple(range(BLOCKS - 1, 3, -1))


def checked(device: Device, dtype: str = "float32") -> str | None:
    from kvshare.vllm_connector.worker.block_copy_test import BlockCopyTest

    return BlockCopyTest(new_cache(dtype, 2, 4), device, block_ids=BLOCK_IDS).check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("of_gpu", [False, True])
def test_right_copies_pass(of_gpu: bool, dtype: str) -> None:
    """Of a CPU and of a GPU."""
    from kvshare.vllm_connector.worker.device import Device

    assert checked(pretended(1 << 20) if of_gpu else Device(), dtype) is None


def other_rows(call: Copy, cache: Any, copies: Sequence[BlockCopy]) -> None:
    call(cache, [replace(c, source=Span(c.source.start - 1, c.source.end - 1)) for c in copies])


def other_positions(call: Copy, cache: Any, copies: Sequence[BlockCopy]) -> None:
    call(cache, [replace(copy, shift=copy.shift + bool(copy.shift)) for copy in copies])


def other_slots(call: Copy, cache: Any, copies: Sequence[BlockCopy]) -> None:
    slots = cache.slot_numbers(BLOCK_IDS, Span(3, 3 + len(copies[0].slots)))
    call(cache, [*copies, replace(copies[0], slots=slots)])


def not_the_last_layer(call: Copy, cache: Any, copies: Sequence[BlockCopy]) -> None:
    before = cache.caches[-1].clone()
    call(cache, copies)
    cache.caches[-1].copy_(before)


def failing(*_: Any) -> None:
    raise RuntimeError("an illegal memory access")


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (other_rows, "copied rows are not those"),
        (other_positions, "rows that were moved are off"),
        (other_slots, "slots that are not its own"),
        (not_the_last_layer, "copied rows are not those"),
        (failing, "RuntimeError: an illegal memory access"),
    ],
)
def test_wrong_copies_fail(wrong: Callable[..., None], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is wrong."""
    device: Any = pretended(1 << 20)
    call = device._gpu.copy_blocks
    monkeypatch.setattr(device._gpu, "copy_blocks", lambda *given: wrong(call, *given), raising=False)
    assert problem in (checked(device) or "")


@pytest.mark.parametrize("of_gpu", [False, True])
def test_batches_do_not_change_what_is_copied(of_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are cut at blocks, and several of them are made together."""
    import torch

    from kvshare.vllm_connector.worker import block_copies
    from kvshare.vllm_connector.worker.device import Device

    made, numbers = [], set()
    for max_bytes in (1, 6000, 1 << 20):
        for name in ("_HOST_BATCH_BYTES", "_GPU_BATCH_BYTES"):
            monkeypatch.setattr(block_copies, name, max_bytes)
        cache, generator = new_cache("float32", 2, 4), torch.Generator().manual_seed(3)
        for rows in cache.caches:
            rows[:] = torch.rand(rows.shape, generator=generator)
        before = torch.stack(cache.caches)
        numbers.add(copy_blocks(pretended(1 << 20) if of_gpu else Device(), cache))
        made.append(torch.stack(cache.caches))
        assert (made[-1] != before).any()
    assert all(torch.equal(made[0], other) for other in made)
    assert len(numbers) == 3
