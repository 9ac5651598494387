"""
Partial attention in stock vLLM: each run is a separate sequence with the request's block table.

Paged attention takes a block table, a query length and a sequence length per sequence, and aligns the causal
mask to the sequence's end. So a run [a, b) becomes a sequence with

    block table   that of the request     queries    positions a .. b-1
    query_len     b - a                   attends    to slots 0 .. b-1, causally inside the run
    seq_len       b

A layer writes all new K and V before it attends, so later runs attend to earlier ones of the same pass. One
forward pass over all runs of all requests of a step is therefore exact, with every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheSpec

from delta_tree import Span
from kvshare.kv.layout import ALL_EARLIER, PLAIN, AttentionForm, Reach
from kvshare.kv.listening import ListeningRows, placed
from kvshare.kv.to_device import to_device
from kvshare.vllm_connector.worker.attention_hooks import PassEndedError, Watch, ending, hooked
from kvshare.vllm_connector.worker.block_layout import ADDRESSABLE
from kvshare.vllm_connector.worker.draft_pass import DraftPass
from kvshare.vllm_connector.worker.metadata_builders import metadata_builders
from kvshare.vllm_connector.worker.model_inputs import ModelInputs, base_model
from kvshare.vllm_connector.worker.models import Models
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.pass_inputs import pass_inputs
from kvshare.vllm_connector.worker.runs import Run, layers_needed, split

_MULTIPLIED = {torch.float16, torch.bfloat16, torch.float32}  # dtypes of queries and keys in our kernels


class PartialForward:
    """
    Computes runs with vLLM's model, and then with the drafting model, if there is one.

    It does not use vLLM's metadata builders, because these keep state between passes.
    """

    _may_use_kernels = True
    may_stop = False  # after some of the layers; until the self-test has tried it

    def __init__(
        self,
        models: Models,
        cache: PagedCache,
        vllm_config: VllmConfig,
        spec: KVCacheSpec,
    ) -> None:
        self._adapters = models.adapters
        self._graphs = models.graphs
        self.uses_graphs = False  # until the self-test has tried them
        device = cache.kv_layout.device
        self._target = models.target, ModelInputs(models.target, vllm_config, device)
        self._draft = None if models.draft is None else DraftPass(models.draft, vllm_config, device)
        self._cache = cache
        self._config = vllm_config
        self.max_tokens = int(vllm_config.scheduler_config.max_num_batched_tokens)  # of a pass
        self._max_runs = vllm_config.scheduler_config.max_num_seqs  # backends have buffers for that many
        backends = [layer.get_attn_backend().get_name() for layer in cache.layers.values()]
        self.backend_name: str = "+".join(dict.fromkeys(backends))
        self._builders = metadata_builders(cache, vllm_config, spec)

    @property
    def _impls(self) -> list[Any]:
        return [layer.impl for layer in self._cache.layers.values()]

    def scaling(self, layer: int) -> float:
        """Return the factor of a layer's attention scores."""
        return float(self._impls[layer].scale)

    def form(self, layer: int) -> AttentionForm:
        """Return the window, soft cap and sinks of a layer's attention."""
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
        self,
        runs: Sequence[Run],
        *,
        watching: Callable[[Sequence[Run]], Watch] | None = None,
        awaiting: Callable[[int], None] | None = None,
    ) -> None:
        """
        Compute the KV of all runs into their slots, in as few passes as possible.

        `watching` is called before each pass, with its runs in the order of its rows. It returns a hook that
        is called in each layer (`Watch`). `awaiting` is called with each layer's number before the layer's
        cache is read or written.
        """
        for batch in split(runs, self.max_tokens, self._max_runs):
            # Some backends treat short queries separately and expect them first. The result does not change.
            ordered = sorted(batch, key=lambda run: len(run.span))
            watch = watching(ordered) if watching is not None else None
            num_tokens = sum(len(run.span) for run in ordered)
            if self.may_stop and (num_layers := layers_needed(ordered)) is not None:
                watch = ending(watch, num_layers)
            hooks = hooked(self._impls, awaiting, watch, num_tokens=num_tokens)
            with suppress(PassEndedError), hooks if awaiting or watch else nullcontext():
                self._forward(ordered)

    @property
    def has_draft(self) -> bool:
        """Return whether passes also compute a drafting model or head, after all layers of the target."""
        return self._draft is not None

    @property
    def has_graphs(self) -> bool:
        """Return whether there are CUDA graphs for the self-test to try."""
        return self._graphs is not None and self._graphs.fitting(1, 1) is not None

    def is_one_pass(self, spans: Sequence[Span]) -> bool:
        """Return whether runs of these spans are computed in one pass."""
        return bool(len(spans) <= self._max_runs and sum(map(len, spans)) <= self.max_tokens)

    def listening(self, runs: Sequence[Run]) -> Watch:
        """Return a hook that records what rows of listeners attend to: the `watching` of `compute`."""
        places = placed([run.span for run in runs])
        listening = []
        for listener, block_ids in {run.listener: run.block_ids for run in runs}.items():
            if listener is not None:
                heard = (place for place, run in zip(places, runs, strict=True) if run.listener is listener)
                if rows := listener.rows_of(heard):
                    listening.append((listener, rows, self._cache.table(block_ids, rows.end)))

        def watch(layer: int, query: torch.Tensor, _: torch.Tensor) -> None:
            for listener, rows, table in listening:
                if rows.listen_in(layer):
                    self.observe(rows, table, layer, query)
                    listener.note(layer, rows)

        return watch

    def simplify(self) -> bool:
        """Listen without our own kernels from now on. Returns whether that changes anything."""
        had_own, self._may_use_kernels = self._may_use_kernels, False
        return had_own and self._cache.kv_layout.device.type == "cuda"

    def observe(self, rows: ListeningRows, table: torch.Tensor, layer: int, query: torch.Tensor) -> None:
        """
        Record what rows of a pass attend to in a layer; on a GPU by our own kernels if possible.

        Shapes:  query (N, H_q, D) of all rows of the pass; table (blocks,) of positions [0, rows.end), as for
                 `PagedCache.keys`
        """
        scaling, form = self.scaling(layer), self.form(layer)
        kernels = listening_kernels(self._cache, query) if self._may_use_kernels else None
        if form is PLAIN and kernels is not None:
            kernels.listen(rows, layer, query, self._cache.caches[layer], table, scaling=scaling)
            return
        keys = self._cache.keys(layer, table, rows.end).transpose(0, 1)
        rows.observe(layer, query.transpose(0, 1), keys, scaling=scaling, form=form)

    def _forward(self, runs: Sequence[Run]) -> None:
        token_ids, positions, slots, metadata = self._inputs(runs)
        draft = self._draft
        drafted = None if draft is None else draft.rows(runs, token_ids, positions)
        written = slots if drafted is None else drafted.written(slots)
        model, inputs = self._target
        graphs = self._graphs if self.uses_graphs else None
        if graphs is not None and (graph := graphs.fitting(len(runs), len(token_ids))) is not None:
            padded = replace(metadata, slot_mapping=graph.padded(slots))
            with torch.inference_mode(), self._context(padded, **graph.context):
                graph.run(model, token_ids, positions)
            return
        with (
            torch.inference_mode(),
            base_model(self._adapters, len(token_ids), len(runs)),
            inputs.notes_set_aside(len(token_ids)),
            self._context(replace(metadata, slot_mapping=written), num_tokens=len(token_ids)),
        ):
            output = model(intermediate_tensors=None, **inputs.arguments(token_ids, positions))
        if draft is not None and drafted is not None:  # its layers have the same slots
            own = replace(metadata, slot_mapping=slots)
            with torch.inference_mode(), self._context(own, num_tokens=len(token_ids)):
                draft.compute(drafted, output)

    @contextmanager
    def _context(self, metadata: CommonAttentionMetadata, **options: Any) -> Iterator[None]:
        """`options`: of `set_forward_context`."""
        own = [(builder.build(0, metadata), names) for builder, names in self._builders]
        of_layers = {name: built for built, names in own for name in names}
        slots = dict.fromkeys(of_layers, metadata.slot_mapping)
        with set_forward_context(of_layers, self._config, slot_mapping=slots, **options):
            yield

    def _inputs(
        self, runs: Sequence[Run]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, CommonAttentionMetadata]:
        """Make token ids, positions, slots and attention metadata of a pass, with one copy to the device."""
        made = pass_inputs(runs, self._cache)
        token_ids, positions, slots, on_device, seq_lens, block_table = to_device(
            self._cache.kv_layout.device,
            made.token_ids,
            made.positions,
            made.slots,
            made.starts,
            made.ends,
            made.table,
        )
        metadata = CommonAttentionMetadata(
            query_start_loc=on_device,
            query_start_loc_cpu=torch.from_numpy(made.starts),
            seq_lens=seq_lens,
            num_reqs=len(runs),
            num_actual_tokens=int(made.starts[-1]),
            max_query_len=made.longest,
            max_seq_len=int(made.ends.max()),
            block_table_tensor=block_table,
            slot_mapping=slots,
            causal=True,
            positions=positions,
            is_prefilling=torch.ones(len(runs), dtype=torch.bool),
            seq_lens_cpu_upper_bound=torch.from_numpy(made.ends),
        )
        return token_ids, positions, slots, metadata


def listening_kernels(cache: PagedCache, query: torch.Tensor) -> Any:
    """Return the module of the listening kernels; None without Triton, or if they cannot run here."""
    if query.device.type != "cuda" or cache.layout != ADDRESSABLE:
        return None
    if query.dtype != cache.kv_layout.dtype or query.dtype not in _MULTIPLIED:
        return None  # keys of 8 bits
    from vllm.triton_utils import HAS_TRITON

    if not HAS_TRITON:
        return None
    from kvshare.vllm_connector.worker import listening_kernels as kernels

    return kernels if kernels.has_room(query.device) else None
