"""The connector's partial passes on a simulated GPU, and the attention that each layer calls in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from kvshare.kv.listening import ListeningRows
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import PartialForward
from kvshare.vllm_connector.worker.runs import Run
from kvshare_lab.device.gpu import THERE, SimulatedGpu

_ROWS_AT_ONCE = 128
_LONG = 1024  # tokens of a run
_GRAPH_LAUNCHES = 12  # copies into vLLM's buffers and back, see `worker/graph_passes.py`


class SimulatedForward(PartialForward):
    """
    A pass takes what the profile says; its inputs are made and sent as they are.

    Its rate was learned from runs of up to some hundred tokens. Long ones attend as vLLM's own prefill does.
    Small passes use vLLM's graphs, if the profile says so: then all of their runs attend as its steps do, and
    the keys of each request are read once.
    """

    def __init__(self, gpu: SimulatedGpu, cache: PagedCache, *, max_tokens: int, max_runs: int) -> None:
        self._gpu, self._cache = gpu, cache
        self.max_tokens, self._max_runs = max_tokens, max_runs
        self.backend_name, self.may_stop = "SIMULATED", gpu.costs.graph_rows > 0

    def _forward(self, runs: Sequence[Run]) -> None:
        token_ids, _, _, _ = self._inputs(runs)
        self._gpu.charged.passes += 1
        self._gpu.launch(0.0)
        of_layer_s = self._pass_s(runs, len(token_ids)) / len(self._cache.layers)
        keys, _ = self._cache.kv_layout.planes
        shape = (len(token_ids), 4 * keys.num_heads, keys.dim)
        query = torch.empty(shape, dtype=self._cache.kv_layout.dtype, device=THERE)
        for layer in self._cache.layers.values():
            layer.impl.forward(layer, query, output=query)  # waits for its layer first
            self._gpu.hold(self._gpu.reached_at() + of_layer_s)

    def _pass_s(self, runs: Sequence[Run], num_tokens: int) -> float:
        gpu, costs = self._gpu, self._gpu.costs
        if _rows_of_graph(num_tokens) <= costs.graph_rows:
            for _ in range(_GRAPH_LAUNCHES):
                gpu.launch(0.0)
            return costs.graph_pass_s(_rows_of_graph(num_tokens), attending_s=self._attending_s(runs))
        pass_s = costs.placeholders_s(num_tokens, busy_s=gpu.reached_at() - gpu.clock.now())
        long = (run.span for run in runs if len(run.span) >= _LONG)
        return pass_s + sum(costs.attention_s(span.start, span.end) for span in long)

    def _attending_s(self, runs: Sequence[Run]) -> float:
        """The keys and values of each request are read once, or operations take longer."""
        costs, size = self._gpu.costs, self._cache.kv_layout.bytes_per_token
        computing, ends = defaultdict[tuple[int, ...], float](float), dict[tuple[int, ...], int]()
        for run in runs:
            computing[run.block_ids] += costs.attention_s(run.span.start, run.span.end)
            ends[run.block_ids] = max(run.span.end, ends.get(run.block_ids, 0))
        return sum(max(computing[each], end * size / costs.memory_bytes_per_s) for each, end in ends.items())

    def observe(self, rows: ListeningRows, table: torch.Tensor, layer: int, query: torch.Tensor) -> None:
        """
        As `worker/listening_kernels.py`: two kernels that read the keys where they lie, and a sum.

        In 16 bits, with 128 rows of queries at a time.
        """
        keys, _ = self._cache.kv_layout.planes
        num_tiles = -(-len(rows.indices) * query.shape[1] // keys.num_heads // _ROWS_AT_ONCE)
        of_keys = num_tiles * keys.num_heads * rows.end * keys.dim * query.itemsize
        of_sums = 4 * num_tiles * keys.num_heads * rows.end
        for num_bytes in (of_keys, of_keys + of_sums, of_sums):
            self._gpu.move(num_bytes)


class Kernels:
    """Attention is part of what a pass takes. What listens to it is not, and wraps `forward`."""

    scale = 1.0

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._gpu = gpu

    def forward(self, _: object, query: torch.Tensor, *, output: torch.Tensor) -> None:
        """Nothing more."""

    def do_kv_cache_update(
        self, _: object, k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        self._gpu.move(2 * (k.nbytes + v.nbytes))


def _rows_of_graph(num_tokens: int) -> int:
    """The rows of the smallest graph by vLLM's default sizes: multiples of 8, from 256 on of 16."""
    step = 8 if num_tokens <= 256 else 16
    return -(-num_tokens // step) * step
