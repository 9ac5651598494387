"""The self-test at start, made to fail."""

from typing import Any


class TestSelfTest:
    """A check that cannot fail tests nothing: each is made to."""

    def self_test(self, vllm: Any) -> Any:
        from kvshare.vllm_connector.worker.self_test import SelfTest

        return SelfTest(vllm.worker._cache, vllm.worker._forward, vocab_size=300)

    def test_they_hold(self, start: Any) -> None:
        self_test = self.self_test(vllm := start("llama"))
        assert self_test.check_layout() is None
        assert self_test.check_partial_attention() is None
        assert self_test.check_listening() is None
        proofs = [proof for layer in self_test.movements(vllm.tables()) for proof in layer]
        assert all(proof.movement is not None for proof in proofs)

    def test_weights_that_are_not_the_kernels_are_found(self, start: Any, monkeypatch: Any) -> None:
        """Another scale, as of a model that scales its queries by itself."""
        vllm = start("llama")
        scaling = vllm.worker._forward.scaling
        monkeypatch.setattr(vllm.worker._forward, "scaling", lambda layer: 1.2 * scaling(layer))
        assert "attention is not" in self.self_test(vllm).check_listening()

    def test_kernels_that_are_not_called_where_we_stand_in_are_found(
        self, start: Any, monkeypatch: Any
    ) -> None:
        """As they would be in a captured graph."""
        from contextlib import nullcontext

        vllm = start("llama")
        monkeypatch.setattr(vllm.worker._forward, "_watched", lambda watch: nullcontext())
        assert "cannot be watched" in self.self_test(vllm).check_listening()

    def test_an_error_is_a_reason_not_to_listen(self, start: Any, monkeypatch: Any) -> None:
        """Nothing else depends on it: windows are repaired all the same."""
        vllm = start("llama")

        def scaling(layer: int) -> float:
            raise AttributeError("no scale")

        monkeypatch.setattr(vllm.worker._forward, "scaling", scaling)
        assert "AttributeError: no scale" in self.self_test(vllm).check_listening()

    def test_watching_leaves_no_trace(self, start: Any) -> None:
        vllm = start("llama")
        self.self_test(vllm).check_listening()
        layers = vllm.worker._cache.layers.values()
        assert all("forward" not in vars(layer.impl) for layer in layers)

    def test_wrong_frequencies_are_found(self, start: Any) -> None:
        vllm = start("llama")
        (table,) = vllm.tables()
        right, wrong = (self.self_test(vllm).movements([t]) for t in (table, table * 1.01))
        assert all(k.movement is not None and v.movement is not None for k, v in right)
        assert all(k.movement is None for k, _ in wrong)

    def test_a_layer_without_positions_is_found(self, start: Any, monkeypatch: Any) -> None:
        """Its rows stay where all others turn."""
        import torch

        from kvshare.kv.movement import STAYS

        vllm = start("llama", enforce_eager=True)  # a compiled model does not ask its modules
        model = vllm.core.model_executor.driver_worker.model_runner.get_model()
        attention = model.model.layers[1].self_attn
        self_test, tables = self.self_test(vllm), vllm.tables()

        class NoPositions(torch.nn.Module):
            def forward(self, positions: Any, q: Any, k: Any) -> Any:
                return q, k

        with monkeypatch.context() as patch:
            patch.setitem(attention._modules, "rotary_emb", NoPositions())
            found = self_test.movements(tables)
        assert [k.movement == STAYS for k, _ in found] == [False, True, False]
        assert not any(k.movement == STAYS for k, _ in self_test.movements(tables))

    def test_a_mask_that_sees_later_keys_is_found(self, start: Any, monkeypatch: Any) -> None:
        """The shortcut of the published CacheBlend code: recomputed tokens see what comes after them."""
        from kvshare.vllm_connector.worker.partial_forward import PartialForward

        vllm = start("llama")
        self_test = self.self_test(vllm)
        common = PartialForward._common

        def shortcut(forward: Any, runs: Any, slots: Any, positions: Any) -> Any:
            metadata = common(forward, runs, slots, positions)
            metadata.causal = False
            return metadata

        with monkeypatch.context() as patch:
            patch.setattr(PartialForward, "_common", shortcut)
            assert "partial attention" in self_test.check_partial_attention()


def test_a_worker_that_cannot_even_look_refuses(start: Any, monkeypatch: Any) -> None:
    """A backend whose metadata cannot be built does not keep vLLM from starting."""
    from kvshare.vllm_connector.worker import worker

    def fail(*_: Any) -> None:
        raise RuntimeError("no such backend")

    given = start("llama").worker
    monkeypatch.setattr(worker, "PartialForward", fail)
    fresh = worker.ConnectorWorker(given._config, given._spec, given._layer_names)
    fresh.attach_model(None)  # type: ignore[arg-type]  # it does not come to that
    assert fresh.handshake is not None
    assert "no such backend" in fresh.handshake.unsupported[0]
