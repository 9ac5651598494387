"""KV of 8 bits in real vLLM: its bytes are shared as they are, by scales that the checkpoint gives."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from tests.kvshare.vllm_connector.in_process_vllm import Answer, Checkpoint, Copies, Start, Texts, Vllm

LIMIT = 1e-4  # log-probability, float32
CLEARLY = 1e-2  # that of KV of other text
SCATTERED = ((0, 100), (130, 300), (301, 500), (520, 590))
SHIFT = 41
SCALES = {"k": 0.021, "v": 0.0043}  # of layer 0, of others a little more
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
KINDS: dict[str, dict[str, Any]] = {
    "scales of the checkpoint": {},  # which switches fp8 on
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
}


def with_scales(plain: Path, path: Path) -> Path:
    """The same model, whose checkpoint asks for an fp8 cache, as llm-compressor writes it."""
    import torch
    from safetensors.torch import load_file, save_file

    if path.exists():
        return path
    shutil.copytree(plain, path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
        "kv_cache_scheme": SCHEME,
    }
    (path / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for name, scale in SCALES.items():
            tensors[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor([scale * (1 + layer / 7)])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module", autouse=True)
def needs_instructions() -> None:
    """vLLM's CPU kernels read fp8 with AVX-512 or AMX only."""
    import torch

    if not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()):
        pytest.skip("vLLM's CPU attention takes an fp8 KV cache with AVX-512 or AMX only")


@pytest.fixture(
    scope="module",
    params=["scales of the checkpoint", pytest.param("fp8_e5m2", marks=pytest.mark.long)],
)
def quantised(request: pytest.FixtureRequest, start: Start, checkpoint: Checkpoint) -> Vllm:
    plain = checkpoint("llama")
    path = plain if KINDS[request.param] else with_scales(plain, plain.with_name("llama-with-scales"))
    return start(path, **KINDS[request.param])


def test_it_is_admitted_and_said(quantised: Vllm) -> None:
    """Half of the bytes of 16 bits, movable, and another namespace than KV of other numbers."""
    info, cache = quantised.side.info(), quantised.worker.attached.cache
    assert (info.refusals, info.warnings) == ((), ())
    assert info.can_move_keys
    assert info.can_choose
    assert info.namespace_fields["dtype"] == str(cache.kv_layout.dtype).removeprefix("torch.")
    assert info.namespace_fields["dtype"].startswith("float8_")
    keys, _ = cache.kv_layout.planes
    assert info.bytes_per_token == 2 * cache.kv_layout.num_layers * keys.num_heads * keys.dim


@pytest.mark.parametrize("of_blocks", [True, False])
def test_text_at_its_place_is_shared_as_if_computed(
    quantised: Vllm, text: Texts, copies: Copies, *, of_blocks: bool
) -> None:
    """From blocks and from host memory: scattered runs, all computed, nothing computed."""
    seed = 10 * of_blocks
    tokens, other = text(600, 1 + seed), text(600, 2 + seed)
    donor, of_other = quantised.store(tokens), quantised.store(other)
    if not of_blocks:
        quantised.forget_blocks()
    plain = quantised.plain(tokens)
    assert plain.distance(quantised.plain(tokens)) <= LIMIT
    for spans, num_computed in ((SCATTERED, 61), (((597, 598),), 599), (((0, 599),), 1)):
        answer, event = quantised.shared(tokens, copies(donor, *spans))
        assert answer.distance(plain) <= LIMIT
        assert (event.decision, event.num_computed) == ("approx", num_computed)
    wrong, _ = quantised.shared(tokens, copies(of_other, *SCATTERED))
    assert first_distance(wrong, plain) > CLEARLY
    quantised.check_idle()


@pytest.mark.parametrize("fault", ["another dtype", "another scale"])
def test_bytes_that_stand_for_other_numbers_are_noticed(
    quantised: Vllm, text: Texts, copies: Copies, fault: str
) -> None:
    """The comparison above fails if stored bytes were written by another scale, or in another dtype."""
    import torch

    tokens = text(600, 31)
    donor, plain = quantised.store(tokens), quantised.plain(tokens)
    quantised.forget_blocks()
    dtype = quantised.worker.attached.cache.kv_layout.dtype
    other = torch.float8_e5m2 if dtype == torch.float8_e4m3fn else torch.float8_e4m3fn
    store = quantised.worker.attached.store
    for stored in store.find([part.segment_id for part in donor.stored]).values():
        numbers = stored.rows.float() * (1.0 if fault == "another dtype" else 1.4)
        rewritten = numbers.to(other if fault == "another dtype" else dtype)
        stored.rows.view(torch.uint8).copy_(rewritten.view(torch.uint8))
        renew_sums(stored)
    wrong, event = quantised.shared(tokens, copies(donor, *SCATTERED))
    assert event.decision == "approx"
    assert first_distance(wrong, plain) > CLEARLY


def renew_sums(stored: Any) -> None:
    from kvshare.kv.sums import sums

    stored.sums[:] = sums(stored.rows.flatten(2), row_bytes=stored.row_bytes).numpy()


