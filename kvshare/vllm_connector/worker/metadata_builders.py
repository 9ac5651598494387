"""
Builders of the attention metadata of our passes: of vLLM's classes, one for each kind of layers.

Builders keep state between passes, so those of vLLM's own passes are not used.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.v1.kv_cache_interface import KVCacheSpec, UniformTypeKVCacheSpecs

from kvshare.vllm_connector.worker.paged_cache import PagedCache


def metadata_builders(
    cache: PagedCache, config: VllmConfig, spec: KVCacheSpec
) -> list[tuple[Any, list[str]]]:
    """
    Return a builder and the names of its layers, for each backend, each shape of layers and each number of
    query heads, as vLLM has them. A layer without its own KV is listed with the layer to whose KV it attends.
    """
    of_kind: dict[tuple[str, KVCacheSpec, int], tuple[Any, list[str]]] = {}
    for name, layer in cache.layers.items():
        layer_spec = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        backend = layer.get_attn_backend()
        kind = (backend.get_name(), layer_spec, int(getattr(layer, "num_heads", 0)))
        of_kind.setdefault(kind, (backend, []))[1].append(name)
    users = _users(config.compilation_config.static_forward_context)
    without_graphs = _without_graphs(config)
    builders = []
    with set_current_vllm_config(without_graphs):
        for (_, layer_spec, _), (backend, names) in of_kind.items():
            builder = backend.get_builder_cls()(
                layer_spec.copy_with_new_block_size(cache.kernel_block_size),
                list(names),
                without_graphs,
                cache.kv_layout.device,
            )
            builders.append((builder, [*names, *(user for name in names for user in users.get(name, ()))]))
    return builders


def _users(layers: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return for each layer the layers without KV that attend to its KV."""
    users: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if (target := getattr(layer, "kv_sharing_target_layer_name", None)) is not None:
            users.setdefault(target, []).append(name)
    return users


def _without_graphs(config: VllmConfig) -> VllmConfig:
    """Return the configuration without CUDA graphs: our passes use none, so builders need no buffers."""
    changed, compilation = copy.copy(config), copy.copy(config.compilation_config)
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    changed.compilation_config = compilation
    return changed
