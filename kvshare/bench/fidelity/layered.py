"""
Runs a decoder layer by layer over chosen rows: published repair rules need this, and no engine offers it.

    rows        0 1 2 3 4 5            <- tokens of one pass, ascending by slot
    layer 0     x x x x x x
    layer 1     x x x x x x            all rows write K and V into their slots, then attend
    layer 2     x . x . x x            a rule may drop rows between two layers; deeper, their old KV remains

Attention is exact and causal by slot, unless `visible` gives another mask; a row always sees its own slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache

from delta_tree import TokenIds
from kvshare.engines.embedded.model import EmbeddedModel
from kvshare.errors import ModelError
from kvshare.kv.sequence import SequenceKV

_ATTENTION = "kvshare_layered"
_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")

Mask = NDArray[np.bool_]
Weights = Callable[[int, torch.Tensor], None]
"""Called with a layer's number and its attention weights (H_q, N, S)."""


@dataclass(slots=True, eq=False)
class Step:
    """The fresh rows of one layer, which are in their slots, and the rows that were there before."""

    layer: int
    kv: SequenceKV
    slots: torch.Tensor  # (N,) int64
    repaired: torch.Tensor  # (N,) bool: rows that a rule chose to repair
    k: torch.Tensor  # (N, H, D) fresh
    v: torch.Tensor
    old_k: torch.Tensor  # (N, H, D) before this pass
    old_v: torch.Tensor


class Intervention:
    """What a rule does while a pass runs. Here: nothing."""

    def write(self, step: Step) -> None:
        """May change KV after the fresh rows were written and before any row attends to them."""

    def keep(self, step: Step) -> torch.Tensor | None:
        """Which repaired rows the next layer computes, (number repaired,) bool; None: all of them."""
        return None


@dataclass(slots=True, eq=False)
class Pass:
    """
    Rows of one forward pass, ascending by slot. Without `positions` a row's position is its slot.

    `visible`: (N, S) which of S slots each row sees besides its own; None: every slot up to its own.
    `at_layer`: (L, N) which layers compute which rows; a row that was dropped does not return.
    """

    token_ids: TokenIds  # (N,)
    slots: NDArray[np.int64]  # (N,)
    positions: NDArray[np.int64] | None = None
    visible: Mask | None = None
    repaired: Mask | None = None
    at_layer: Mask | None = None
    intervention: Intervention | None = None
    weights: Weights | None = None
    num_computed: list[int] = field(default_factory=list)  # result: repaired rows in each layer
    completed: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # in all layers


class _Running(Cache):
    """State of a pass while the layers are called; they use it as their KV cache."""

    def __init__(self, kv: SequenceKV, current: Pass) -> None:
        super().__init__(layers=[])
        self.kv, self.current = kv, current
        self.num_slots = int(current.slots[-1]) + 1
        device = kv.layout.device
        slots = torch.from_numpy(current.slots).to(device)
        if current.visible is None:
            mask = torch.arange(self.num_slots, device=device)[None, :] <= slots[:, None]
        else:
            mask = torch.from_numpy(current.visible[:, : self.num_slots]).to(device, copy=True)
        mask[torch.arange(len(slots), device=device), slots] = True
        self.mask, self.slots = mask, slots
        repaired = np.zeros(len(slots), np.bool_) if current.repaired is None else current.repaired
        self.repaired = torch.from_numpy(repaired).to(device)
        self.step: Step | None = None

    def narrow(self, rows: torch.Tensor) -> None:
        """Continue with these rows only."""
        self.mask, self.slots, self.repaired = self.mask[rows], self.slots[rows], self.repaired[rows]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's fresh rows (1, H, N, D) to their slots; all its K and V (1, H, S, D)."""
        kv, slots, intervention = self.kv, self.slots, self.current.intervention
        k, v = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        if intervention is not None:
            old_k, old_v = kv.k[layer_idx, slots], kv.v[layer_idx, slots]
            self.step = Step(layer_idx, kv, slots, self.repaired, k, v, old_k, old_v)
        kv.k[layer_idx].index_copy_(0, slots, k)
        kv.v[layer_idx].index_copy_(0, slots, v)
        if intervention is not None and self.step is not None:
            intervention.write(self.step)
        return kv.layer(layer_idx, self.num_slots)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    running: _Running,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    if running.current.weights is None:
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=running.mask, scale=scaling, enable_gqa=groups > 1
        )
        return output.transpose(1, 2).contiguous(), None
    num_heads, num_rows, dim = query.shape[1:]
    grouped = query[0].reshape(key.shape[1], groups * num_rows, dim)
    scores = (grouped @ key[0].transpose(1, 2)).view(num_heads, num_rows, -1) * scaling
    scores.masked_fill_(~running.mask, float("-inf"))
    weights = scores.softmax(dim=-1)
    running.current.weights(int(module.layer_idx), weights)  # type: ignore[arg-type]  # an int
    output = weights.view(key.shape[1], groups * num_rows, -1) @ value[0]
    return output.view(num_heads, num_rows, dim).transpose(0, 1).unsqueeze(0).contiguous(), None