class TestScales:
    """A self-test that could not fail would test nothing."""

    def test_other_scales_are_another_namespace(self, quantised: Vllm) -> None:
        """Bytes of the same weights stand for other numbers."""
        model = quantised.core.model_executor.driver_worker.model_runner.get_model()
        scale, before = model.model.layers[1].self_attn.attn._k_scale, self.revision(quantised)
        scale.mul_(2)
        assert self.revision(quantised) != before
        scale.div_(2)
        assert self.revision(quantised) == before

    @staticmethod
    def revision(vllm: Vllm) -> str:
        from kvshare.vllm_connector.worker.model import weights_digest

        return weights_digest(vllm.core.model_executor.driver_worker.model_runner.get_model())

    @pytest.mark.parametrize("factor", [0.5, 2.0])
    @pytest.mark.parametrize("name", ["k", "v"])
    def test_a_scale_that_is_not_the_kernels_is_found(
        self, quantised: Vllm, factor: float, name: str
    ) -> None:
        """As of a backend that reads another attribute."""
        from kvshare.vllm_connector.worker.self_test import SelfTest

        attached = quantised.worker.attached
        self_test = SelfTest(attached.cache, attached.forward, vocab_size=300, max_model_len=1024)
        assert self_test.check_scales() is None
        scale = getattr(list(attached.cache.layers.values())[1], f"_{name}_scale")
        scale.mul_(factor)
        problems = self_test.check_scales(), self_test.check_layout()
        scale.div_(factor)
        assert problems == (
            f"{name} of layer 1 is not stored by the layer's scale",
            "rows written into scattered blocks are not read back",
        )


def test_moved_keys_are_off_by_as_much_as_quantised_ones(quantised: Vllm, record_property: Any) -> None:
    """In vLLM's own cache: the error of a copy that moved, beside that of keys that are computed there."""
    errors = errors_of_moving(quantised)
    for name, error in errors.items():
        record_property(name, round(error, 4))
    assert 0 < errors["moved"] <= 1.5 * errors["quantised"]
    assert errors["not moved"] > 5 * errors["moved"]


def errors_of_moving(vllm: Vllm) -> dict[str, float]:
    """Of the first layer's keys: the root of the mean square, in units of the exact keys at the new place."""
    from delta_tree import Span
    from kvshare.vllm_connector.worker.cache_dtype import as_numbers, scale_of
    from kvshare.vllm_connector.worker.runs import Run
    from kvshare.vllm_connector.worker.self_test import SelfTest

    cache, forward = vllm.worker.attached.cache, vllm.worker.attached.forward
    self_test = SelfTest(cache, forward, vocab_size=300, max_model_len=1024)
    span = Span(0, 400)
    exact = self_test._computed([Run(self_test.block_ids, span, self_test.tokens, SHIFT)]).k
    forward.compute([Run(self_test.block_ids, span, self_test.tokens, SHIFT)])
    there = cache.read(self_test.block_ids, span).k
    here = self_test._compute([span]).k
    keys, _ = cache.kv_layout.planes
    scale = scale_of(next(iter(cache.layers.values())), "k")

    def error(rows: torch.Tensor) -> float:
        difference = as_numbers(rows[0], scale) - exact[0]
        return float((difference.square().mean() / exact[0].square().mean()).sqrt())

    return {"quantised": error(there), "moved": error(keys.moved(here, SHIFT)), "not moved": error(here)}


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_moved_copies_are_as_near_to_those_of_float_kv_as_computed_ones(
    start: Start, checkpoint: Checkpoint, text: Texts, copies: Copies, kind: str, record_property: Any
) -> None:
    """Quantising costs a shared answer no more than it costs one that is computed."""
    plain = checkpoint("llama")
    path = plain if KINDS[kind] else with_scales(plain, plain.with_name("llama-with-scales"))
    of_float = [answers(start(plain), text, copies, seed) for seed in range(4)]
    of_fp8 = [answers(start(path, **KINDS[kind]), text, copies, seed) for seed in range(4)]
    computed, shared = (
        [first_distance(one[part], other[part]) for one, other in zip(of_float, of_fp8, strict=True)]
        for part in range(2)
    )
    record_property("computed", computed)
    record_property("shared", shared)
    assert sum(shared) <= 1.5 * sum(computed)


def answers(vllm: Vllm, text: Texts, copies: Copies, seed: int) -> tuple[Answer, Answer]:
    """To a prompt that is computed, and to the same with moved copies."""
    tokens, recipient = text(600, 50 + seed), text(SHIFT, 60 + seed) + text(600, 50 + seed)
    donor = vllm.store(tokens)
    moved = copies(donor, (0, 100), (130, 300), (301, 560), shift=SHIFT)
    shared, event = vllm.shared(recipient, moved, max_tokens=1, logprobs=20)
    assert event.used == (0, 1, 2, 3)
    return vllm.plain(recipient, max_tokens=1, logprobs=20), shared


def first_distance(one: Answer, other: Answer) -> float:
    """How far log-probabilities of the first token are apart, at most; infinite without a common one."""
    a, b = one.logprobs[0], other.logprobs[0]
    return max((abs(a[token] - b[token]) for token in a.keys() & b.keys()), default=float("inf"))
