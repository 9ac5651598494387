"""How rows move, found on a running model whose attention rounds differently by position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.kvshare.vllm_connector.in_process_vllm import Vllm

_NOISE = 0.02  # of what attention adds


@contextmanager
def noisy_attention(vllm: Vllm, *, depends_on_pass: bool) -> Iterator[None]:
    """Attention that errs by position and length of the pass, except where a token sees only itself."""
    import torch

    def noisy(kernel: Any) -> Any:
        def forward(
            layer: Any, query: Any, key: Any, value: Any, *rest: Any, output: Any, **options: Any
        ) -> Any:
            result = kernel(layer, query, key, value, *rest, output=output, **options)
            queries = query.view(len(query), layer.num_heads, -1)
            own = value.view(len(value), layer.num_kv_heads, -1)
            own = own.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1)
            passes = len(query) if depends_on_pass else 0
            noise = torch.sin(1e3 * queries.float().sum(-1) + passes)[..., None]  # as good as drawn
            output.add_((_NOISE * noise * (output.view_as(queries) - own)).view_as(output))
            return result

        return forward

    impls = [layer.impl for layer in vllm.worker.attached.cache.layers.values()]
    for impl in impls:
        impl.forward = noisy(impl.forward)
    try:
        yield
    finally:
        for impl in impls:
            del impl.forward


@pytest.mark.parametrize("fault", [None, "wrong frequencies", "not only rounding"])
def test_kernels_that_round_differently_by_position(vllm: Vllm, fault: str | None) -> None:
    """
    As vLLM's attention with AMX does: rows are moved all the same if they err little more than between
    one pass and two. Wrong frequencies, and an error that depends on positions only, are found.
    """
    from kvshare.kv.movement import why_not_movable
    from kvshare.vllm_connector.worker.self_test import SelfTest

    (table,) = vllm.tables()
    tables = [table * 1.01] if fault == "wrong frequencies" else [table]
    attached = vllm.worker.attached
    self_test = SelfTest(attached.cache, attached.forward, vocab_size=300, max_model_len=1024)
    with noisy_attention(vllm, depends_on_pass=fault != "not only rounding"):
        found = self_test.movements(tables)
        completed = self_test.movements_despite_rounding(tables, found)
    assert why_not_movable(found), "the noise is too small to test anything"
    assert bool(why_not_movable(completed)) is (fault is not None)
