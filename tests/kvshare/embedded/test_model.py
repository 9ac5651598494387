"""Which models are taken, what of them is shared, and what is said of the others."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma3Config,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    Llama4TextConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from delta_tree import Span, token_ids
from kvshare.demo import MODEL_PATH
from kvshare.embedded.decoder import chosen_dtype, load_network
from kvshare.embedded.loading import context_share
from kvshare.embedded.model import EmbeddedModel
from kvshare.errors import ModelError
from kvshare.kv.attention import PartialPass
from kvshare.kv.movement import STAYS
from kvshare_lab.bench.random_configurations import TINY
from kvshare_lab.bench.random_models import tiny_model

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
LLAMA4 = {
    **TINY,
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 96,
}
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
        (GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=128), "keys of layer 0"),
    ],
)
def test_rotations_that_are_not_handled_are_refused_by_name(config: PreTrainedConfig, reason: str) -> None:
    """Of such a model only what stands where it stood is shared, and it says why."""
    model = embedded(config)
    assert not model.layout.can_move
    assert reason in model.unsupported_reason


def test_layers_without_positions_are_found_out() -> None:
    """SmolLM3 leaves every fourth layer unrotated: its rows stay there, and turn in all other layers."""
    keys, values = EmbeddedModel(tiny_model("smollm3"), name="smollm3").layout.planes
    assert [movement == STAYS for movement in keys.movements] == [False, False, False, True]
    assert set(values.movements) == {STAYS}


@pytest.mark.parametrize(
    ("name", "keys", "values"),
    [
        ("llama", {"half 0:16"}, {"stays"}),
        ("phi", {"half 0:8"}, {"stays"}),
        ("minimax-m2", {"half 0:8"}, {"stays"}),
        ("glm4", {"interleaved 0:8"}, {"stays"}),
        ("cohere2", {"interleaved 0:16", "stays"}, {"stays"}),
        ("llama4", {"interleaved 0:16", "stays"}, {"stays"}),
        ("deepseek-v2", {"stays"}, {"interleaved 0:8"}),
        ("deepseek-v3", {"stays"}, {"half 0:8"}),
    ],
)
def test_what_turns_is_found_by_trying(name: str, keys: set[str], values: set[str]) -> None:
    found = EmbeddedModel(tiny_model(name), name=name).layout.planes
    assert [{str(movement) for movement in plane.movements} for plane in found] == [keys, values]


def test_layers_of_one_model_may_turn_by_different_tables() -> None:
    """Gemma 3 has a table for its windows and another for full attention."""
    keys, _ = EmbeddedModel(tiny_model("gemma3"), name="gemma3").layout.planes
    first, second, third = keys.movements
    assert first == third != second


def test_attention_that_does_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is better than a wrong one: here the scores are asked to be another thing than we compute."""
    plain = tiny_model("llama")
    own = plain.model.layers[1].self_attn

    def doubled(*given: object, **options: object) -> object:
        monkeypatch.setattr(own, "scaling", 0.25 if plain.config._attn_implementation == "eager" else 0.5)
        return type(own).forward(own, *given, **options)

    monkeypatch.setattr(own, "forward", doubled)
    with pytest.raises(ModelError, match="its attention is not supported"):
        EmbeddedModel(plain, name="odd")


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=300, hidden_size=64, n_layer=2, n_head=4),
        GPTJConfig(vocab_size=300, n_embd=64, n_layer=2, n_head=4, rotary_dim=8, n_positions=128),
        GPTNeoConfig(
            vocab_size=300,
            hidden_size=64,
            num_layers=2,
            num_heads=4,
            attention_types=[[["global", "local"], 1]],
            window_size=32,
            max_position_embeddings=128,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_a_model_that_takes_no_attention_from_outside_is_refused(config: PreTrainedConfig) -> None:
    """Its own would be computed, with windows that we know nothing of."""
    with pytest.raises(ModelError, match=r"does not (work with the cache and|use the registered) attention"):
        embedded(config)


def test_a_model_of_images_and_text_is_refused_by_name() -> None:
    text = dict(TINY, head_dim=16, layer_types=["sliding_attention", "full_attention", "full_attention"])
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    with pytest.raises(ModelError, match="takes more than text"):
        EmbeddedModel(AutoModelForCausalLM.from_config(config), name="images")


def test_a_context_ends_where_keys_are_turned_by_another_table() -> None:
    """LongRoPE: a prompt beyond has other keys than one within."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, **factors}
    model = embedded(
        Phi3Config(**TINY, sliding_window=None, original_max_position_embeddings=64, rope_parameters=rope)
    )
    assert model.max_model_len == 64
    assert "longrope" in model.unsupported_reason


def test_yarn_is_handled() -> None:
    """Its magnitude factor is in the stored key and is not applied twice."""
    model = embedded(LlamaConfig(**TINY, rope_parameters=YARN))
    assert model.layout.can_move, model.unsupported_reason


def test_a_rotation_that_does_not_do_what_it_says_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved keys are compared with computed ones on the model itself, whatever the config claims."""
    plain = tiny_model("llama")
    module = next(module for module in plain.modules() if hasattr(module, "inv_freq"))
    original = module.forward
    # Positions that grow quadratically: no rotation by a difference can be right.
    monkeypatch.setattr(module, "forward", lambda x, position_ids: original(x, position_ids**2))
    model = EmbeddedModel(plain, name="odd")
    assert not model.layout.can_move
    assert "keys of layer 0" in model.unsupported_reason


def test_a_sliding_window_does_not_cap_the_context() -> None:
    assert EmbeddedModel(tiny_model("mistral-window"), name="windows").max_model_len == 1024


def test_a_context_ends_where_queries_are_scaled_by_the_length_of_the_cache() -> None:
    """Llama 4 takes positions from there; the pass has others."""
    model = embedded(Llama4TextConfig(**LLAMA4, attn_temperature_tuning=True, floor_scale=64))
    assert model.max_model_len == 63


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
    assert not model.layout.can_move
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
        EmbeddedModel(load_network(path), name="x")


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    """A config without weights, or rubbish, is a ModelError and no traceback of transformers."""
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError):
        EmbeddedModel(load_network(tmp_path), name="x")
    (tmp_path / "config.json").write_text("no json")
    with pytest.raises(ModelError):
        EmbeddedModel(load_network(tmp_path), name="x")


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
    model = EmbeddedModel(load_network(MODEL_PATH, device="cpu", dtype=dtype), name="demo")
    assert str(model.layout.dtype) == f"torch.{dtype}"
    assert model.layout.can_move, model.unsupported_reason


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


@pytest.mark.parametrize(
    ("name", "is_expanded"), [("llama", False), ("gemma3", False), ("deepseek-v3", True)]
)
def test_only_latents_are_expanded_for_all_that_is_attended_to(name: str, *, is_expanded: bool) -> None:
    """By hand: DeepSeek's kv_b_proj in each layer, over all other products a token goes through."""
    model = EmbeddedModel(tiny_model(name), name=name)
    share = context_share(model)
    if not is_expanded:
        assert share == 0
        return
    layers = model.network.model.layers
    expanding = sum(layer.self_attn.kv_b_proj.weight.numel() for layer in layers)
    experts = sum(p.numel() for n, p in model.network.named_parameters() if ".experts." in n)
    others = sum(p.numel() for n, p in model.network.named_parameters() if p.ndim > 1 and "embed" not in n)
    assert share == pytest.approx(expanding / (others - experts / 2 - expanding))
