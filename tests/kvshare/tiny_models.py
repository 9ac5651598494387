"""Tiny random models of the architectures KVShare promises to run, made in milliseconds."""

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB = 300
_SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _llama3_rope() -> PreTrainedConfig:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return LlamaConfig(**_SHAPE, rope_parameters=rope)


CONFIGS = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "llama3-rope": _llama3_rope,
    "qwen2": lambda: Qwen2Config(**_SHAPE, use_sliding_window=False),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=16, use_sliding_window=False),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=None),
    "phi3": lambda: Phi3Config(**_SHAPE, sliding_window=None),
}


def tiny_model(name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model with weights large enough that attention is not uniform, and biases that are not zero."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                parameter.normal_(0.0, 0.12)
    return model.to(dtype).eval()
