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
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVQuantMode,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)

from kvshare.settings import SharedTierSettings
from kvshare.vllm_protocol.json_fields import Number

# Connectors that find KV by vLLM's hashes of blocks, which its salts are part of. By reading vLLM 0.32, as
# none of them runs without a GPU.
_BY_BLOCK_HASH = frozenset(
    {"HF3FSKVConnector", "MooncakeStoreConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"}
)
_AS_WITHOUT = "vLLM serves it as without KVShare, equal prefixes from its own cache"
_PLAIN_DTYPES = ("auto", "float16", "bfloat16", "float32", "half", "float")
_EIGHT_BITS = ("fp8", "fp8_e4m3", "fp8_e5m2")
_DATA_PARALLEL_ID = re.compile(r"_dp(\d+)$")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Defaults are those of `kvshare vllm`."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    control_host: Annotated[str, Field(strict=True)] = "127.0.0.1"
    control_port: Number = 8001  # 0: any free one; each data-parallel rank has one, they count up
    max_bytes: Number = 4 * 1024**3  # host memory for retained KV, over all ranks of an engine
    disk_path: Annotated[str, Field(strict=True, min_length=1)] | None = None  # folder for KV; None: no disk
    disk_bytes: Number = 0  # of an engine
    disk_write_bytes_per_s: Annotated[int, Field(strict=True, gt=0)] = 256 * 1024**2
    disk_keep_free_bytes: Number = 2 * 1024**3
    shared_tier: SharedTierSettings | None = None  # a store for KV that several vLLMs share; None: none
    data_parallel_size: Number = 1  # engines of this vLLM, which they do not know themselves
    step_tokens: Number = 0  # that sharing may compute in a step; 0: vLLM's own max_num_batched_tokens
    by_block_hash: tuple[str, ...] = ()  # other connectors that find KV by vLLM's hashes of blocks only
    beside: tuple[str, ...] | None = None  # the others, inside of `KVShareMultiConnector`, which gives them

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

    def unsupported_beside(self) -> list[str]:
        """Return why nothing is shared next to the other connectors; empty if all find KV by hashes."""
        return [
            f"{name} next to KVShare is not supported: it may find KV by its tokens alone, approximate KV "
            "too (if it goes by vLLM's block hashes only, name it in by_block_hash of kvshare's settings)"
            for name in dict.fromkeys(self.beside or ())
            if name not in _BY_BLOCK_HASH and name not in self.by_block_hash
        ]


def unsupported_reasons(config: VllmConfig, kv_cache: KVCacheConfig) -> list[str]:
    """Return why nothing can be shared with this configuration, each with what to change; empty if it can."""
    model = config.model_config
    if model.is_hybrid or model.is_attention_free:  # what is odd about its cache follows from that
        return known_reasons(config)
    return [*known_reasons(config), *_applying(_cache(config, kv_cache))]


def known_reasons(config: VllmConfig) -> list[str]:
    """List the reasons that are known before vLLM has planned its KV cache."""
    return _applying({**_platform_and_parallel(config), **_model(config)})


def _applying(checks: Mapping[str, bool]) -> list[str]:
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
    Return the data-parallel rank of this engine; None where a vLLM has a single engine.

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
        f"a recurrent model has no KV; {_AS_WITHOUT}": model.is_attention_free,
        f"a state of a hybrid model's recurrent layers fits one prefix only; {_AS_WITHOUT}": model.is_hybrid,
        "multi-head latent attention (MLA) is not supported: vLLM's CPU kernels only compute whole prompts, "
        "and GPU kernels were not tested": model.use_mla,
        "models without text as input are not supported": model.is_multimodal_raw_input_only_model,
    }


def _specs(kv_cache: KVCacheConfig) -> list[KVCacheSpec]:
    """List the first group's specs: one for all layers, or several if KV heads or head sizes differ."""
    specs = (group.kv_cache_spec for group in kv_cache.kv_cache_groups[:1])
    return [
        own
        for spec in specs
        for own in (spec.kv_cache_specs.values() if isinstance(spec, UniformTypeKVCacheSpecs) else (spec,))
    ]


def _cache(config: VllmConfig, kv_cache: KVCacheConfig) -> dict[str, bool]:
    groups = kv_cache.kv_cache_groups
    specs = _specs(kv_cache)
    kinds = sorted({type(spec).__name__ for spec in specs if type(spec) is not FullAttentionSpec})
    transfer = config.kv_transfer_config
    policy = transfer.kv_load_failure_policy if transfer is not None else "recompute"
    chunk = config.model_config.attention_chunk_size
    return {
        **_quantised(config, kv_cache),
        "the model has no KV cache": not groups,
        f"attention in chunks of {chunk} tokens is not supported: layers have kernels of their own": bool(
            chunk
        ),
        f"{len(groups)} KV cache groups are not supported: start with --disable-hybrid-kv-cache-manager": (
            len(groups) > 1
        ),
        "keys and values of different head sizes are not supported": any(
            getattr(spec, "head_size_v", None) not in (None, spec.head_size)
            for spec in specs
            if isinstance(spec, FullAttentionSpec)
        ),
        f"KV caches of kind {', '.join(kinds)} are not supported: vLLM frees blocks outside the window": bool(
            kinds
        ),
        "kv_load_failure_policy must be 'recompute': a failed load would fail the request": (
            policy != "recompute"
        ),
    }


def _quantised(config: VllmConfig, kv_cache: KVCacheConfig) -> dict[str, bool]:
    """
    Return the reasons against quantised caches, and whether each applies.

    The weights may ask vLLM for fp8 without a setting: so the specs count, too.
    """
    cache = config.cache_config
    modes = {getattr(spec, "kv_quant_mode", KVQuantMode.NONE) for spec in _specs(kv_cache)}
    is_fp8 = KVQuantMode.FP8_PER_TENSOR in (*modes, get_kv_quant_mode(cache.cache_dtype))
    skipped = ", ".join(map(str, getattr(cache, "kv_cache_dtype_skip_layers", None) or ()))
    return {
        f"quantised KV caches ({cache.cache_dtype}) are not supported, except fp8 (e4m3) and fp8_e5m2 with "
        "fixed scales": cache.cache_dtype not in (*_PLAIN_DTYPES, *_EIGHT_BITS)
        or not modes <= {KVQuantMode.NONE, KVQuantMode.FP8_PER_TENSOR},
        "fp8 KV caches are not supported on devices whose fp8 has no zero with a sign (fnuz)": is_fp8
        and current_platform.is_fp8_fnuz(),
        f"layers that keep their dtype ({skipped}) in an fp8 KV cache are not supported": is_fp8
        and bool(skipped),
    }
