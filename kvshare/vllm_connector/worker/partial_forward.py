"""
Partial attention in stock vLLM: every run is a sequence of its own over the request's block table.

Paged attention takes a block table, a query length and a sequence length per sequence, and aligns the causal
mask to the sequence's end. So a run [a, b) becomes a sequence with

    block table   of the request          queries    positions a .. b-1
    query_len     b - a                   attends    to slots 0 .. b-1, causally inside the run
    seq_len       b

A layer writes all new K and V before it attends, so later runs attend to earlier ones of the same pass. One
forward pass over all runs of all requests of a step is therefore exact, with every backend.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec

from delta_tree import Span
from kvshare.kv.layout import ALL_EARLIER, PLAIN, AttentionForm, Reach
from kvshare.kv.listening import Listener, ListeningRows, placed
from kvshare.kv.to_device import to_device
from kvshare.vllm_connector.metadata import Tokens
from kvshare.vllm_connector.worker.block_layout import ADDRESSABLE
from kvshare.vllm_connector.worker.paged_cache import PagedCache

# The dtype of vLLM's own buffer of token ids. A compiled model reads its input as the dtype it was traced
# with, and vLLM drops the guards that would notice another one: of int64 ids, it would read every other one
# as 0.
_TOKEN_DTYPE = np.int32
_MULTIPLIED = {torch.float16, torch.bfloat16, torch.float32}  # by our kernels


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a request's positions to compute, with its block table and token ids."""

    block_ids: tuple[int, ...]
    span: Span
    token_ids: Tokens  # the request's, from position 0 on
    shift: int = 0  # added to the positions that the model sees; slots stay as they are
    listener: Listener | None = None  # records what some of the rows attend to


def split(runs: Sequence[Run], max_tokens: int, max_runs: int = sys.maxsize) -> Iterator[list[Run]]:
    """
    Passes of at most `max_tokens` tokens and `max_runs` runs. Runs of a request come from left to right, so
    that all that a run attends to is computed in its own pass or an earlier one.
    """
    batch: list[Run] = []
    room = max_tokens
    for run in runs:
        start = run.span.start
        while start < run.span.end:
            if not room or len(batch) == max_runs:
                yield batch
                batch, room = [], max_tokens
            part = Span(start, min(run.span.end, start + room))
            batch.append(replace(run, span=part))
            room -= len(part)
            start = part.end
    if batch:
        yield batch


Watch = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Called with a layer's number, and the queries and outputs of its attention in a pass, (N, H_q, D) each."""


