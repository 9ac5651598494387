"""Which models are taken, what of them is shared, and what is said of the others."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    SmolLM3Config,
    T5Config,
    T5ForConditionalGeneration,
)

from delta_tree import Span, token_ids
from kvshare.bench.random_models import TINY, tiny_model
from kvshare.demo import MODEL_PATH
from kvshare.engines.embedded.model import EmbeddedModel, chosen_dtype
from kvshare.errors import ModelError
from kvshare.kv.attention import PartialPass

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def embedded(config: PreTrainedConfig, **settings: int) -> EmbeddedModel:
    torch.manual_seed(0)
    return EmbeddedModel(AutoModelForCausalLM.from_config(config), name="tiny", **settings)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (LlamaConfig(**TINY, rope_parameters=DYNAMIC), "dynamic"),
        (Phi3Config(**TINY, sliding_window=None, partial_rotary_factor=0.5), "8 of 16 dimensions"),
    ],
)
def test_rotations_that_are_not_handled_are_refused_by_name(config: PreTrainedConfig, reason: str) -> None:
    """Such a model is served with exact prefixes only, and says why."""
    model = embedded(config)
    assert model.rotation is None
    assert reason in model.rotation_refusal


def test_layers_without_positions_are_found_out() -> None:
    """SmolLM3 leaves every fourth layer unrotated: moving its keys would be wrong there."""
    config = SmolLM3Config(**{**TINY, "num_hidden_layers": 4}, use_sliding_window=False)
    model = embedded(config)
    assert model.rotation is None
    assert "layer 3" in model.rotation_refusal


def test_attention_that_does_more_is_refused() -> None:
    """Gemma-2 caps its attention scores, ours does not: no answer is better than a wrong one."""
    config = Gemma2Config(**{**TINY, "head_dim": 16}, attn_logit_softcapping=50.0, sliding_window=512)
    with pytest.raises(ModelError, match="softcap"):
        embedded(config)


def test_yarn_is_handled() -> None:
    """Its magnitude factor is in the stored key and is not applied twice."""
    model = embedded(LlamaConfig(**TINY, rope_parameters=YARN))
    assert model.rotation is not None, model.rotation_refusal


def test_a_rotation_that_does_not_do_what_it_says_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof compares moved keys with computed ones on the model itself, whatever the config claims."""
    plain = tiny_model("llama")
    module = next(module for module in plain.modules() if hasattr(module, "inv_freq"))
    original = module.forward
    # Positions that grow quadratically: no rotation by a difference can be right.
    monkeypatch.setattr(module, "forward", lambda x, position_ids: original(x, position_ids**2))
    model = EmbeddedModel(plain, name="odd")
    assert model.rotation is None
    assert "differ from computed ones" in model.rotation_refusal


def test_a_sliding_window_caps_the_context() -> None:
    """Up to its window a model attends to everything; beyond it this engine would be wrong."""
    config = MistralConfig(**TINY, sliding_window=128)
    assert embedded(config).max_model_len == 128
    with pytest.raises(ModelError, match="128"):
        embedded(config, max_model_len=256)


def test_a_shorter_context_may_be_asked_for() -> None:
    """And a longer one than the model's is refused."""
    assert embedded(LlamaConfig(**TINY), max_model_len=100).max_model_len == 100
    with pytest.raises(ModelError, match="1024"):
        embedded(LlamaConfig(**TINY), max_model_len=5000)


def test_models_of_another_kind_are_refused() -> None:
    """Encoder-decoder and mixed layer types are no plain decoders."""
    t5 = T5ForConditionalGeneration(T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=64))
    with pytest.raises(ModelError, match="encoder-decoder"):
        EmbeddedModel(t5, name="t5")
    hybrid = LlamaConfig(**TINY)
    hybrid.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(ModelError, match="linear_attention"):
        embedded(hybrid)


def test_learned_positions_are_served_exactly_without_moving() -> None:
    """GPT-2 has no rotary embedding: it runs, equals its own forward pass, and shares prefixes only."""
    model = embedded(GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=128))
    assert model.rotation is None
    tokens = token_ids(np.random.default_rng(0).integers(0, 300, 50))
    found = model.compute(PartialPass(model.new_sequence(50), (Span(0, 50),)), tokens)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=128)
    plain = AutoModelForCausalLM.from_config(config).eval()
    with torch.inference_mode():
        expected = plain(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0, -1]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("path", ["no/such/folder", "an-organisation/no-such-model"])
def test_a_model_that_is_not_there_is_named(path: str) -> None:
    """The error names what was asked for."""
    with pytest.raises(ModelError, match=path):
        EmbeddedModel.load(path, name="x")


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    """A config without weights, or rubbish, is a ModelError and no traceback of transformers."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError):
        EmbeddedModel.load(tmp_path, name="x")
    (tmp_path / "config.json").write_text("no json")
    with pytest.raises(ModelError):
        EmbeddedModel.load(tmp_path, name="x")


def test_revisions_tell_checkpoints_apart() -> None:
    """Other weights are another revision; loading the same ones again is not."""
    first = EmbeddedModel(tiny_model("llama", seed=0), name="a").revision
    assert first == EmbeddedModel(tiny_model("llama", seed=0), name="b").revision
    assert first != EmbeddedModel(tiny_model("llama", seed=1), name="a").revision
    touched = tiny_model("llama", seed=0)
    with torch.no_grad():
        next(touched.parameters()).view(-1)[12345] += 1e-3
    assert first != EmbeddedModel(touched, name="a").revision


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bundled_model_loads_in_both_number_formats(dtype: str) -> None:
    """And its keys can be moved in both."""
    model = EmbeddedModel.load(MODEL_PATH, name="demo", device="cpu", dtype=dtype)
    assert str(model.geometry.dtype) == f"torch.{dtype}"
    assert model.rotation is not None, model.rotation_refusal


@pytest.mark.parametrize(
    ("saved", "able", "expected"),
    [
        (torch.bfloat16, {"avx512_bf16": True}, torch.bfloat16),
        (torch.bfloat16, {"amx_bf16": True}, torch.bfloat16),
        (torch.bfloat16, {"avx512_bf16": False}, torch.float32),
        (torch.float16, {"avx512_bf16": True}, torch.float32),
        (torch.float32, {"avx512_bf16": True}, torch.float32),
        (None, {"avx512_bf16": True}, torch.float32),
    ],
)
def test_auto_is_the_saved_format_where_the_processor_has_it(
    monkeypatch: pytest.MonkeyPatch, saved: torch.dtype | None, able: dict[str, bool], expected: torch.dtype
) -> None:
    """bfloat16 with instructions for it; everything else is computed in float32 on a CPU."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    assert chosen_dtype(saved, "cpu") is expected
