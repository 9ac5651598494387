"""
Configurations of the random-weight models. `model_type` is transformers'; the other keys are fields of its
configuration, over those of `TINY`.
"""

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]
ByName = Mapping[str, Fields]

TINY: Fields = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE: Fields = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

PLAIN: ByName = {
    "llama": {"model_type": "llama"},
    "llama3-rope": {"model_type": "llama", "rope_parameters": LLAMA3_ROPE},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "use_sliding_window": False},
    "mistral": {"model_type": "mistral", "sliding_window": None},
    "phi3": {"model_type": "phi3", "sliding_window": None},
}
"""Layers that are all alike: full attention, whole heads whose dimensions rotate in half-split pairs."""

# Windows and chunks are 32 tokens: shorter than any prompt of a test.
_FOUR_LAYERS: Fields = {"num_hidden_layers": 4, "sliding_window": 32, "sliding_window_pattern": 4}
_LATENT: Fields = {  # multi-head latent attention, and experts
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_TWO_KINDS: Fields = {"head_dim": 16, "sliding_window": 32, "layer_types": _MIXED}
_HALF_A_HEAD: Fields = {"head_dim": 16, "partial_rotary_factor": 0.5}
_EXPERTS: Fields = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED: Fields = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4}
_CHUNKS: Fields = {"attention_chunk_size": 32, "no_rope_layers": [1, 1, 1, 0]}
_TWO_EXPERTS: Fields = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size_mlp": 96}

OTHERS: ByName = {
    "cohere2": {"model_type": "cohere2", **_FOUR_LAYERS},
    "deepseek-v2": {"model_type": "deepseek_v2", **_LATENT},
    "deepseek-v3": {"model_type": "deepseek_v3", **_LATENT},
    "exaone4": {"model_type": "exaone4", **_FOUR_LAYERS},
    "gemma2": {"model_type": "gemma2", "head_dim": 16, "sliding_window": 32},
    "gemma3": {"model_type": "gemma3_text", **_TWO_KINDS},
    "glm4": {"model_type": "glm4", **_HALF_A_HEAD},
    "glm4-moe": {"model_type": "glm4_moe", **_HALF_A_HEAD, **_ROUTED},
    "gpt-oss": {"model_type": "gpt_oss", **_TWO_KINDS, **_EXPERTS},
    "llama4": {
        "model_type": "llama4_text",
        "num_hidden_layers": 4,
        "head_dim": 16,
        **_CHUNKS,
        **_TWO_EXPERTS,
    },
    "minimax-m2": {"model_type": "minimax_m2", "head_dim": 16, "rotary_dim": 8, **_EXPERTS},
    "mistral-window": {"model_type": "mistral", "sliding_window": 32},
    "olmo3": {"model_type": "olmo3", "sliding_window": 32, "layer_types": _MIXED},
    "phi": {"model_type": "phi", "partial_rotary_factor": 0.5},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4, "use_sliding_window": False},
}
"""Heads that rotate in part, in interleaved pairs, or in some layers; windows, chunks, sinks, latents."""


def _size(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> Fields:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SMALL_LLAMAS: ByName = {
    "small": _size(256, 512, 4, 4, 2),  # about 3 M parameters
    "slim": _size(64, 128, 1, 2, 1),  # one layer: what is measured with it is everything but the model
    "timing": _size(768, 2304, 14, 12, 4),  # about 100 M parameters
    "long": _size(768, 2304, 4, 12, 4),  # for prompts of tens of thousands of tokens
}
_ROPE: Fields = {"rope_theta": 1000000.0, "rope_type": "default"}
LARGE_LLAMAS: ByName = {
    # 7 billion parameters in its layers, 144 KiB of bfloat16 KV a token
    "random-8b": {**_size(4096, 12288, 36, 32, 8), "head_dim": 128, "rope_parameters": _ROPE},
    "random-tiny": _size(256, 512, 4, 4, 2),  # the same at the size of `small`, for a machine without a GPU
}
"""Llamas that are written layer by layer (large_models.py), as no host builds them in memory."""

_WINDOW: Fields = {"head_dim": 64, "sliding_window": 1024}
_KINDS: Fields = {**_WINDOW, "layer_types": [*(_MIXED * 4), "sliding_attention", "full_attention"]}
TIMED: ByName = {
    "cohere2": _WINDOW,
    "gemma2": _WINDOW,
    "gemma3": _KINDS,
    "glm4": {"head_dim": 64},
    "olmo3": _KINDS,
    "smollm3": {"head_dim": 64},
}
"""What differs in the size of "timing" from OTHERS, of those without experts."""
