"""
Stand-ins in torch for the CUDA kernels below vLLM's FlashAttention backend.

The demands on attention are the checks of `mha_fwd` and `mha_fwd_get_scheduler_metadata` in
vllm-project/flash-attention, hopper/flash_api.cpp; beside them stands what that code relies on unchecked.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends import flash_attn

from tests.kvshare.vllm_connector.without_gpu.attention_model import dense_attention
from tests.kvshare.vllm_connector.without_gpu.demands import demand, write

_INT32 = torch.int32
_FLOATS = (torch.float16, torch.bfloat16)
_ALIGNED = 16  # bytes: what TMA wants of every stride but the last


@dataclass
class Kernels:
    """`max_num_seqs`: how many rows of a block table vLLM's buffers have."""

    max_num_seqs: int
    batches: list[int] = field(default_factory=list)  # sequences of each schedule
    num_attended: int = 0  # calls of the attention kernel

    @contextmanager
    def installed(self) -> Iterator[None]:
        """In vLLM's modules, as on an H100: FlashAttention 3."""
        package, extension = "vllm.vllm_flash_attn", "_vllm_fa3_C"
        namespace = SimpleNamespace(fwd=self.attend, get_scheduler_metadata=self.schedule)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.ops, extension, namespace, raising=False)
            patch.setitem(sys.modules, f"{package}.{extension}", ModuleType(extension))
            interface = importlib.import_module(f"{package}.flash_attn_interface")
            # What the backend imports where there is CUDA:
            for name in ("flash_attn_varlen_func", "get_scheduler_metadata"):
                patch.setattr(flash_attn, name, getattr(interface, name), raising=False)
            patch.setattr(flash_attn, "reshape_and_cache_flash", write, raising=False)
            patch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
            yield
        for name in [name for name in sys.modules if name.startswith(package)]:
            del sys.modules[name]  # it believes that there is CUDA

    def schedule(self, batch_size: int, max_query_len: int, max_seq_len: int, *rest: Any) -> torch.Tensor:
        """`get_scheduler_metadata`: who does what, decided once for all layers."""
        num_heads, num_kv_heads, head_size, head_size_v, dtype, seq_lens, starts = rest[:7]
        page_size, causal, num_splits = rest[11], rest[13], rest[17]
        demand(dtype in _FLOATS, "fp16 or bf16")
        demand(num_heads % num_kv_heads == 0 and head_size == head_size_v, "whole groups of heads")
        demand(page_size == 16, "the page size is the kernel's block size")
        demand(causal is True, "runs are causal")
        demand(0 <= num_splits <= 256, "at most 256 splits")
        check_lengths(starts, seq_lens, max_query_len, max_seq_len)
        demand(batch_size == len(seq_lens) <= self.max_num_seqs, "rows fit vLLM's buffers")
        self.batches.append(batch_size)
        metadata = torch.full((1 + (batch_size + 3) // 4 * 4 * 3,), batch_size, dtype=_INT32)
        metadata[1:] = torch.arange(1, len(metadata))
        return metadata

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[Any, ...]:
        """`fwd`: q (T, Q, D), k and v (B, N, H, D) pages, into `out` (T, Q, D)."""
        out, starts, cu_seqlens_k, seq_lens = rest[3], rest[4], rest[5], rest[8]
        max_query_len, max_seq_len, table = rest[9:12]
        descales, (scale, causal, left, right, softcap) = rest[17:20], rest[20:25]
        metadata = rest[26]
        demand(cu_seqlens_k is None and table is not None, "keys are paged")
        demand(causal is True and (left, right, softcap) == (-1, -1, 0.0), "plain causal attention")
        demand(len({rows.dtype for rows in (q, k, v, out)} - {*_FLOATS}) == 0, "fp16 or bf16")
        demand(len({rows.dtype for rows in (q, k, v, out)}) == 1, "one dtype")
        for rows in (q, k, v, out):
            demand(rows.stride(-1) == 1, "a unit last stride")
            strides = (stride * rows.element_size() for stride in rows.stride()[:-1])
            demand(all(stride % _ALIGNED == 0 for stride in strides), "strides of whole 16 bytes")
        demand(k.shape == v.shape and k.stride() == v.stride(), "K and V lie alike")
        demand(q.shape[-2] % k.shape[-2] == 0 and q.shape == out.shape, "whole groups of heads")
        check_lengths(starts, seq_lens, max_query_len, max_seq_len)
        check_table(table, seq_lens, k)
        demand(int(starts[-1]) == len(q), "a query for every row")
        demand(len(seq_lens) <= self.max_num_seqs, "rows fit vLLM's buffers")
        for descale in descales:
            demand(descale.shape == (len(seq_lens), k.shape[-2]), "a scale per sequence and head")
        demand(metadata.dtype == _INT32 and metadata.is_contiguous(), "an int32 schedule")
        demand(bool(self.batches) and int(metadata[0]) == self.batches[-1], "the schedule of this batch")
        demand(scale == q.shape[-1] ** -0.5, "the layer's scale")
        for row, (start, end, length) in enumerate(
            zip(starts[:-1].tolist(), starts[1:].tolist(), seq_lens.tolist(), strict=True)
        ):
            pages = table[row, : -(-length // k.shape[1])].long()
            keys, values = (rows[pages].flatten(0, 1)[:length] for rows in (k, v))
            out[start:end] = dense_attention(q[start:end], keys, values)
        self.num_attended += 1
        return out, None, None, None


def check_lengths(starts: torch.Tensor, seq_lens: torch.Tensor, max_query_len: int, max_seq_len: int) -> None:
    for numbers in (starts, seq_lens):
        demand(numbers.dtype == _INT32 and numbers.is_contiguous(), "contiguous int32 lengths")
    demand(starts.shape == (len(seq_lens) + 1,) and int(starts[0]) == 0, "starts from 0, one more than rows")
    lengths = starts.diff()
    demand(bool((lengths >= 0).all()), "starts never decrease")
    demand(type(max_query_len) is int and max_query_len == int(lengths.max()), "the longest query")
    demand(type(max_seq_len) is int and max_seq_len == int(seq_lens.max()), "the longest sequence")
    demand(bool((lengths <= seq_lens).all()), "a run is the end of what it sees")


def check_table(table: torch.Tensor, seq_lens: torch.Tensor, k: torch.Tensor) -> None:
    num_pages, page_size = k.shape[:2]
    demand(table.dtype == _INT32 and table.stride(-1) == 1, "an int32 block table, rows contiguous")
    demand(len(table) == len(seq_lens), "a row of the table per sequence")
    demand(bool((seq_lens <= table.shape[1] * page_size).all()), "a table as wide as the longest sequence")
    demand(bool(((table >= 0) & (table < num_pages)).all()), "pages that there are")
