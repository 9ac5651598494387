"""
Stand-ins in torch for the `flashinfer` package, which is for GPUs only, and vLLM's backend upon them. What a
wrapper is planned with are a batch's pages as one list, with the range of each sequence.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.kvshare.vllm_connector.without_gpu.attention_model import dense_attention
from tests.kvshare.vllm_connector.without_gpu.demands import demand, write

planned: list[tuple[str, int]] = []  # of which kind, and how many sequences


class _Paged:
    """What both kinds of wrapper have in common."""

    kind: str

    def __init__(self, workspace: torch.Tensor, kv_layout: str, **options: Any) -> None:
        demand(workspace.dtype == torch.uint8, "a workspace of bytes")
        demand(options["backend"] in ("auto", "fa2"), "kernels of its own")
        self._kv_layout = kv_layout
        self.is_cuda_graph_enabled = bool(options.get("use_cuda_graph"))

    def _plan(self, starts: torch.Tensor, indptr: torch.Tensor, pages: torch.Tensor, **options: Any) -> None:
        last, lengths, size = options["last_page_len"], options["seq_lens"], options["page_size"]
        num_pages = indptr.diff()
        for numbers in (starts, indptr, last, lengths, pages):
            demand(numbers.dtype == torch.int32 and numbers.is_contiguous(), "contiguous int32")
        demand(
            len(starts) == len(indptr) == len(last) + 1 == len(lengths) + 1, "as many of each as sequences"
        )
        demand(int(indptr[-1]) <= len(pages), "pages for all")
        demand(bool(((last >= 1) & (last <= size)).all()), "a last page that is used")
        demand(torch.equal((num_pages - 1) * size + last, lengths), "lengths as the pages are filled")
        demand(bool((starts.diff() <= lengths).all()), "a run is the end of what it sees")
        self._starts, self._indptr, self._pages, self._lengths = starts, indptr, pages, lengths
        self._window_left, self._sm_scale = options["window_left"], options["sm_scale"]
        self._logits_soft_cap = options["logits_soft_cap"] or 0.0
        self._page_size = size
        planned.append((self.kind, len(last)))

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], **options: Any) -> None:
        out = options["out"]
        k, v = (rows if self._kv_layout == "NHD" else rows.transpose(1, 2) for rows in kv)  # (B, N, H, D)
        demand(len(q) == len(out) == int(self._starts[-1]), "a query for every row")
        demand(k.shape[1] == self._page_size, "pages of the planned size")
        demand(
            (options["q_scale"], options["k_scale"], options["v_scale"]) == (1, 1, 1), "nothing is quantised"
        )
        for row, length in enumerate(self._lengths.tolist()):
            pages = self._pages[self._indptr[row] : self._indptr[row + 1]].long()
            part = slice(int(self._starts[row]), int(self._starts[row + 1]))
            out[part] = dense_attention(q[part], *(rows[pages].flatten(0, 1)[:length] for rows in (k, v)))


class _NotTried:
    """Wrappers of which vLLM asks whether it has one."""


class _Prefill(_Paged):
    kind = "prefill"

    def plan(self, *, qo_indptr: torch.Tensor, causal: bool, **options: Any) -> None:
        demand(causal is True, "runs are causal")
        self._causal = causal
        indptr, pages = options["paged_kv_indptr"], options["paged_kv_indices"]
        # A part of a batch: its page ranges begin where the decodes' end.
        demand(int(qo_indptr[0]) == 0, "queries from 0")
        self._plan(qo_indptr, indptr, pages, last_page_len=options["paged_kv_last_page_len"], **options)


class _Decode(_Paged):
    kind = "decode"

    def plan(self, *, indptr: torch.Tensor, indices: torch.Tensor, **options: Any) -> None:
        starts = torch.arange(len(indptr), dtype=torch.int32)  # one query each
        self._plan(starts, indptr, indices, **options)


def _seq_lens(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    return (indptr.diff() - 1) * page_size + last_page_len


def _install() -> None:
    """As an installed package, and the operator that vLLM's CPU build has not."""
    contents: dict[str, dict[str, Any]] = {
        "flashinfer": {
            "BatchAttentionWithAttentionSinkWrapper": _NotTried,
            "BatchDecodeWithPagedKVCacheWrapper": _Decode,
            "BatchPrefillWithPagedKVCacheWrapper": _Prefill,
            "BatchPrefillWithRaggedKVCacheWrapper": _NotTried,
            "get_seq_lens": _seq_lens,
            "nvfp4_quantize_append_paged_kv_cache_with_slot_mapping": None,
        },
        "flashinfer.decode": {
            "fast_decode_plan": lambda wrapper, **options: wrapper.plan(**options),
            "trtllm_batch_decode_with_kv_cache": None,
        },
        "flashinfer.prefill": {"trtllm_batch_context_with_kv_cache": None},
        "flashinfer.utils": {  # the functions since vLLM 0.33, for TensorRT-LLM's kernels
            "FP4Tensor": object,
            "get_device_sm_count": lambda _: 0,
            "get_trtllm_gen_multi_ctas_kv_counter_bytes": lambda *_: 0,
        },
    }
    for name, attributes in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, is_package=name == "flashinfer")
        vars(module).update(attributes)
        sys.modules[name] = module
    vars(torch.ops)["_C_cache_ops"] = SimpleNamespace(reshape_and_cache_flash=write)


_install()

from vllm.v1.attention.backends import flashinfer  # noqa: E402  needs the package

FlashInferBackend = flashinfer.FlashInferBackend
flashinfer._get_multi_ctas_kv_counter_buffer = lambda *_: None  # since vLLM 0.33; it would be on a GPU
