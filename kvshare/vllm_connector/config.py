"""
What the connector reads from vLLM's configuration: its own settings, and what of it is not supported.

The settings are `kv_connector_extra_config["kvshare"]` of `--kv-transfer-config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

_DATA_PARALLEL_ID = re.compile(r"_dp\d+$")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Defaults are those of `kvshare vllm`."""

    control_host: str = "127.0.0.1"
    control_port: int = 8001  # 0: any free one
    max_bytes: int = 4 * 1024**3  # host memory for retained KV, over all ranks

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> Self:
        """Raises ValueError, naming the key and what was expected."""
        given = extra.get("kvshare", {})
        if not isinstance(given, Mapping):
            raise ValueError(
                f"kv_connector_extra_config.kvshare: expected an object, got {type(given).__name__}"
            )
        types = {field.name: str if field.name == "control_host" else int for field in fields(cls)}
        for name, value in given.items():
            if name not in types:
                raise ValueError(
                    f"kv_connector_extra_config.kvshare.{name}: unknown; expected one of {', '.join(types)}"
                )
            if type(value) is not types[name] or (isinstance(value, int) and value < 0):
                raise ValueError(
                    f"kv_connector_extra_config.kvshare.{name}: expected "
                    f"{'text' if types[name] is str else 'a whole number of at least 0'}, got {value!r}"
                )
        return cls(**given)


def unsupported_reasons(config: VllmConfig, kv_cache: KVCacheConfig) -> list[str]:
    """Why nothing can be shared with this configuration; empty if it can. Each names what to change."""
    checks = [*_platform_and_parallel(config), *_model(config), *_cache(config, kv_cache)]
    return [message for applies, message in checks if applies]


def _platform_and_parallel(config: VllmConfig) -> list[tuple[bool, str]]:
    parallel = config.parallel_config
    is_known = current_platform.is_cpu() or current_platform.is_cuda_alike()
    return [
        (not is_known, f"{current_platform.device_name} devices are not supported"),
        (
            parallel.pipeline_parallel_size > 1,
            "pipeline parallelism is not supported (use tensor parallelism)",
        ),
        (
            _is_one_of_many(config),
            "data parallelism in one vLLM is not supported (start several, and give the proxy each)",
        ),
        (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "context parallelism is not supported",
        ),
    ]


def _is_one_of_many(config: VllmConfig) -> bool:
    """
    Whether this engine has siblings in the same vLLM.

    vLLM 0.32 sets the size back to 1 for a model without experts before it makes the connector. What is left
    is the rank at the end of the engine's id.
    """
    transfer = config.kv_transfer_config
    engine_id = str(transfer.engine_id) if transfer is not None else ""
    return config.parallel_config.data_parallel_size > 1 or _DATA_PARALLEL_ID.search(engine_id) is not None


def _model(config: VllmConfig) -> list[tuple[bool, str]]:
    model = config.model_config
    window = model.get_sliding_window()
    return [
        (model.runner_type == "pooling", "pooling models generate nothing"),
        (model.is_encoder_decoder, "encoder-decoder models are not supported"),
        (model.is_attention_free, "recurrent models have no KV cache"),
        (model.is_hybrid, "hybrid models with recurrent layers are not supported"),
        (model.use_mla, "multi-head latent attention (MLA) is not supported"),
        (window is not None, f"sliding window attention ({window} tokens) is not supported"),
        (model.is_multimodal_model, "multimodal models are not supported"),
        (model.enable_prompt_embeds, "prompt embeddings (--enable-prompt-embeds) are not supported"),
        # Its kernels would take the adapters of vLLM's batch for those of our pass, and write out of bounds.
        (config.lora_config is not None, "LoRA adapters (--enable-lora) are not supported"),
        (config.speculative_config is not None, "speculative decoding is not supported"),
    ]


def _cache(config: VllmConfig, kv_cache: KVCacheConfig) -> list[tuple[bool, str]]:
    groups = kv_cache.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    dtype = config.cache_config.cache_dtype
    quantised = dtype not in ("auto", "float16", "bfloat16", "float32", "half", "float")
    return [
        (quantised, f"quantised KV caches ({dtype}) are not supported"),
        (not groups, "the model has no KV cache"),
        (len(groups) > 1, f"{len(groups)} KV cache groups: only plain full attention is supported"),
        (
            spec is not None and type(spec) is not FullAttentionSpec,
            f"KV caches of kind {type(spec).__name__} are not supported",
        ),
        (
            config.kv_transfer_config is not None
            and config.kv_transfer_config.kv_load_failure_policy != "recompute",
            "kv_load_failure_policy must be 'recompute': a failed load would fail the request",
        ),
    ]
