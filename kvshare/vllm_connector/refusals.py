"""What is not supported, told from vLLM's configuration. vLLM then serves as if we were not there."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig


def refusals(config: VllmConfig, kv_cache: KVCacheConfig) -> list[str]:
    """Why nothing can be shared with this configuration; empty if it can. Each names what to change."""
    return [
        message
        for message in (
            *_parallel(config.parallel_config),
            *_model(config),
            *_compilation(config),
            *_cache(config, kv_cache),
        )
        if message is not None
    ]


def _parallel(parallel: Any) -> list[str | None]:
    return [
        _when(
            parallel.pipeline_parallel_size > 1,
            "pipeline parallelism is not supported (use tensor parallelism)",
        ),
        _when(
            parallel.data_parallel_size > 1, "data parallelism in one vLLM is not supported (start replicas)"
        ),
        _when(
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism is not supported",
        ),
    ]


def _compilation(config: VllmConfig) -> list[str | None]:
    passes = getattr(config.compilation_config, "pass_config", None)
    return [
        _when(
            bool(getattr(passes, "enable_sp", False)),
            "sequence parallelism (enable_sp) is not supported: it needs padded token counts",
        )
    ]


def _model(config: VllmConfig) -> list[str | None]:
    model = config.model_config
    window = model.get_sliding_window()
    return [
        _when(model.runner_type == "pooling", "pooling models generate nothing"),
        _when(model.is_encoder_decoder, "encoder-decoder models are not supported"),
        _when(model.is_attention_free, "recurrent models have no KV cache"),
        _when(model.is_hybrid, "hybrid models with recurrent layers are not supported"),
        _when(model.use_mla, "multi-head latent attention (MLA) is not supported"),
        _when(window is not None, f"sliding window attention ({window} tokens) is not supported"),
        _when(config.speculative_config is not None, "speculative decoding is not supported"),
    ]


def _cache(config: VllmConfig, kv_cache: KVCacheConfig) -> list[str | None]:
    groups = kv_cache.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    dtype = config.cache_config.cache_dtype
    quantised = dtype not in ("auto", "float16", "bfloat16", "float32", "half", "float")
    return [
        _when(quantised, f"quantised KV caches ({dtype}) are not supported"),
        _when(not groups, "the model has no KV cache"),
        _when(len(groups) > 1, f"{len(groups)} KV cache groups: only plain full attention is supported"),
        _when(
            spec is not None and type(spec) is not FullAttentionSpec,
            f"KV caches of kind {type(spec).__name__} are not supported",
        ),
        _when(
            config.kv_transfer_config is not None
            and config.kv_transfer_config.kv_load_failure_policy != "recompute",
            "kv_load_failure_policy must be 'recompute': a failed load would fail the request",
        ),
    ]


def _when(condition: bool, message: str) -> str | None:
    return message if condition else None
