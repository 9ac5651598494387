"""
The part of a pass that the drafting model or head computes, after the target's part.

    row at position p   a draft model                       a head (EAGLE, MTP)
    reads               token p                             token p + 1, and the target's hidden state at p
    is right if copied  where the text before it is equal   where the token after it is equal, too

So if a head drafts, a pass also computes the last row of each copy: the target keeps the copied KV of that
row and computes its hidden state, from which the head writes its row for the token that follows here. MTP
does not see the token at position 0: a row that moves from there, or to there, is computed in the same way.

Alphabet: N rows, E width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig

from kvshare.kv.to_device import to_device
from kvshare.vllm_connector.speculation import drafts_by_head, method_of
from kvshare.vllm_connector.worker.model_inputs import ModelInputs
from kvshare.vllm_connector.worker.pass_inputs import PlacedRun, following_ids, kept_rows

_NO_SLOT = -1  # vLLM's kernels write nothing there


@dataclass(frozen=True, slots=True, eq=False)
class DraftRows:
    """
    The input of the drafting part for each row of a pass.

    Shapes:  token_ids (N,) int32; positions (N,) int64; kept (N,) bool, None if no row is
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kept: torch.Tensor | None = None  # rows whose KV the target does not write, but keeps

    def written(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the slots of all rows, (N,), without those that the target does not write."""
        return slots if self.kept is None else slots.masked_fill(self.kept, _NO_SLOT)


class DraftPass:
    """Computes the drafting part of passes, for one model or head."""

    def __init__(self, model: torch.nn.Module, config: VllmConfig, device: torch.device) -> None:
        self._model: Any = model
        own = config.speculative_config.draft_model_config
        self._inputs = ModelInputs(model, config, device, own=own)
        self._method = method_of(config)
        self._is_head = drafts_by_head(config)

    def rows(self, runs: Sequence[PlacedRun], token_ids: torch.Tensor, positions: torch.Tensor) -> DraftRows:
        """Make the input for a pass. `token_ids` and `positions`: of its rows for the target."""
        if not self._is_head:
            return DraftRows(token_ids, positions)
        following, kept = to_device(token_ids.device, following_ids(runs), kept_rows(runs))
        return DraftRows(following, positions, kept)

    def compute(self, rows: DraftRows, output: Any) -> None:
        """Compute the drafting part, in a forward context that writes all slots. `output`: of the target."""
        arguments = self._inputs.arguments(rows.token_ids, rows.positions)
        if self._is_head:
            self._model(hidden_states=self._states(output), **arguments)
        else:
            self._model(**arguments)

    def _states(self, output: Any) -> torch.Tensor:
        """Return the hidden states, (N, E), that vLLM's proposer takes of the target's output (`eagle3`)."""
        states: torch.Tensor = torch.cat(output[1], dim=-1) if isinstance(output, tuple) else output
        return self._model.combine_hidden_states(states) if self._method == "eagle3" else states
