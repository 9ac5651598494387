"""Layouts of vLLM's blocks are found by writing through the backend."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from delta_tree import Span

if TYPE_CHECKING:
    import torch

    from kvshare.vllm_connector.worker.block_layout import WriteRows
    from kvshare.vllm_connector.worker.paged_cache import PagedCache
    from tests.kvshare.vllm_connector.in_process_vllm import Vllm


class TestLayouts:
    """A layout is found by writing through the backend; here the backend is a permutation of our own."""

    N, H, D = 32, 2, 32

    def block(self, permutation: torch.Tensor | None = None) -> tuple[torch.Tensor, WriteRows]:
        import torch

        block = torch.zeros(self.H, self.N, 2 * self.D)

        def write(k: torch.Tensor, v: torch.Tensor) -> None:
            rows = torch.cat([k, v], dim=-1).permute(1, 0, 2)  # (H, N, 2 D): the content layout
            flat = rows.flatten()
            block.copy_((flat if permutation is None else flat[permutation]).view_as(block))

        return block, write

    def test_content(self) -> None:
        from kvshare.vllm_connector.worker.block_layout import find_layout

        layout = find_layout(*self.block())
        assert layout is not None
        assert layout.name == "content"

    def test_any_permutation_is_learned(self) -> None:
        import torch

        from kvshare.vllm_connector.worker.block_layout import find_layout

        permutation = torch.randperm(self.H * self.N * 2 * self.D)
        layout = find_layout(*self.block(permutation))
        assert layout is not None
        assert layout.name == "learned"

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("with_pairs", [True, False])
    def test_tiles_are_read_by_strides(self, with_pairs: bool, dtype: str) -> None:
        """Tiles of AMX: K of 16 tokens and pairs of dimensions, V of pairs of tokens and 16 dimensions."""
        import torch

        from kvshare.vllm_connector.worker import block_layout

        n, h, d = self.N, self.H, self.D
        block = torch.zeros(h, n, 2 * d, dtype=getattr(torch, dtype))

        def write(k: torch.Tensor, v: torch.Tensor) -> None:
            k = k.view(n // 16, 16, h, d // 2, 2).permute(2, 0, 3, 1, 4)
            v = v.view(n // 2, 2, h, d // 16, 16).permute(2, 3, 0, 4, 1)
            k, v = (rows.reshape(h, -1) for rows in (k if with_pairs else k.transpose(3, 4), v))
            block.copy_(torch.cat([k, v], dim=1).view_as(block))

        gathered = block_layout._gathered
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(block_layout, "_gathered", None)  # would read element by element
            layout = block_layout.find_layout(block, write)
        assert layout is not None
        assert layout.name == "learned"
        blocks = torch.randn(3, *block.shape).to(block.dtype)
        numbers = torch.arange(block.numel()).view(block.shape)
        for read in layout.planes:  # of int64, too, by which single elements are found
            slow = gathered(read(numbers.unsqueeze(0))[0])
            assert torch.equal(read(blocks), slow(blocks))

    @pytest.mark.parametrize(
        ("places", "steps"),
        [
            ((0, 2, 4, 100, 102, 104), [(2, 100), (3, 2)]),
            ((0,), []),
            ((0, 2, 4, 100, 103, 104), None),
            ((0, -1, -2), None),
            ((0, 5, 10, 16), None),
            ((0, 1, 10, 11, 21), None),
        ],
    )
    def test_places_are_nested_loops_or_not(
        self, places: tuple[int, ...], steps: list[tuple[int, int]] | None
    ) -> None:
        """In this case they are read one by one."""
        from kvshare.vllm_connector.worker.block_layout import _steps

        assert _steps(places) == steps

    def test_a_cache_that_rounds_is_not_understood(self) -> None:
        """As a quantised one does."""
        from kvshare.vllm_connector.worker.block_layout import find_layout

        block, write = self.block()

        def write_rounded(k: torch.Tensor, v: torch.Tensor) -> None:
            write(k, v)
            block.round_()

        assert find_layout(block, write_rounded) is None

    def test_vllms_own(self, vllm: Vllm) -> None:
        assert vllm.side.info().settings["attention_backend"] == "CPU_ATTN/transposed"


@pytest.mark.parametrize("memory", ["heads first", "tokens first", "layers side by side"])
@pytest.mark.parametrize("layout", ["content", "transposed", "learned"])
@pytest.mark.parametrize("ratio", [1, 2])
class TestRows:
    """Single positions come out as `read` has them, however a block lies in memory."""

    BLOCKS, N, H, D = 8, 8, 2, 4

    def test_they_are_those_of_a_read(self, memory: str, layout: str, ratio: int) -> None:
        """`ratio`: kernel blocks in one of the scheduler's."""
        import torch

        torch.manual_seed(0)
        size, block_ids = ratio * self.N, (3, 1, 2)
        paged = self.paged_cache(memory, layout, block_size=size)
        k, v = (torch.randn(2, 3 * size, self.H, self.D) for _ in range(2))
        paged.write(k, v, paged.slots(block_ids, Span(0, 3 * size)))
        whole = paged.read(block_ids, Span(0, 3 * size))
        assert torch.equal(whole.k, k)
        assert torch.equal(whole.v, v)
        assert torch.equal(paged.keys(1, paged.table(block_ids, 17), 17), k[1, :17])
        for span in (Span(1, 3), Span(2, 3 * size - 3), Span(size, 2 * size), Span(size - 1, size + 1)):
            part = paged.read(block_ids, span)
            assert torch.equal(part.k, k[:, span.start : span.end])
            assert torch.equal(part.v, v[:, span.start : span.end])

    def test_single_ones_are_put_back(self, memory: str, layout: str, ratio: int) -> None:
        """However they were written meanwhile, and whatever their neighbours are by then."""
        import torch

        from kvshare.vllm_connector.worker.kept_rows import KeptRows

        torch.manual_seed(0)
        size, block_ids = ratio * self.N, (3, 1, 2)
        places = list(range(self.N, 2 * self.N))  # this kernel writes whole blocks
        paged, everything = self.paged_cache(memory, layout, block_size=size), Span(0, 3 * size)
        (k, v), (new_k, new_v) = (torch.randn(2, 2, 3 * size, self.H, self.D) for _ in range(2))
        paged.write(k, v, paged.slots(block_ids, everything))
        kept = KeptRows(paged, block_ids, places)
        kept.keep_all()
        paged.write(new_k, new_v, paged.slots(block_ids, everything))
        distances = (new_v - v)[:, places].flatten(2).square().sum(dim=2)
        for num_layers in (1, 2):
            assert torch.allclose(kept.squared_changes(num_layers), distances[:num_layers])
        kept.restore()
        new_k[:, places], new_v[:, places] = k[:, places], v[:, places]
        whole = paged.read(block_ids, everything)
        assert torch.equal(whole.k, new_k)
        assert torch.equal(whole.v, new_v)

    def paged_cache(self, memory: str, layout: str, *, block_size: int) -> PagedCache:
        """Two layers, whose kernel writes blocks in this layout."""
        import torch

        from kvshare.vllm_connector.worker.paged_cache import PagedCache

        permutation = torch.randperm(self.H * self.N * 2 * self.D)

        def update(
            _: object, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
        ) -> None:
            """Of whole blocks, as a kernel of this layout writes them."""
            k, v = (rows.unflatten(0, (-1, self.N)).transpose(1, 2) for rows in (k, v))  # (B, H, N, D)
            rows = torch.cat([k, v], dim=-1)
            if layout == "transposed":
                rows = torch.cat([k.transpose(2, 3).flatten(2), v.flatten(2)], dim=-1).view_as(rows)
            elif layout == "learned":
                rows = rows.flatten(1)[:, permutation].view_as(rows)
            cache[slots[:: self.N] // self.N] = rows

        impl = SimpleNamespace(do_kv_cache_update=update)
        caches = zip(("first", "second"), self.caches(memory, 2), strict=True)
        layers = {name: SimpleNamespace(kv_cache=cache, impl=impl) for name, cache in caches}
        paged = PagedCache(layers, block_size=block_size)
        assert paged.find_layout(0) is None
        assert paged.layout == layout
        return paged

    def caches(self, memory: str, count: int) -> list[torch.Tensor]:
        """(B, H, N, 2 D) each."""
        import torch

        match memory:
            case "heads first":  # and does not begin where its memory does
                shape = (count, self.BLOCKS + 1, self.H, self.N, 2 * self.D)
                return [cache[1:] for cache in torch.randn(shape)]
            case "tokens first":
                shape = (count, self.BLOCKS, self.N, self.H, 2 * self.D)
                return [cache.transpose(1, 2) for cache in torch.randn(shape)]
            case _:
                return list(torch.randn(self.BLOCKS, count, self.H, self.N, 2 * self.D).unbind(1))
