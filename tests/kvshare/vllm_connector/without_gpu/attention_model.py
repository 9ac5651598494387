"""
A model that is attention and little else, on vLLM's own attention layers, metadata builders and caches, for
any of its backends; and dense attention over the same tokens, which says what must come out.

Alphabet: L layers, T tokens, Q query heads, H kv heads, D head dim.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvshare.vllm_connector.worker.models import Models
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import PartialForward

NUM_LAYERS = 2  # keys of the second depend on what attention made of the first
NUM_BLOCKS = 64  # the scheduler's
KERNEL_BLOCK_SIZE = 16
MAX_RUNS = 4
VOCAB_SIZE = 100
POISON = 7.0  # what nobody has written

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Takes a layer's number, q (T, Q * D), k and v (T, H * D); gives (T, Q * D)."""


@dataclass(frozen=True)
class Case:
    """A model's shape, and how vLLM arranges its caches in memory."""

    memory: str = "LBNHC"  # a `KVCacheLayout`: NHD, vLLM's default on GPUs
    head_size: int = 64
    dtype: str = "float32"
    num_heads: int = 4
    num_kv_heads: int = 2
    block_size: int = KERNEL_BLOCK_SIZE  # the scheduler's


class AttentionModel(torch.nn.Module):
    """Called as vLLM's models are."""

    def __init__(self, case: Case, config: VllmConfig, backend: type[AttentionBackend]) -> None:
        super().__init__()
        self._case = case
        width, kv_width = case.num_heads * case.head_size, case.num_kv_heads * case.head_size
        self._widths = (width, kv_width, kv_width)
        random = torch.Generator().manual_seed(0)
        dtype = getattr(torch, case.dtype)

        def table(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random).to(dtype)

        self._tokens, self._places = table(VOCAB_SIZE, width), table(1024, width)
        # Some slots get most of the attention: a wrong one must not drown in an average.
        self._projections = table(NUM_LAYERS, width, sum(self._widths)) * (1.2 / width**0.5)
        with set_current_vllm_config(config):
            layers = [
                Attention(
                    case.num_heads,
                    case.head_size,
                    case.head_size**-0.5,
                    num_kv_heads=case.num_kv_heads,
                    cache_config=config.cache_config,
                    prefix=f"layers.{index}.attn",
                    attn_backend=backend,
                )
                for index in range(NUM_LAYERS)
            ]
        self.layers: Any = torch.nn.ModuleList(layers)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.run(input_ids, positions, lambda layer, q, k, v: self.layers[layer](q, k, v))

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        hidden = self._tokens[input_ids.long()] + self._places[positions]
        for layer in range(NUM_LAYERS):
            q, k, v = (hidden @ self._projections[layer]).split(self._widths, dim=-1)
            hidden = hidden / 2 + attend(layer, q, k, v)
        return hidden


@dataclass(frozen=True, eq=False)
class Dense:
    """Shapes:  k, v (L, T, H, D); output (L, T, Q, D), of the attention"""

    k: torch.Tensor
    v: torch.Tensor
    output: torch.Tensor


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """
    Causal, the last query sees all keys.

    Shapes:  q (T, Q, D); k, v (S, H, D) with S >= T -> (T, Q, D)
    """
    ahead = len(k) - len(q)
    k, v = (rows.repeat_interleave(q.shape[1] // rows.shape[1], dim=1).double() for rows in (k, v))
    scores = torch.einsum("tqd,sqd->qts", q.double(), k) / q.shape[-1] ** 0.5
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(ahead + 1)
    return torch.einsum("qts,sqd->tqd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v).to(q.dtype)


class Setting:
    """One case with a backend: the model, its caches, and our two classes over them."""

    def __init__(self, case: Case, backend: type[AttentionBackend], folder: Path) -> None:
        self.case = case
        self.config = vllm_config(case, folder)
        self.model = AttentionModel(case, self.config, backend)
        spec = FullAttentionSpec(
            block_size=case.block_size,
            num_kv_heads=case.num_kv_heads,
            head_size=case.head_size,
            dtype=getattr(torch, case.dtype),
        )
        for layer, view in zip(self.model.layers, caches(spec, case), strict=True):
            layer.kv_cache = view.fill_(POISON)
        self.cache = PagedCache(
            {layer.layer_name: layer for layer in self.model.layers}, block_size=case.block_size
        )
        self.forward = PartialForward(Models(self.model), self.cache, self.config, spec)

    def dense(self, token_ids: Sequence[int]) -> Dense:
        """What one pass over all tokens gives."""
        shape = (len(token_ids), -1, self.case.head_size)
        kept: list[list[torch.Tensor]] = [[], [], []]

        def attend(_: int, *projected: torch.Tensor) -> torch.Tensor:
            q, k, v = (rows.reshape(shape) for rows in projected)
            output = dense_attention(q, k, v)
            for where, rows in zip(kept, (k, v, output), strict=True):
                where.append(rows)
            return output.flatten(1)

        self.model.run(torch.tensor(token_ids), torch.arange(len(token_ids)), attend)
        return Dense(*map(torch.stack, kept))


def vllm_config(case: Case, folder: Path) -> VllmConfig:
    """Of a model that has this shape and no weights."""
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": case.num_heads * case.head_size,
        "head_dim": case.head_size,
        "num_attention_heads": case.num_heads,
        "num_key_value_heads": case.num_kv_heads,
        "num_hidden_layers": NUM_LAYERS,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 1024,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(described))
    options = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype=case.dtype,
        block_size=case.block_size,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        max_num_seqs=MAX_RUNS,
    )
    config = options.create_engine_config()
    # As on GPUs, where builders keep buffers for CUDA graphs: vLLM has none on CPUs.
    graphs = config.compilation_config
    graphs.cudagraph_mode, graphs.cudagraph_capture_sizes = CUDAGraphMode.FULL_AND_PIECEWISE, [1, 2, 4, 8]
    graphs.max_cudagraph_capture_size = 8
    config.cache_config.kv_cache_layout = case.memory
    config.attention_config.use_trtllm_attention = False  # vLLM would look for these kernels on a server
    return config


def caches(spec: FullAttentionSpec, case: Case) -> list[torch.Tensor]:
    """The layers' views (B, H, N, 2 D), arranged by vLLM."""
    layout = KVCacheLayout[case.memory]
    layer_stride, block_stride, *_ = compute_layout_strides(spec, NUM_BLOCKS, NUM_LAYERS, layout)
    size = spec.page_size_bytes * NUM_BLOCKS * NUM_LAYERS
    placed = KVCacheTensor(size, [str(layer) for layer in range(NUM_LAYERS)], layer_stride, block_stride)
    raw = torch.zeros(size, dtype=torch.int8)
    return list(create_kv_cache_views(raw, spec, NUM_BLOCKS, layout, placed, KERNEL_BLOCK_SIZE))
