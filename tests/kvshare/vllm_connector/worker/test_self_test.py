"""The self-test at start, made to fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.kvshare.vllm_connector.starts import starts

if TYPE_CHECKING:
    import torch

    from delta_tree import Span
    from kvshare.kv.sequence import SegmentKV
    from kvshare.vllm_connector.worker.paged_cache import PagedCache
    from kvshare.vllm_connector.worker.partial_forward import PartialForward
    from kvshare.vllm_connector.worker.runs import Run
    from kvshare.vllm_connector.worker.self_test import SelfTest
    from tests.kvshare.vllm_connector.in_process_vllm import Checkpoint, Start, Vllm
    from tests.kvshare.vllm_connector.without_gpu.scattered_runs import Inputs


class TestSelfTest:
    """A check that cannot fail tests nothing: each is made to."""

    def self_test(self, vllm: Vllm) -> SelfTest:
        from kvshare.vllm_connector.worker.self_test import SelfTest

        return SelfTest(
            vllm.worker.attached.cache, vllm.worker.attached.forward, vocab_size=300, max_model_len=1024
        )

    def test_they_hold(self, vllm: Vllm) -> None:
        self_test = self.self_test(vllm)
        assert self_test.check_layout() is None
        assert self_test.check_partial_attention() is None
        assert self_test.check_listening() is None
        verifications = [
            verification for layer in self_test.movements(vllm.tables()) for verification in layer
        ]
        assert all(verification.movement is not None for verification in verifications)

    def test_they_hold_if_a_step_has_fewer_tokens(self, vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
        """As with --max-num-batched-tokens 512, where a whole run takes two passes."""
        monkeypatch.setattr(vllm.worker.attached.forward, "max_tokens", 200)
        assert self.self_test(vllm).check_partial_attention() is None
        assert self.self_test(vllm).check_listening() is None

    def test_weights_that_are_not_the_kernels_are_found(
        self, vllm: Vllm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another scale, as of a model that scales its queries by itself."""
        scaling = vllm.worker.attached.forward.scaling
        monkeypatch.setattr(vllm.worker.attached.forward, "scaling", lambda layer: 1.2 * scaling(layer))
        assert "attention does not follow" in str(self.self_test(vllm).check_listening())

    @pytest.mark.parametrize("fault", ["another row", "a mask that is off by one", "another layer"])
    def test_rows_that_hear_something_else_are_found(
        self, vllm: Vllm, monkeypatch: pytest.MonkeyPatch, fault: str
    ) -> None:
        """As kernels of our own would on a GPU that does not run them as they were meant."""
        observe = (forward := vllm.worker.attached.forward).observe

        def wrong(rows: Any, table: torch.Tensor, layer: int, query: torch.Tensor) -> None:
            match fault:
                case "another row":
                    query = query.roll(1, dims=0)
                case "a mask that is off by one":
                    rows.positions.sub_(int(layer == 0))
                case "another layer":
                    layer = 0
            observe(rows, table, layer, query)

        monkeypatch.setattr(forward, "observe", wrong)
        assert "added up wrongly" in str(self.self_test(vllm).check_listening())

    def test_kernels_that_are_not_called_where_we_stand_in_are_found(
        self, vllm: Vllm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As they would be in a captured graph."""
        from contextlib import nullcontext

        hooked = "kvshare.vllm_connector.worker.partial_forward.hooked"
        monkeypatch.setattr(hooked, lambda *_, **given: nullcontext())
        assert "cannot be watched" in str(self.self_test(vllm).check_listening())

    def test_an_error_is_a_reason_not_to_listen(self, vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nothing else depends on it: windows are repaired all the same."""

        def scaling(layer: int) -> float:
            raise AttributeError("no scale")

        monkeypatch.setattr(vllm.worker.attached.forward, "scaling", scaling)
        assert "AttributeError: no scale" in str(self.self_test(vllm).check_listening())

    def test_watching_leaves_no_trace(self, vllm: Vllm) -> None:
        self.self_test(vllm).check_listening()
        layers = vllm.worker.attached.cache.layers.values()
        assert all("forward" not in vars(layer.impl) for layer in layers)

    def test_wrong_frequencies_are_found(self, vllm: Vllm) -> None:
        (table,) = vllm.tables()
        right, wrong = (self.self_test(vllm).movements([t]) for t in (table, table * 1.01))
        assert all(k.movement is not None and v.movement is not None for k, v in right)
        assert all(k.movement is None for k, _ in wrong)

    @starts(enforce_eager=True)  # a compiled model does not ask its modules
    def test_a_layer_without_positions_is_found(self, vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its rows stay where all others turn."""
        import torch

        from kvshare.kv.movement import STAYS

        model = vllm.core.model_executor.driver_worker.model_runner.get_model()
        attention = model.model.layers[1].self_attn
        self_test, tables = self.self_test(vllm), vllm.tables()

        class NoPositions(torch.nn.Module):
            def forward(
                self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
                return q, k

        with monkeypatch.context() as patch:
            patch.setitem(attention._modules, "rotary_emb", NoPositions())
            found = self_test.movements(tables)
        assert [k.movement == STAYS for k, _ in found] == [False, True, False]
        assert not any(k.movement == STAYS for k, _ in self_test.movements(tables))

    def test_a_mask_that_sees_later_keys_is_found(self, vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
        """The shortcut of the published CacheBlend code: recomputed tokens see what comes after them."""
        from kvshare.vllm_connector.worker.partial_forward import PartialForward

        self_test = self.self_test(vllm)
        inputs = PartialForward._inputs

        def shortcut(forward: PartialForward, runs: Sequence[Run]) -> Inputs:
            *others, metadata = inputs(forward, runs)
            metadata.causal = False
            return *others, metadata

        with monkeypatch.context() as patch:
            patch.setattr(PartialForward, "_inputs", shortcut)
            assert "partial attention" in str(self_test.check_partial_attention())


@pytest.fixture(scope="session")
def outliers(checkpoint: Checkpoint) -> Path:
    """A Qwen2 whose keys have a few channels that are large and hardly vary, as the published ones do."""
    import torch
    from transformers import AutoModelForCausalLM

    source = checkpoint("qwen2")
    model = AutoModelForCausalLM.from_pretrained(source)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias
            bias[torch.randperm(len(bias), generator=generator)[:6]] = 200.0
    folder = source.with_name("outliers")
    model.save_pretrained(folder)
    return folder


class TestMutations:
    """One small thing is wrong, on keys of which the largest value says nothing: each is found."""

    @pytest.fixture
    def vllm(self, start: Start, outliers: Path) -> Vllm:
        return start(outliers)

    def self_test(self, vllm: Vllm) -> SelfTest:
        from kvshare.vllm_connector.worker.self_test import SelfTest

        return SelfTest(
            vllm.worker.attached.cache, vllm.worker.attached.forward, vocab_size=300, max_model_len=1024
        )

    def test_right_is_right(self, vllm: Vllm) -> None:
        assert vllm.side.info().refusals == ()
        assert vllm.side.info().can_move_keys

    def test_it_reaches_far(self, vllm: Vllm) -> None:
        """More than three blocks, far apart and in no order; runs of 1, 17 and more than 512 tokens."""
        self_test = self.self_test(vllm)
        ids = self_test.block_ids
        assert len(ids) > 3
        assert sorted(ids) != list(ids)
        assert max(ids) - min(ids) > 10 * len(ids)
        lengths = {len(run) for run in self_test._runs}
        assert lengths > {1, 17}
        assert max(lengths) > 512

    def test_two_blocks_in_the_wrong_order(self, vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvshare.vllm_connector.worker.partial_forward import PartialForward

        inputs = PartialForward._inputs

        def exchanged(forward: PartialForward, runs: Sequence[Run]) -> Inputs:
            *others, metadata = inputs(forward, runs)
            table = metadata.block_table_tensor
            if table.shape[1] > 1:
                table[:, [0, 1]] = table[:, [1, 0]]
            return *others, metadata

        monkeypatch.setattr(PartialForward, "_inputs", exchanged)
        assert "partial attention" in str(self.self_test(vllm).check_partial_attention())

    def test_a_slot_off_by_one(self, vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvshare.vllm_connector.worker.paged_cache import PagedCache

        slots = PagedCache.slots
        monkeypatch.setattr(PagedCache, "slots", lambda *arguments: slots(*arguments).roll(1))
        assert "not read back" in str(self.self_test(vllm).check_layout())

    def test_a_slot_off_by_one_where_a_pass_writes(self, vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvshare.vllm_connector.worker.partial_forward import PartialForward

        inputs = PartialForward._inputs

        def beside(forward: PartialForward, runs: Sequence[Run]) -> Inputs:
            token_ids, positions, slots, metadata = inputs(forward, runs)
            if len(runs) > 1:
                slots[:] = slots.roll(1)  # the metadata's, too
            return token_ids, positions, slots, metadata

        monkeypatch.setattr(PartialForward, "_inputs", beside)
        assert "partial attention" in str(self.self_test(vllm).check_partial_attention())

    def test_a_rotation_of_the_wrong_sign(self, vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvshare.kv.movement import Movement

        angles = Movement.angles
        monkeypatch.setattr(Movement, "angles", lambda movement, shifts: angles(movement, -shifts))
        found = self.self_test(vllm).movements(vllm.tables())
        assert all(k.movement is None for k, _ in found)

    def test_two_heads_taken_for_each_other(self, vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvshare.kv.sequence import SegmentKV
        from kvshare.vllm_connector.worker.paged_cache import PagedCache

        read = PagedCache.read

        def exchanged(cache: PagedCache, block_ids: Sequence[int], span: Span) -> SegmentKV:
            return SegmentKV(tuple(plane.roll(1, dims=2) for plane in read(cache, block_ids, span).planes))

        monkeypatch.setattr(PagedCache, "read", exchanged)
        assert "not read back" in str(self.self_test(vllm).check_layout())

    @pytest.mark.parametrize("number", [1, 2])
    def test_a_row_that_is_not_a_number(
        self, vllm: Vllm, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """Where all runs are in one pass, or in the passes of one run each."""
        from kvshare.vllm_connector.worker.paged_cache import PagedCache

        read, num_reads = PagedCache.read, [0]

        def damaged(cache: PagedCache, block_ids: Sequence[int], span: Span) -> SegmentKV:
            found = read(cache, block_ids, span)
            if num_reads[0] == number:
                found.planes[1][-1, 5, 0, 3] = float("nan")
            num_reads[0] += 1
            return found

        self_test = self.self_test(vllm)
        monkeypatch.setattr(PagedCache, "read", damaged)
        assert "partial attention" in str(self_test.check_partial_attention())
        assert num_reads == [3]

    def test_a_model_without_attention_proves_nothing(
        self, vllm: Vllm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where what stands before a run makes no difference, a pass that never looked would be right too."""
        for layer in vllm.worker.attached.cache.layers.values():
            forward = layer.impl.forward

            def silent(*arguments: Any, forward: Any = forward, output: Any, **options: Any) -> Any:
                forward(*arguments, output=output, **options)
                return output.zero_()

            monkeypatch.setattr(layer.impl, "forward", silent, raising=False)
        assert "does not depend" in str(self.self_test(vllm).check_partial_attention())