class PartialForward:
    """Computes runs with vLLM's model. It has its own metadata builder, because those keep state."""

    _may_use_kernels = True

    def __init__(
        self, model: torch.nn.Module, cache: PagedCache, vllm_config: VllmConfig, spec: KVCacheSpec
    ) -> None:
        self._model = model
        self._cache = cache
        self._config = vllm_config
        self._max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._max_runs = vllm_config.scheduler_config.max_num_seqs  # backends have buffers for that many
        backend = next(iter(cache.layers.values())).get_attn_backend()
        self.backend_name: str = backend.get_name()
        without_graphs = _without_graphs(vllm_config)
        with set_current_vllm_config(without_graphs):
            self._builder = backend.get_builder_cls()(
                spec.copy_with_new_block_size(cache.kernel_block_size),
                list(cache.layers),
                without_graphs,
                cache.kv_layout.device,
            )

    @property
    def _impls(self) -> list[Any]:
        return [layer.impl for layer in self._cache.layers.values()]

    def scaling(self, layer: int) -> float:
        """The factor of a layer's attention scores."""
        return float(self._impls[layer].scale)

    def form(self, layer: int) -> AttentionForm:
        """Window, soft cap and sinks of a layer's attention, as its implementation has them."""
        impl = self._impls[layer]
        window = getattr(impl, "sliding_window", None)
        if isinstance(window, tuple):  # FlashAttention has (number of earlier slots, of later slots)
            window = window[0] + 1
        reach = Reach(int(window)) if window is not None and window > 0 else ALL_EARLIER
        softcap, sinks = getattr(impl, "logits_soft_cap", None) or None, getattr(impl, "sinks", None)
        return (
            PLAIN
            if (reach, softcap, sinks) == (ALL_EARLIER, None, None)
            else AttentionForm(reach, softcap, sinks)
        )

    def compute(
        self, runs: Sequence[Run], *, watching: Callable[[Sequence[Run]], Watch] | None = None
    ) -> None:
        """
        Compute the KV of all runs into their slots.

        `watching` is called with the runs of each pass in the order of rows; its result is called in each
        layer.
        """
        for batch in split(runs, self._max_tokens, self._max_runs):
            # Some backends treat short queries separately and expect them first. The result does not change.
            ordered = sorted(batch, key=lambda run: len(run.span))
            with self._watched(watching(ordered)) if watching is not None else nullcontext():
                self._forward(ordered)

    def listening(self, runs: Sequence[Run]) -> Watch:
        """Shows the runs' listeners what their rows attend to; a `watching` for `compute`."""
        places = placed([run.span for run in runs])
        listening = []
        for listener, block_ids in {run.listener: run.block_ids for run in runs}.items():
            if listener is not None:
                heard = (place for place, run in zip(places, runs, strict=True) if run.listener is listener)
                if rows := listener.rows_of(heard):
                    listening.append((rows, self._cache.table(block_ids, rows.end)))

        def watch(layer: int, query: torch.Tensor, _: torch.Tensor) -> None:
            for rows, table in listening:
                self.observe(rows, table, layer, query)

        return watch

    def simplify(self) -> bool:
        """Listen without our own kernels. Returns whether that is another way than before."""
        had_own, self._may_use_kernels = self._may_use_kernels, False
        return had_own and self._cache.kv_layout.device.type == "cuda"

    def observe(self, rows: ListeningRows, table: torch.Tensor, layer: int, query: torch.Tensor) -> None:
        """
        Add what rows of a pass attend to in a layer; on a GPU, where possible, by kernels of our own.

        Shapes:  query (N, H_q, D) of all rows of the pass; table as of `PagedCache.keys`, of [0, rows.end)
        """
        scaling, form = self.scaling(layer), self.form(layer)
        kernels = listening_kernels(self._cache, query) if self._may_use_kernels else None
        if form is PLAIN and kernels is not None:
            kernels.listen(rows, layer, query, self._cache.caches[layer], table, scaling=scaling)
            return
        keys = self._cache.keys(layer, table, rows.end).transpose(0, 1)
        rows.observe(layer, query.transpose(0, 1), keys, scaling=scaling, form=form)

    @contextmanager
    def _watched(self, watch: Watch) -> Iterator[None]:
        """
        Wrap the attention kernels of all layers. This works with compiled models, because vLLM calls kernels
        through an opaque operator. Kernels that write the cache themselves have written it when `watch` is
        called.
        """

        def standing_in(index: int, kernel: Callable[..., Any]) -> Callable[..., Any]:
            def forward(
                layer: Any, query: torch.Tensor, *rest: Any, output: torch.Tensor, **options: Any
            ) -> Any:
                result = kernel(layer, query, *rest, output=output, **options)
                watch(index, query, output.view_as(query))
                return result

            return forward

        for index, impl in enumerate(self._impls):
            impl.forward = standing_in(index, impl.forward)
        try:
            yield
        finally:
            for impl in self._impls:
                del impl.forward  # the class's own method is in effect again

    def _forward(self, runs: Sequence[Run]) -> None:
        token_ids, positions, slots, metadata = self._inputs(runs)
        names = list(self._cache.layers)
        with (
            torch.inference_mode(),
            set_forward_context(
                dict.fromkeys(names, self._builder.build(0, metadata)),
                self._config,
                num_tokens=len(token_ids),
                slot_mapping=dict.fromkeys(names, slots),
            ),
        ):
            self._model(
                input_ids=token_ids, positions=positions, intermediate_tensors=None, inputs_embeds=None
            )

    def _inputs(
        self, runs: Sequence[Run]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, CommonAttentionMetadata]:
        """Token ids, positions, slots and attention metadata of a pass, in one copy to the device."""
        spans = [run.span for run in runs]
        lengths = np.array([len(span) for span in spans], np.int32)
        starts = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        ends = np.array([span.end for span in spans], np.int32)
        blocks = [self._cache.kernel_blocks(run.block_ids, Span(0, run.span.end)) for run in runs]
        table = np.zeros((len(runs), max(map(len, blocks))), np.int32)
        for row, run_blocks in zip(table, blocks, strict=True):
            row[: len(run_blocks)] = run_blocks
        token_ids, positions, slots, on_device, seq_lens, block_table = to_device(
            self._cache.kv_layout.device,
            np.concatenate(
                [run.token_ids[run.span.start : run.span.end] for run in runs], dtype=_TOKEN_DTYPE
            ),
            np.concatenate([np.arange(run.span.start, run.span.end) + run.shift for run in runs]),
            np.concatenate([self._cache.slot_numbers(run.block_ids, run.span) for run in runs]),
            starts,
            ends,
            table,
        )
        metadata = CommonAttentionMetadata(
            query_start_loc=on_device,
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=seq_lens,
            num_reqs=len(runs),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(lengths.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=block_table,
            slot_mapping=slots,
            causal=True,
            positions=positions,
            is_prefilling=torch.ones(len(runs), dtype=torch.bool),
            seq_lens_cpu_upper_bound=torch.from_numpy(ends),
        )
        return token_ids, positions, slots, metadata


def listening_kernels(cache: PagedCache, query: torch.Tensor) -> Any:
    """Their module, which imports Triton; None where that is not, or they cannot run."""
    if query.device.type != "cuda" or cache.layout != ADDRESSABLE:
        return None
    if query.dtype != cache.kv_layout.dtype or query.dtype not in _MULTIPLIED:
        return None  # keys of 8 bits
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        return None
    from kvshare.vllm_connector.worker import listening_kernels as kernels

    return kernels if kernels.has_room(query.device) else None


def _without_graphs(config: VllmConfig) -> VllmConfig:
    """The configuration without CUDA graphs: our passes use none, so the builder needs no buffers."""
    changed, compilation = copy.copy(config), copy.copy(config.compilation_config)
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    changed.compilation_config = compilation
    return changed
