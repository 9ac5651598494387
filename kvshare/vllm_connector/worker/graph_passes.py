"""
Small passes by the piecewise CUDA graphs of vLLM's model runner V2.

Without graphs Python launches each kernel of a layer, which takes longer than a small pass computes. vLLM has
captured what lies between the attention kernels, for up to 512 rows by default:

    [ graph 0 ]  cache and attention 0  [ graph 1 ]  cache and attention 1  [ graph 2 ] ..

Attention is launched as before, so runs, block tables, slots and hooks are those of any pass. A graph has a
fixed number of rows and reads token ids and positions from vLLM's own buffers. The buffers get back what they
held, because loads that join a step are computed while they hold the step's batch.

The output of a graph lies in memory that all graphs use. V2 calls the connector before a step's forward pass
or after it has sampled, never while it still needs that output.

Alphabet: N rows of a pass, P >= N rows of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor
from vllm.v1.attention.backends.utils import PAD_SLOT_ID


def graph_passes(runner: Any, config: VllmConfig) -> GraphPasses | None:
    """Return the graphs of a model runner; None if our passes cannot use them."""
    if not hasattr(runner, "input_buffers") or getattr(runner, "cudagraph_manager", None) is None:
        return None  # runner V1, or no graphs
    model, parallel = config.model_config, config.parallel_config
    has_other_inputs = bool(
        model.supports_multimodal_inputs or model.enable_prompt_embeds or model.uses_mrope
    )
    is_split = max(
        parallel.data_parallel_size, parallel.pipeline_parallel_size, parallel.prefill_context_parallel_size
    )
    if has_other_inputs or is_split > 1 or parallel.use_ubatching:
        return None
    if config.lora_config is not None or config.speculative_config is not None:
        return None
    return GraphPasses(runner)


class GraphPasses:
    """The graphs of a runner. They are looked up for each pass, because vLLM may capture them again."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def fitting(self, num_runs: int, num_tokens: int) -> Graph | None:
        """Return the smallest graph for a pass, or None. The same on all ranks."""
        if (manager := self._runner.cudagraph_manager) is None:
            return None
        found = manager.dispatch(num_runs, num_tokens, None, 0)  # None: runs are of any length
        return Graph(self._runner, found.num_tokens) if found.cg_mode == CUDAGraphMode.PIECEWISE else None


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph of `num_rows` rows. It is run on vLLM's thread and stream."""

    runner: Any
    num_rows: int

    @property
    def context(self) -> dict[str, Any]:
        """Return what the forward context of the pass needs for the graph."""
        return {
            "num_tokens": self.num_rows,
            "cudagraph_runtime_mode": CUDAGraphMode.PIECEWISE,
            "batch_descriptor": BatchDescriptor(num_tokens=self.num_rows),
            "is_padding": self.runner.input_buffers.is_padding[: self.num_rows],
        }

    def padded(self, slots: torch.Tensor) -> torch.Tensor:
        """Return slots for all rows, (P,) from (N,): some kernels read one for each row of their input."""
        return torch.nn.functional.pad(slots, (0, self.num_rows - len(slots)), value=PAD_SLOT_ID)

    def run(self, model: torch.nn.Module, token_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """
        Compute a pass inside its forward context.

        Shapes:  token_ids, positions (N,) on the device
        """
        with self._filled(token_ids, positions) as inputs:
            arguments = {**inputs, "inputs_embeds": None, "intermediate_tensors": None}
            self.runner.cudagraph_manager.run_pw_graph(model, arguments)

    @contextmanager
    def _filled(self, token_ids: torch.Tensor, positions: torch.Tensor) -> Iterator[dict[str, torch.Tensor]]:
        """Write a pass into the first rows of vLLM's buffers, (P,) each, and put the old values back."""
        buffers, count = self.runner.input_buffers, len(token_ids)
        ids, places, is_padding = (
            each[: self.num_rows] for each in (buffers.input_ids, buffers.positions, buffers.is_padding)
        )
        before = [each.clone() for each in (ids, places, is_padding)]
        for rows, values in ((ids, token_ids), (places, positions)):
            rows[:count].copy_(values)
            rows[count:].zero_()
        is_padding[:count].fill_(False)
        is_padding[count:].fill_(True)
        try:
            yield {"input_ids": ids, "positions": places}
        finally:
            for rows, old in zip((ids, places, is_padding), before, strict=True):
                rows.copy_(old)
