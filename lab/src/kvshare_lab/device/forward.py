"""The connector's partial passes on a simulated GPU, and the attention that each layer calls in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvshare.kv.listening import ListeningRows
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import PartialForward, Run
from kvshare_lab.device.gpu import THERE, SimulatedGpu

_ROWS_AT_ONCE = 128
_LONG = 1024  # tokens of a run


class SimulatedForward(PartialForward):
    """
    A pass takes what the profile says; its inputs are made and sent as they are.

    Its rate was learned from runs of up to some hundred tokens. Long ones attend as vLLM's own prefill does.
    """

    def __init__(self, gpu: SimulatedGpu, cache: PagedCache, *, max_tokens: int, max_runs: int) -> None:
        self._gpu, self._cache = gpu, cache
        self.max_tokens, self._max_runs = max_tokens, max_runs
        self.backend_name = "SIMULATED"

    def _forward(self, runs: Sequence[Run]) -> None:
        token_ids, _, _, _ = self._inputs(runs)
        self._gpu.charged.passes += 1
        self._gpu.launch(0.0)
        busy_s = self._gpu.reached_at() - self._gpu.clock.now()
        pass_s = self._gpu.costs.placeholders_s(len(token_ids), busy_s=busy_s)
        long = (run.span for run in runs if len(run.span) >= _LONG)
        pass_s += sum(self._gpu.costs.attention_s(span.start, span.end) for span in long)
        of_layer_s = pass_s / len(self._cache.layers)
        keys, _ = self._cache.kv_layout.planes
        shape = (len(token_ids), 4 * keys.num_heads, keys.dim)
        query = torch.empty(shape, dtype=self._cache.kv_layout.dtype, device=THERE)
        for layer in self._cache.layers.values():
            layer.impl.forward(layer, query, output=query)  # waits for its layer first
            self._gpu.hold(self._gpu.reached_at() + of_layer_s)

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
