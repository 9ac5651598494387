"""
Random-weight models made on the fly: tiny ones of every architecture, and Llamas, on disk too, as vLLM wants
them: one large enough to time, one small and talkative.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Exaone4Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MistralConfig,
    Olmo3Config,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.utils import logging

from kvshare.demo import MODEL_PATH
from kvshare.errors import ConfigError

VOCAB_SIZE = 300
DEMO_VOCAB_SIZE = 1536  # the demo tokenizer's, which serves every model on disk
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
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
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Layers that are all alike: full attention, whole heads that turn in half-split pairs.
PLAIN: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**TINY),
    "llama3-rope": lambda: LlamaConfig(**TINY, rope_parameters=_LLAMA3_ROPE),
    "qwen2": lambda: Qwen2Config(**TINY, use_sliding_window=False),
    "qwen3": lambda: Qwen3Config(**TINY, head_dim=16, use_sliding_window=False),
    "mistral": lambda: MistralConfig(**TINY, sliding_window=None),
    "phi3": lambda: Phi3Config(**TINY, sliding_window=None),
}
_WINDOW = 32  # tokens: shorter than any prompt of a test
_FOUR_LAYERS: dict[str, Any] = {"num_hidden_layers": 4}
_TWO_KINDS: dict[str, Any] = {
    "sliding_window": _WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT: dict[str, Any] = {  # multi-head latent attention
    **_EXPERTS,
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
_HEADS: dict[str, Any] = {"head_dim": 16}
_HALF_A_HEAD: dict[str, Any] = {"head_dim": 16, "partial_rotary_factor": 0.5}

# Part of a head turns, or in interleaved pairs, or not in all layers; windows, chunks, sinks, caps, latents.
OTHERS: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, Any]]] = {
    "cohere2": (Cohere2Config, {**_FOUR_LAYERS, "sliding_window": _WINDOW, "sliding_window_pattern": 4}),
    "deepseek-v2": (DeepseekV2Config, _LATENT),
    "deepseek-v3": (DeepseekV3Config, _LATENT),
    "exaone4": (Exaone4Config, {**_FOUR_LAYERS, "sliding_window": _WINDOW, "sliding_window_pattern": 4}),
    "gemma2": (Gemma2Config, {**_HEADS, "sliding_window": _WINDOW}),
    "gemma3": (Gemma3TextConfig, {**_HEADS, **_TWO_KINDS}),
    "glm4": (Glm4Config, _HALF_A_HEAD),
    "glm4-moe": (Glm4MoeConfig, {**_EXPERTS, **_HALF_A_HEAD, "n_routed_experts": 4}),
    "gpt-oss": (GptOssConfig, {**_HEADS, **_TWO_KINDS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llama4": (
        Llama4TextConfig,
        {
            **_FOUR_LAYERS,
            **_HEADS,
            "attention_chunk_size": _WINDOW,
            "no_rope_layers": [1, 1, 1, 0],
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 96,
        },
    ),
    "minimax-m2": (
        MiniMaxM2Config,
        {**_HEADS, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mistral-window": (MistralConfig, {"sliding_window": _WINDOW}),
    "olmo3": (Olmo3Config, _TWO_KINDS),
    "phi": (PhiConfig, {"partial_rotary_factor": 0.5}),
    "smollm3": (SmolLM3Config, {**_FOUR_LAYERS, "use_sliding_window": False}),
}
ARCHITECTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    **PLAIN,
    **{name: partial(kind, **{**TINY, **own}) for name, (kind, own) in OTHERS.items()},
}

LLAMAS = {  # hidden and intermediate size, layers, heads, heads of K and V
    "small": (256, 512, 4, 4, 2),  # about 3 M parameters
    "timing": (768, 2304, 14, 12, 4),  # about 100 M parameters
    "long": (768, 2304, 4, 12, 4),  # the same with fewer layers, for prompts of tens of thousands of tokens
}


_TIMED = ("cohere2", "gemma2", "gemma3", "glm4", "olmo3", "smollm3")


def tiny_model(
    name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, max_position_embeddings: int = 1024
) -> PreTrainedModel:
    """A random model of an architecture, with weights so large that attention is far from uniform."""
    torch.manual_seed(seed)
    config = ARCHITECTURES[name]()
    config.max_position_embeddings = max_position_embeddings
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # no types
    tiny: PreTrainedModel = _spread(model, 0.12).train(False)
    tiny.to(dtype)  # type: ignore[arg-type]  # wrapped without types
    return tiny


def llama_config(size: str, *, max_position_embeddings: int, vocab_size: int) -> LlamaConfig:
    """Of the "small", the "timing" or the "long" model."""
    hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads = LLAMAS[size]
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=size != "small",
        eos_token_id=None,
    )


def llama(size: str, *, max_position_embeddings: int, vocab_size: int, seed: int = 0) -> PreTrainedModel:
    """The "small" one's answers depend on the whole prompt; the others are large enough to time."""
    torch.manual_seed(seed)
    config = llama_config(size, max_position_embeddings=max_position_embeddings, vocab_size=vocab_size)
    model: PreTrainedModel = LlamaForCausalLM(config).train(False)  # type: ignore[no-untyped-call]  # no types
    return _spread(model, 0.08) if size == "small" else model


def timing_model(
    family: str, *, max_position_embeddings: int, vocab_size: int, seed: int = 0
) -> PreTrainedModel:
    """
    The "timing" Llama, or another family without experts in its size, windows of 1,024 tokens.

    Raises:  ConfigError for another family
    """
    if family == "llama":
        return llama(
            "timing", max_position_embeddings=max_position_embeddings, vocab_size=vocab_size, seed=seed
        )
    if family not in _TIMED:
        raise ConfigError("--family", f"expected llama or one of {', '.join(_TIMED)}, got {family!r}")
    kind, own = OTHERS[family]
    hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads = LLAMAS["timing"]
    sizes: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": max_position_embeddings,
    }
    if "sliding_window" in own:
        sizes["sliding_window"] = 1024
    if "layer_types" in own:
        sizes["layer_types"] = (own["layer_types"] * num_layers)[:num_layers]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**{**TINY, **own, **sizes}))  # type: ignore[no-untyped-call]
    found: PreTrainedModel = model.train(False)
    return found


def _spread(model: PreTrainedModel, std: float) -> PreTrainedModel:
    """Draw weights so large that attention is far from uniform and a token depends on the whole prompt."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.normal_(0.0, 1.0)
            elif "norm" not in name:
                parameter.normal_(0.0, std)  # biases too: Qwen2's are zero by default
    return model


def write_model(name: str, folder: Path, *, dtype: str, max_model_len: int, seed: int = 0) -> Path:
    """The "timing", the "long" or the "small" model. Returns its folder."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # no types
    model = llama(name, max_position_embeddings=max_model_len, vocab_size=DEMO_VOCAB_SIZE, seed=seed)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    for file in _FILES:
        shutil.copy(MODEL_PATH / file, folder)
    return folder


def timing_bytes_per_token(dtype: str) -> int:
    """K and V of one token of the timing model, all layers."""
    config: Any = llama_config("timing", max_position_embeddings=64, vocab_size=64)
    width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * width * getattr(torch, dtype).itemsize)
