"""
What makes the attention metadata of our passes: builders of vLLM's own, one for the layers that are alike.

They keep state between passes, so vLLM's own are not used.
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
    A builder and the names of its layers, for each backend and each shape of layers. With layers that have no
    KV of their own but attend to that of another one, whose metadata they get.
    """
    of_kind: dict[tuple[str, KVCacheSpec], tuple[Any, list[str]]] = {}
    for name, layer in cache.layers.items():
        own = spec.kv_cache_specs[name] if isinstance(spec, UniformTypeKVCacheSpecs) else spec
        backend = layer.get_attn_backend()
        of_kind.setdefault((backend.get_name(), own), (backend, []))[1].append(name)
    users = _users(config.compilation_config.static_forward_context)
    without_graphs = _without_graphs(config)
    builders = []
    with set_current_vllm_config(without_graphs):
        for (_, own), (backend, names) in of_kind.items():
            builder = backend.get_builder_cls()(
                own.copy_with_new_block_size(cache.kernel_block_size),
                list(names),
                without_graphs,
                cache.kv_layout.device,
            )
            builders.append((builder, [*names, *(user for name in names for user in users.get(name, ()))]))
    return builders


def _users(layers: Mapping[str, Any]) -> dict[str, list[str]]:
    """List for each layer the layers that attend to its KV and have none."""
    found: dict[str, list[str]] = {}
    for name, layer in layers.items():
        if (target := getattr(layer, "kv_sharing_target_layer_name", None)) is not None:
            found.setdefault(target, []).append(name)
    return found


def _without_graphs(config: VllmConfig) -> VllmConfig:
    """The configuration without CUDA graphs: our passes use none, so the builder needs no buffers."""
    changed, compilation = copy.copy(config), copy.copy(config.compilation_config)
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    changed.compilation_config = compilation
    return changed
