"""The models of a worker whose layers have slots in vLLM's blocks: the target, and one that drafts for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvshare.vllm_connector.worker.graph_passes import GraphPasses
from kvshare.vllm_connector.worker.model import frequency_tables
from kvshare.vllm_connector.worker.runner_prefill import RunnerPrefill


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """
    `draft`: the model or head that drafts, if its KV is to be shared. Its layers are numbered after the
    target's, and computed after them. `adapters`: vLLM's manager of LoRA adapters of the target. `graphs`:
    CUDA graphs of the target, if our passes may use them. `prefill`: lets vLLM's model runner compute a
    prompt; not None if there is a draft.
    """

    target: torch.nn.Module
    draft: torch.nn.Module | None = None
    adapters: Any = None
    graphs: GraphPasses | None = None
    prefill: RunnerPrefill | None = None

    @property
    def each(self) -> tuple[torch.nn.Module, ...]:
        return (self.target,) if self.draft is None else (self.target, self.draft)

    def in_order(self, layers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the attention modules by name, with the target's first."""
        drafting = self._drafting()
        return dict(sorted(layers.items(), key=lambda each: id(each[1]) in drafting))  # a stable order

    def num_target_layers(self, layers: Mapping[str, Any]) -> int:
        drafting = self._drafting()
        return sum(id(layer) not in drafting for layer in layers.values())

    def frequency_tables(self) -> tuple[list[torch.Tensor], str]:
        """Return the tables of all models, and why other keys of the target cannot be moved."""
        found = [frequency_tables(model) for model in self.each]
        return [table for tables, _ in found for table in tables], found[0][1]

    def _drafting(self) -> frozenset[int]:
        return frozenset() if self.draft is None else frozenset(map(id, self.draft.modules()))
