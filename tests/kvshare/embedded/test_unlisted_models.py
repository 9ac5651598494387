"""Models that nobody listed are proved or refused, and never wrong: here each layer turns in its own way."""

from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from delta_tree import Copy, NodeId, SegmentId, Span, token_ids
from kvshare.embedded.model import EmbeddedModel
from kvshare.kv.attention import PartialPass
from kvshare.kv.sequence import SequenceKV
from kvshare_lab.bench.random_models import VOCAB_SIZE, tiny_model

TOKENS, SHIFT = 60, 41
BASES = (10_000.0, 500.0, 1_000_000.0)


class Table(torch.nn.Module):
    """Frequencies of one layer; `named` where a stranger can find them."""

    def __init__(self, base: float, *, named: bool, still: int = 0) -> None:
        super().__init__()
        table = base ** -(torch.arange(8) / 8)
        table[8 - still :] = 0  # as many pairs do not turn
        self.register_buffer("inv_freq" if named else "secret", table)

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (table,) = self.buffers()
        angles = position_ids[..., None].float() * table
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def odd_model(*, named: bool) -> PreTrainedModel:
    """A Llama with three tables; in the last layer half of the pairs stand still."""
    model = tiny_model("llama")
    for layer, base in zip(model.model.layers, BASES, strict=True):
        last = layer is model.model.layers[-1]
        attention = layer.self_attn
        attention.own_table = Table(base, named=named or not last, still=4 * last)
        forward = type(attention).forward

        def turned(
            self: Any, *given: Any, position_embeddings: Any, forward: Any = forward, **kw: Any
        ) -> Any:
            return forward(self, *given, position_embeddings=self.own_table(kw["position_ids"]), **kw)

        attention.forward = MethodType(turned, attention)
    return model


def computed(model: EmbeddedModel, tokens: np.ndarray) -> SequenceKV:
    kv = model.new_sequence(len(tokens))
    model.compute(PartialPass(kv, (Span(0, len(tokens)),)), tokens)
    return kv


def test_three_tables_and_a_layer_that_turns_in_part_are_proved() -> None:
    """And copies that move by them are those that are computed there, in the layer that sees no context."""
    model = EmbeddedModel(odd_model(named=True), name="odd")
    keys, _ = model.layout.planes
    assert model.layout.can_move, model.unsupported_reason
    assert len(set(keys.movements)) == 3
    rng = np.random.default_rng(0)
    tokens = token_ids(rng.integers(3, VOCAB_SIZE, TOKENS))
    source = computed(model, tokens)
    for shift in (1, SHIFT):
        there = computed(model, token_ids(np.concatenate([rng.integers(3, VOCAB_SIZE, shift), tokens])))
        torch.testing.assert_close(keys.moved(source.k, shift)[0], there.k[0, shift:], atol=2e-5, rtol=0)


def test_a_layer_whose_table_nobody_can_see_is_refused_and_does_not_move() -> None:
    model = EmbeddedModel(odd_model(named=False), name="odd")
    keys, _ = model.layout.planes
    assert [movement is None for movement in keys.movements] == [False, False, True]
    assert "keys of layer 2" in model.unsupported_reason
    tokens = token_ids(np.random.default_rng(1).integers(3, VOCAB_SIZE, TOKENS))
    segments = {SegmentId(1): computed(model, tokens).cut(Span(0, TOKENS))}
    target = model.new_sequence(2 * TOKENS)
    with pytest.raises(ValueError, match="cannot move a copy by 41 tokens"):
        target.write_copies([Copy(NodeId(1), SegmentId(1), 0, TOKENS, SHIFT, 0, 0)], segments)
    target.write_copies([Copy(NodeId(1), SegmentId(1), 0, TOKENS, 0, 0, 0)], segments)
    assert torch.equal(target.k[:, :TOKENS], segments[SegmentId(1)].k)
