"""
Runs a decoder layer by layer over chosen rows: published repair rules need this, and no engine offers it.

    rows        0 1 2 3 4 5            <- tokens of one pass, ascending by slot
    layer 0     x x x x x x
    layer 1     x x x x x x            all rows write K and V into their slots, then attend
    layer 2     x . x . x x            a rule may drop rows between two layers; deeper, their old KV remains

Attention is exact and causal by slot, unless `visible` gives another mask; a row always sees its own slot.
Greedy answers behind the KV of a prompt get a token of each answer in every pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, Cache

from delta_tree import TokenIds, token_ids
from kvshare.embedded.model import EmbeddedModel
from kvshare.errors import ModelError
from kvshare.kv.sequence import SequenceKV

_ATTENTION = "kvshare_layered"
_PARTS = ("embed_tokens", "layers", "norm", "rotary_emb")

Mask = NDArray[np.bool_]
Weights = Callable[[int, torch.Tensor], None]  # gets a layer's number and its attention weights (H_q, N, S)
Start = tuple[SequenceKV, torch.Tensor]
"""KV (L, >= T, H, D) of a prompt of T tokens, and log-probabilities (V,) of the answer's first token."""


@dataclass(slots=True, eq=False)
class LayerUpdate:
    """The fresh K and V of one layer, which are in their slots, and those that were there before."""

    layer: int
    kv: SequenceKV
    slots: torch.Tensor  # (N,) int64
    repaired: torch.Tensor  # (N,) bool: rows that a rule chose to repair
    k: torch.Tensor  # (N, H, D) fresh
    v: torch.Tensor
    old_k: torch.Tensor  # (N, H, D) before this pass
    old_v: torch.Tensor


class LayerHook:
    """What a rule does while a pass runs. Here: nothing."""

    def after_write(self, update: LayerUpdate) -> None:
        """May change KV after the fresh rows were written and before any row attends to them."""

    def continuing(self, update: LayerUpdate) -> torch.Tensor | None:
        """Which repaired rows the next layer computes, (number repaired,) bool; None: all of them."""
        return None


@dataclass(slots=True, eq=False)
class ForwardPass:
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
    hook: LayerHook | None = None
    weights: Weights | None = None
    num_computed: list[int] = field(default_factory=list)  # result: repaired rows in each layer
    completed: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))  # in all layers


