"""
What the connector reads from vLLM's configuration: its own settings, and what of it is not supported.

The settings are `kv_connector_extra_config["kvshare"]` of `--kv-transfer-config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Self

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from kvshare.vllm_protocol.json_fields import Number

_DATA_PARALLEL_ID = re.compile(r"_dp(\d+)$")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Defaults are those of `kvshare vllm`."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    control_host: Annotated[str, Field(strict=True)] = "127.0.0.1"
    control_port: Number = 8001  # 0: any free one; each data-parallel rank has one, they count up
    max_bytes: Number = 4 * 1024**3  # host memory for retained KV, over all ranks of an engine
    data_parallel_size: Number = 1  # engines of this vLLM, which they do not know themselves
    step_tokens: Number = 0  # that sharing may compute in a step; 0: vLLM's own max_num_batched_tokens

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, Any]) -> Self:
        """Raises ValueError, naming the key and what was expected. What was given is not quoted."""
        try:
            settings: Self = TypeAdapter(cls).validate_python(extra.get("kvshare", {}))
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            place = ".".join(("kv_connector_extra_config.kvshare", *map(str, first["loc"])))
            known = ", ".join(field.name for field in fields(cls))
            raise ValueError(f"{place}: {first['msg']}; its keys are {known}") from None
        return settings


def unsupported_reasons(config: VllmConfig, kv_cache: KVCacheConfig) -> list[str]:
    """Reasons why nothing can be shared with this configuration, each with what to change; empty if none."""
    checks = {**_platform_and_parallel(config), **_model(config), **_cache(config, kv_cache)}
    return [message for message, applies in checks.items() if applies]


def _platform_and_parallel(config: VllmConfig) -> dict[str, bool]:
    parallel = config.parallel_config
    is_known = current_platform.is_cpu() or current_platform.is_cuda_alike()
    in_contexts = max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size)
    return {
        f"{current_platform.device_name} devices are not supported": not is_known,
        "pipeline parallelism is not supported (use tensor parallelism)": parallel.pipeline_parallel_size > 1,
        # Its ranks run each forward pass together: a pass of ours would wait for ranks that have none to run.
        "data parallelism of a model with experts is not supported (start several vLLMs, and give the proxy "
        "each)": parallel.data_parallel_size > 1,
        "data parallelism with several API servers of different ranks is not supported (start several vLLMs, "
        "and give the proxy each)": parallel.data_parallel_hybrid_lb
        and data_parallel_rank(config) is not None,
        "context parallelism is not supported": in_contexts > 1,
    }


def data_parallel_rank(config: VllmConfig) -> int | None:
    """
    The data-parallel rank of this engine; None where a vLLM has a single engine.

    For a model without experts vLLM 0.32 resets data_parallel_size to 1 before it creates the connector. Two
    signs of the rank are left: the index, and the same index at the end of the engine's id. A user's own id
    may look like that, so both must agree.
    """
    transfer, index = config.kv_transfer_config, int(config.parallel_config.data_parallel_index)
    suffix = _DATA_PARALLEL_ID.search(str(transfer.engine_id)) if transfer is not None else None
    return index if suffix is not None and int(suffix[1]) == index else None


def _model(config: VllmConfig) -> dict[str, bool]:
    model = config.model_config
    return {
        "pooling models generate nothing": model.runner_type == "pooling",
        "encoder-decoder models are not supported": model.is_encoder_decoder,
        "recurrent models have no KV cache": model.is_attention_free,
        "hybrid models with recurrent layers are not supported": model.is_hybrid,
        "multi-head latent attention (MLA) is not supported: vLLM's CPU kernels only compute whole prompts, "
        "and GPU kernels were not tested": model.use_mla,
        "multimodal models are not supported": model.is_multimodal_model,
        "prompt embeddings (--enable-prompt-embeds) are not supported": model.enable_prompt_embeds,
        # LoRA kernels would use the adapters of vLLM's own batch in our pass, and write out of bounds.
        "LoRA adapters (--enable-lora) are not supported": config.lora_config is not None,
        "speculative decoding is not supported": config.speculative_config is not None,
    }


def _cache(config: VllmConfig, kv_cache: KVCacheConfig) -> dict[str, bool]:
    groups = kv_cache.kv_cache_groups
    kind = type(groups[0].kv_cache_spec) if groups else FullAttentionSpec
    transfer = config.kv_transfer_config
    policy = transfer.kv_load_failure_policy if transfer is not None else "recompute"
    dtype = config.cache_config.cache_dtype
    chunk = config.model_config.attention_chunk_size
    plain_dtypes = ("auto", "float16", "bfloat16", "float32", "half", "float")
    return {
        f"quantised KV caches ({dtype}) are not supported": dtype not in plain_dtypes,
        "the model has no KV cache": not groups,
        f"attention in chunks of {chunk} tokens is not supported: layers have kernels of their own": bool(
            chunk
        ),
        f"{len(groups)} KV cache groups are not supported: start with --disable-hybrid-kv-cache-manager": (
            len(groups) > 1
        ),
        f"KV caches of kind {kind.__name__} are not supported: vLLM frees blocks outside the window": (
            kind is not FullAttentionSpec
        ),
        "kv_load_failure_policy must be 'recompute': a failed load would fail the request": (
            policy != "recompute"
        ),
    }
