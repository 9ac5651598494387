"""Layouts of vLLM's blocks are found by writing through the backend."""

from types import SimpleNamespace
from typing import Any

import pytest

from delta_tree import Span


class TestLayouts:
    """A layout is found by writing through the backend; here the backend is a permutation of our own."""

    N, H, D = 32, 2, 32

    def block(self, permutation: Any = None) -> tuple[Any, Any]:
        import torch

        block = torch.zeros(self.H, self.N, 2 * self.D)

        def write(k: Any, v: Any) -> None:
            rows = torch.cat([k, v], dim=-1).permute(1, 0, 2)  # (H, N, 2 D): the content layout
            flat = rows.flatten()
            block.copy_((flat if permutation is None else flat[permutation]).view_as(block))

        return block, write

    def test_content(self) -> None:
        from kvshare.vllm_connector.worker.paged_cache import find_layout

        layout = find_layout(*self.block())
        assert layout is not None
        assert layout.name == "content"

    def test_any_permutation_is_learned(self) -> None:
        import torch

        from kvshare.vllm_connector.worker.paged_cache import find_layout

        permutation = torch.randperm(self.H * self.N * 2 * self.D)
        layout = find_layout(*self.block(permutation))
        assert layout is not None
        assert layout.name == "learned"

    def test_a_cache_that_rounds_is_not_understood(self) -> None:
        """As a quantised one does."""
        from kvshare.vllm_connector.worker.paged_cache import find_layout

        block, write = self.block()

        def write_rounded(k: Any, v: Any) -> None:
            write(k, v)
            block.round_()

        assert find_layout(block, write_rounded) is None

    def test_vllms_own(self, start: Any) -> None:
        assert start("llama").side.info().settings["attention_backend"] == "CPU_ATTN/transposed"


class TestRows:
    """Single positions come out as `read` has them, however a block lies in memory."""

    BLOCKS, N, H, D = 6, 8, 2, 4

    @pytest.mark.parametrize("heads_first", [True, False])
    @pytest.mark.parametrize("is_permuted", [True, False])
    def test_they_are_those_of_a_read(self, *, heads_first: bool, is_permuted: bool) -> None:
        import torch

        from kvshare.vllm_connector.worker.paged_cache import PagedCache

        torch.manual_seed(0)
        shape = (self.H, self.N, 2 * self.D) if heads_first else (self.N, self.H, 2 * self.D)
        permutation = torch.randperm(shape[0] * shape[1] * shape[2]) if is_permuted else None
        layers = {}
        for name in ("first", "second"):
            cache = torch.randn(self.BLOCKS + 1, *shape)[1:]  # does not begin where its memory does
            if not heads_first:
                cache = cache.transpose(1, 2)

            def update(_: Any, k: Any, v: Any, cache: Any, slots: Any) -> None:
                """Of whole blocks."""
                rows = torch.cat([k, v], dim=-1).unflatten(0, (-1, self.N)).transpose(1, 2)
                if permutation is not None:
                    rows = rows.flatten(1)[:, permutation].view_as(rows)
                cache[slots[:: self.N] // self.N] = rows

            layers[name] = SimpleNamespace(kv_cache=cache, impl=SimpleNamespace(do_kv_cache_update=update))
        paged = PagedCache(layers, block_size=self.N)
        assert paged.find_layout(0) is None
        assert paged.layout == ("learned" if is_permuted else "content")

        block_ids, places = (3, 1, 5), (0, 2, 7, 8, 22)
        k, v = (torch.randn(2, 3 * self.N, self.H, self.D) for _ in range(2))
        paged.write(k, v, paged.slots(block_ids, Span(0, 3 * self.N)))
        whole = paged.read(block_ids, Span(0, 3 * self.N))
        assert torch.equal(whole.k, k)
        found_k, found_v = paged.rows(block_ids, places)
        assert torch.equal(found_k, k[:, places])
        assert torch.equal(found_v, v[:, places])
        assert torch.equal(paged.keys(1, block_ids, 17), k[1, :17])