class _PassCache(Cache):
    """State of a pass while the layers are called; they use it as their KV cache."""

    def __init__(self, kv: SequenceKV, forward: ForwardPass) -> None:
        super().__init__(layers=[])
        self.kv, self.forward = kv, forward
        self.num_slots = int(forward.slots[-1]) + 1
        visible = causal(forward.slots, self.num_slots) if forward.visible is None else forward.visible
        mask = visible[:, : self.num_slots].copy()
        mask[np.arange(len(mask)), forward.slots] = True
        repaired = np.zeros(len(mask), np.bool_) if forward.repaired is None else forward.repaired
        self.mask, self.slots, self.repaired = (
            torch.from_numpy(each).to(kv.layout.device) for each in (mask, forward.slots, repaired)
        )
        self.updated: LayerUpdate | None = None

    def narrow(self, rows: torch.Tensor) -> None:
        self.mask, self.slots, self.repaired = self.mask[rows], self.slots[rows], self.repaired[rows]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's fresh rows (1, H, N, D) to their slots; all its K and V (1, H, S, D)."""
        kv, slots, hook = self.kv, self.slots, self.forward.hook
        k, v = key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)
        if hook is not None:
            old_k, old_v = kv.k[layer_idx, slots], kv.v[layer_idx, slots]
            self.updated = LayerUpdate(layer_idx, kv, slots, self.repaired, k, v, old_k, old_v)
        kv.k[layer_idx].index_copy_(0, slots, k)
        kv.v[layer_idx].index_copy_(0, slots, v)
        if hook is not None and self.updated is not None:
            hook.after_write(self.updated)
        return kv.layer(layer_idx, self.num_slots)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    running: _PassCache,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    if running.forward.weights is None:
        output = scaled_dot_product_attention(
            query, key, value, attn_mask=running.mask, scale=scaling, enable_gqa=groups > 1
        )
        return output.transpose(1, 2).contiguous(), None
    num_heads, num_rows, dim = query.shape[1:]
    grouped = query[0].reshape(key.shape[1], groups * num_rows, dim).float()  # bfloat16 would round scores
    scores = (grouped @ key[0].transpose(1, 2).float()).view(num_heads, num_rows, -1) * scaling
    scores.masked_fill_(~running.mask, float("-inf"))
    weights = scores.softmax(dim=-1)
    running.forward.weights(int(module.layer_idx), weights)  # type: ignore[arg-type]  # an int
    output = (weights.view(key.shape[1], groups * num_rows, -1) @ value[0].float()).to(query.dtype)
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
    def run(self, kv: SequenceKV, forward: ForwardPass, *, logits_of: NDArray[np.int64]) -> torch.Tensor:
        """
        Compute the rows of a pass in place and return log-probabilities of the tokens that follow some rows.

        Shapes:  logits_of (M,) indices of rows that all layers compute -> (M, V) float32
        """
        running = _PassCache(kv, forward)
        config, before = self.model.network.config, self.model.network.config._attn_implementation
        config._attn_implementation = _ATTENTION
        try:
            hidden, alive = self._through_layers(running)
        finally:
            config._attn_implementation = before
        forward.completed = forward.slots[alive.cpu().numpy()]
        rows = torch.searchsorted(alive, torch.from_numpy(logits_of).to(alive.device))
        logits = self._head(self._decoder.norm(hidden[0, rows]))
        return torch.log_softmax(logits.float(), dim=-1)

    def _through_layers(self, running: _PassCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states (1, N', d) after the last layer, and the indices (N',) of the rows that got there."""
        forward, device = running.forward, running.slots.device
        where = forward.slots if forward.positions is None else forward.positions
        positions = torch.from_numpy(where).to(device)
        tokens = torch.from_numpy(forward.token_ids.astype(np.int64)).to(device)
        hidden = self._decoder.embed_tokens(tokens)[None]
        cos, sin = self._decoder.rotary_emb(hidden, position_ids=positions[None])
        alive = torch.arange(len(positions), device=device)
        for number, layer in enumerate(self._decoder.layers):
            rows = _computed(running, number, alive)
            if not bool(rows.all()):
                running.narrow(rows)
                hidden, cos, sin, alive = hidden[:, rows], cos[:, rows], sin[:, rows], alive[rows]
            forward.num_computed.append(int(running.repaired.sum()))
            hidden = layer(hidden, position_embeddings=(cos, sin), past_key_values=running, running=running)
        return hidden, alive


def _computed(running: _PassCache, layer: int, alive: torch.Tensor) -> torch.Tensor:
    """Which of the rows in `alive` this layer computes, bool."""
    forward, rows = running.forward, torch.ones_like(alive, dtype=torch.bool)
    if forward.at_layer is not None:
        rows &= torch.from_numpy(forward.at_layer[layer]).to(alive.device)[alive]
    if forward.hook is not None and running.updated is not None:
        continuing = forward.hook.continuing(running.updated)
        if continuing is not None:
            rows[running.repaired] &= continuing
    return rows


def causal(slots: Sequence[int] | NDArray[np.int64], num_slots: int) -> Mask:
    """(N, num_slots) each row sees the slots up to its own."""
    return np.arange(num_slots)[None, :] <= np.asarray(slots)[:, None]


def greedy_answers(
    model: LayeredModel, starts: Sequence[Start], *, num_tokens: int, limit: int
) -> list[TokenIds]:
    """
    An answer of at most `limit` tokens behind each start, all of prompts of `num_tokens` tokens.

        slots  [start 0: prompt, answer][start 1: prompt, answer] ...   a row sees the slots of its own start

    An end token is part of its answer. A pass mostly costs reading the weights, so a few answers together
    take less time than one after another. The given KV is not changed.
    """
    room = num_tokens + limit
    kv = model.model.new_sequence(len(starts) * room)
    for own in (kv.k, kv.v):
        own.zero_()  # slots that no row sees must be numbers all the same
    for number, (given, _) in enumerate(starts):
        prompt = slice(number * room, number * room + num_tokens)
        kv.k[:, prompt], kv.v[:, prompt] = given.k[:, :num_tokens], given.v[:, :num_tokens]
    answers = [[int(first.argmax())] for _, first in starts]
    eos, slots = model.model.eos_token_ids(None), np.arange(kv.capacity)[None, :]
    for length in range(1, limit):
        going = [number for number, answer in enumerate(answers) if answer[-1] not in eos]
        if not going:
            break
        begins = np.array(going) * room
        last = begins + num_tokens + length - 1
        forward = ForwardPass(
            token_ids([answers[number][-1] for number in going]),
            last,
            positions=last - begins,
            visible=(begins[:, None] <= slots) & (slots <= last[:, None]),
        )
        rows = model.run(kv, forward, logits_of=np.arange(len(going)))
        for number, token in zip(going, rows.argmax(dim=-1).tolist(), strict=True):
            answers[number].append(token)
    return [token_ids(answer) for answer in answers]
