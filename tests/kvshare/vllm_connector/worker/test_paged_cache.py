"""Layouts of vLLM's blocks are found by writing through the backend."""

from typing import Any


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
