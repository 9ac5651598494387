"""
Heads that draft, as vLLM computes them, each of one layer of the kind of a Llama.

    states     what a row has of the word before: the model's hidden state, or what the head itself returned
    embedded   that of the word that follows
    logits     for the word after that

    EAGLE      fc(embedded, state), and a layer without a norm before attention
    MTP        the same of both norms, and a whole layer (that of ERNIE's models)
    EAGLE3     the state, of three layers, is what the layer adds to; attention reads both norms; it has words
               of its own, which are some of the model's

Alphabet: T rows, E width, W words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

KINDS = ("eagle", "eagle3", "mtp")


class Head(nn.Module):
    """EAGLE's, or MTP's if `has_norms`."""

    num_aux = 0  # layers of the model whose hidden states it reads, other than the last one

    def __init__(self, model: Any, *, has_norms: bool) -> None:
        super().__init__()
        config = model.config
        width = config.hidden_size
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([_layer_like_the_last(model)])
        self.embedded_norm: nn.Module = nn.Identity()
        self.hidden_norm: nn.Module = nn.Identity()
        if has_norms:
            self.embedded_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
            self.hidden_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        else:
            self.layers[0].input_layernorm = nn.Identity()
        self._masks_first = has_norms
        self._rotary = LlamaRotaryEmbedding(config)
        with torch.no_grad():
            self.fc.weight.copy_(torch.cat([torch.zeros(width, width), torch.eye(width)], dim=1))

    def first_states(self, hidden: Tensor, aux: Tensor) -> Tensor:
        """(T, E)  Shapes:  hidden (T, E); aux (T, 3E)"""
        return hidden

    def forward(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """(T, E) what the words are predicted from, and (T, E) the states for the rows after these."""
        if self._masks_first:
            embedded = embedded.index_fill(0, torch.tensor([0]), 0.0)
        both = torch.cat([self.embedded_norm(embedded), self.hidden_norm(states)], dim=-1)
        out = _through(self.layers[0], self._rotary, self.fc(both))
        return out, out

    def logits(self, predicted: Tensor, words: Tensor) -> Tensor:
        """(T, W)  Shapes:  words (W, E), the model's rows for the words in question"""
        return linear(predicted, words)

    def weights(self) -> dict[str, Tensor]:
        """Its weights, named as in checkpoints."""
        return {name: rows for name, rows in self.state_dict().items() if not name.startswith("_")}


class Eagle3Head(nn.Module):
    """EAGLE3's. `words`: the numbers of the words that it can draft."""

    num_aux = 3

    def __init__(self, model: Any, words: Tensor) -> None:
        super().__init__()
        config = model.config
        width, eps = config.hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(3 * width, width, bias=False)
        self.midlayer = _layer_like_the_last(model)
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self.midlayer.self_attn, name, _widened(getattr(self.midlayer.self_attn, name)))
        self.hidden_norm = LlamaRMSNorm(width, eps=eps)
        self.norm = LlamaRMSNorm(width, eps=eps)
        self.lm_head = nn.Linear(width, len(words), bias=False)
        self._rotary = LlamaRotaryEmbedding(config)
        with torch.no_grad():
            zeros = torch.zeros(width, 2 * width)
            self.fc.weight.copy_(torch.cat([zeros, torch.eye(width)], dim=1))
            self.lm_head.weight.copy_(model.lm_head.weight[words])
            self.norm.weight.copy_(model.model.norm.weight)

    def first_states(self, hidden: Tensor, aux: Tensor) -> Tensor:
        out: Tensor = self.fc(aux)
        return out

    def forward(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.midlayer
        both = torch.cat([layer.input_layernorm(embedded), self.hidden_norm(states)], dim=-1)
        own = states + _attended(layer, self._rotary, both)
        own = own + layer.mlp(layer.post_attention_layernorm(own))
        return self.norm(own), own

    def logits(self, predicted: Tensor, words: Tensor) -> Tensor:
        """(T, W)  `words` are not used: it has rows of its own for the same words."""
        out: Tensor = self.lm_head(predicted)
        return out

    def weights(self) -> dict[str, Tensor]:
        own = {name: rows for name, rows in self.state_dict().items() if not name.startswith("_")}
        return {
            ("midlayer." if name.startswith("hidden_norm") else "") + name: rows for name, rows in own.items()
        }


def head_of(kind: str, model: Any, words: Tensor) -> Head | Eagle3Head:
    """A head of one of KINDS for a Llama, which begins as the Llama's last layer."""
    return Eagle3Head(model, words) if kind == "eagle3" else Head(model, has_norms=kind == "mtp")


def _layer_like_the_last(model: Any) -> LlamaDecoderLayer:
    config = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 1})
    config._attn_implementation = "sdpa"
    layer = LlamaDecoderLayer(config, 0)
    layer.load_state_dict({name: rows.float() for name, rows in model.model.layers[-1].state_dict().items()})
    return layer


def _widened(projection: nn.Linear) -> nn.Linear:
    """It reads the word, too, and begins without it."""
    rows, width = projection.weight.shape
    wide = nn.Linear(2 * width, rows, bias=False)
    with torch.no_grad():
        wide.weight.copy_(torch.cat([torch.zeros(rows, width), projection.weight], dim=1))
    return wide


def _places(rotary: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = rotary(rows, torch.arange(len(rows))[None])
    return found


def _attended(layer: LlamaDecoderLayer, rotary: nn.Module, rows: Tensor) -> Tensor:
    """(T, E) what causal attention gives."""
    found = layer.self_attn(rows[None], position_embeddings=_places(rotary, rows), attention_mask=None)
    out: Tensor = found[0][0]
    return out


def _through(layer: LlamaDecoderLayer, rotary: nn.Module, rows: Tensor) -> Tensor:
    rows = rows + _attended(layer, rotary, layer.input_layernorm(rows))
    out: Tensor = rows + layer.mlp(layer.post_attention_layernorm(rows))
    return out