AttentionInterface.register(_ATTENTION, _attend)


class LayeredModel:
    """
    An embedded model whose layers can be called one by one.

    Raises:  ModelError for a model without an embedding, layers, a norm and one rotary embedding for all keys
    """

    def __init__(self, model: EmbeddedModel) -> None:
        self.model = model
        network: Any = model.network
        self._decoder: Any = getattr(network, "model", None)
        self._head: Any = getattr(network, "lm_head", None)
        if self._head is None or not all(hasattr(self._decoder, name) for name in _PARTS):
            raise ModelError(f"{model.name}: layers cannot be run one by one; expected {', '.join(_PARTS)}")
        if model.layout.rotation is None:
            reason = model.unsupported_reason or "its layers move keys differently"
            raise ModelError(f"{model.name}: {reason}; expected one rotation for the keys of all layers")

    @property
    def num_layers(self) -> int:
        return self.model.layout.num_layers

    @torch.inference_mode()
    def run(self, kv: SequenceKV, current: Pass, *, logits_of: NDArray[np.int64]) -> torch.Tensor:
        """
        Compute the rows of a pass in place and return log-probabilities of the tokens that follow some rows.

        Shapes:  logits_of (M,) indices of rows that all layers compute -> (M, V) float32
        """
        running = _Running(kv, current)
        config, before = self.model.network.config, self.model.network.config._attn_implementation
        config._attn_implementation = _ATTENTION
        try:
            hidden, alive = self._through_layers(running)
        finally:
            config._attn_implementation = before
        current.completed = current.slots[alive.cpu().numpy()]
        rows = torch.searchsorted(alive, torch.from_numpy(logits_of).to(alive.device))
        logits = self._head(self._decoder.norm(hidden[0, rows]))
        return torch.log_softmax(logits.float(), dim=-1)

    def _through_layers(self, running: _Running) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (1, N', d) after the last layer, and the indices (N',) of the rows that got there."""
        current, device = running.current, running.slots.device
        where = current.slots if current.positions is None else current.positions
        positions = torch.from_numpy(where).to(device)
        tokens = torch.from_numpy(current.token_ids.astype(np.int64)).to(device)
        hidden = self._decoder.embed_tokens(tokens)[None]
        cos, sin = self._decoder.rotary_emb(hidden, position_ids=positions[None])
        alive = torch.arange(len(positions), device=device)
        for number, layer in enumerate(self._decoder.layers):
            if (rows := self._staying(running, number, alive)) is not None:
                running.narrow(rows)
                hidden, cos, sin, alive = hidden[:, rows], cos[:, rows], sin[:, rows], alive[rows]
            current.num_computed.append(int(running.repaired.sum()))
            hidden = layer(hidden, position_embeddings=(cos, sin), past_key_values=running, running=running)
        return hidden, alive

    def _staying(self, running: _Running, layer: int, alive: torch.Tensor) -> torch.Tensor | None:
        """Indices of the rows in `alive` that this layer computes; None: all of them."""
        current, rows = running.current, None
        if current.at_layer is not None:
            rows = torch.from_numpy(current.at_layer[layer]).to(alive.device)[alive]
        if current.intervention is not None and running.step is not None:
            staying = current.intervention.keep(running.step)
            if staying is not None:
                computed = torch.ones(len(alive), dtype=torch.bool, device=alive.device)
                computed[running.repaired] = staying
                rows = computed if rows is None else rows & computed
        return None if rows is None or bool(rows.all()) else rows.nonzero()[:, 0]


def causal(slots: Sequence[int] | NDArray[np.int64], num_slots: int) -> Mask:
    """(N, num_slots) each row sees the slots up to its own."""
    return np.arange(num_slots)[None, :] <= np.asarray(slots)[:, None]
