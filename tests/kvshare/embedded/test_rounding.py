"""Models whose own attention rounds in bfloat16, as those with large biases do."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

from kvshare.embedded.decoder import relative_error
from kvshare.embedded.model import EmbeddedModel
from kvshare.errors import UnshareableError
from kvshare.kv.attention import PartialPass
from kvshare_lab.bench.random_configurations import TINY


def with_large_key_biases() -> PreTrainedModel:
    """In bfloat16, as Qwen2.5 has them: its eager attention rounds scores, its fused one does not."""
    torch.manual_seed(0)
    network: PreTrainedModel = AutoModelForCausalLM.from_config(Qwen2Config(**TINY), dtype=torch.bfloat16)
    for layer in network.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=120)
        torch.nn.init.normal_(layer.self_attn.q_proj.bias, std=4)
    return network


def test_an_eager_attention_that_rounds_too_much_refuses_no_model() -> None:
    network = with_large_key_biases()
    tokens = torch.arange(3, 115, 7).unsqueeze(0)
    logits = []
    for attention in ("eager", "sdpa"):
        network.set_attn_implementation(attention)
        with torch.inference_mode():
            logits.append(network(tokens).logits)
    model = EmbeddedModel(network, name="biased")
    assert relative_error(*logits) > model.tolerance
    assert model.attention_error < model.tolerance / 10
    assert model.layout.can_move


def test_wrong_attention_is_refused_even_then(monkeypatch: pytest.MonkeyPatch) -> None:
    right = PartialPass.attend
    monkeypatch.setattr(PartialPass, "attend", lambda *given, **named: right(*given, **named) * 0.7)
    with pytest.raises(UnshareableError, match="its attention is not supported"):
        EmbeddedModel(with_large_key_biases(), name="biased")
