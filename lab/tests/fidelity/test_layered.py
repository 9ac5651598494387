"""A pass run layer by layer is the product's own, and the same as a decoder written out in plain torch."""

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from delta_tree import Span
from kvshare.embedded.model import EmbeddedModel
from kvshare.errors import ModelError
from kvshare.kv.attention import PartialPass
from kvshare.kv.sequence import SequenceKV
from kvshare_lab.bench.random_configurations import PLAIN
from kvshare_lab.bench.random_models import VOCAB_SIZE, tiny_model
from kvshare_lab.fidelity.layered import ForwardPass, LayeredModel, LayerHook, LayerUpdate, causal
from lab.tests.fidelity.scenes import CLOSE, dense, engine_kv, llama, text

TOKENS = text(40, 90)
RUNS = (Span(12, 30), Span(41, 42), Span(60, 90))
SLOTS = np.concatenate([np.arange(run.start, run.end) for run in RUNS])
ALL = np.arange(len(TOKENS))


def stale(model: LayeredModel, seed: int = 41) -> SequenceKV:
    """A sequence whose slots hold the KV of another text."""
    return engine_kv(model, text(seed, len(TOKENS)))


def assert_same_kv(found: SequenceKV, k: torch.Tensor, v: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found.k, k.float(), atol=tolerance, rtol=0)
    torch.testing.assert_close(found.v, v.float(), atol=tolerance, rtol=0)


@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.parametrize("name", sorted(PLAIN))
def test_a_full_pass_equals_the_products(name: str, watched: bool) -> None:
    """K and V of every layer and the logits after every token, with attention recorded or not."""
    model = LayeredModel(EmbeddedModel(tiny_model(name), name=name))
    found, expected = model.model.new_sequence(len(TOKENS)), model.model.new_sequence(len(TOKENS))
    seen: list[torch.Tensor] = []
    forward = ForwardPass(
        TOKENS, ALL, weights=(lambda layer, weights: seen.append(weights)) if watched else None
    )
    logits = model.run(found, forward, logits_of=ALL)
    own = model.model.logits(PartialPass(expected, (Span(0, len(TOKENS)),)), TOKENS, keep=len(TOKENS))
    assert_same_kv(found, expected.k, expected.v)
    torch.testing.assert_close(logits, torch.log_softmax(own, dim=-1), atol=1e-5, rtol=0)
    assert len(seen) == (model.num_layers if watched else 0)


def test_a_partial_pass_equals_the_products() -> None:
    """Over the same stale KV and the same placeholders."""
    model = llama()
    found, expected = stale(model), stale(model)
    logits = model.run(found, ForwardPass(TOKENS[SLOTS], SLOTS), logits_of=np.arange(len(SLOTS)))
    own = model.model.logits(PartialPass(expected, RUNS), TOKENS[SLOTS], keep=len(SLOTS))
    assert_same_kv(found, expected.k, expected.v)
    torch.testing.assert_close(logits, torch.log_softmax(own, dim=-1), atol=1e-5, rtol=0)


def test_attention_is_what_the_written_out_decoder_sees() -> None:
    """Weights of every layer and head, of rows over stale KV."""
    model, kv = llama(), stale(llama())
    expected = dense(model, TOKENS, kv.k, kv.v, torch.from_numpy(SLOTS))
    seen: dict[int, torch.Tensor] = {}
    forward = ForwardPass(TOKENS[SLOTS], SLOTS, weights=seen.__setitem__)
    model.run(kv, forward, logits_of=np.array([0]))
    for layer, weights in enumerate(expected.attention):
        torch.testing.assert_close(seen[layer], weights.float(), atol=CLOSE, rtol=0)


@pytest.mark.parametrize("num_layers", [2, 4])
def test_rows_that_are_dropped_keep_their_old_kv(num_layers: int) -> None:
    """Every second row leaves behind layer 0, every fourth behind layer 1: the others see their old KV."""
    model = llama(num_layers)
    kv, before = stale(model), stale(model)
    at_layer = np.ones((num_layers, len(SLOTS)), np.bool_)
    at_layer[1:, 0:-1:2] = False
    at_layer[2:, 1:-1:4] = False
    staying = [torch.from_numpy(SLOTS[layer]) for layer in at_layer]
    expected = dense(
        model, TOKENS, kv.k, kv.v, staying[0], next_rows=lambda layer, rows, k, v: staying[layer + 1]
    )
    left = at_layer[-1].nonzero()[0]
    logits = model.run(kv, ForwardPass(TOKENS[SLOTS], SLOTS, at_layer=at_layer), logits_of=left)
    assert_same_kv(kv, expected.k, expected.v, CLOSE)
    torch.testing.assert_close(logits.double(), expected.log_probabilities, atol=CLOSE, rtol=0)
    gone = SLOTS[~at_layer[1]]
    assert torch.equal(kv.k[1:, gone], before.k[1:, gone])
    assert not torch.equal(kv.k[0, gone], before.k[0, gone])


class Leaving(LayerHook):
    """Every second repaired row goes after each of the first two layers; what it was shown is kept."""

    def __init__(self) -> None:
        self.updates: list[LayerUpdate] = []

    def after_write(self, update: LayerUpdate) -> None:
        self.updates.append(update)

    def continuing(self, update: LayerUpdate) -> torch.Tensor | None:
        return None if update.layer > 1 else torch.arange(int(update.repaired.sum())) % 2 == 0


def test_a_hook_stops_repaired_rows() -> None:
    """Only repaired rows go, they are counted layer by layer, and their old KV is shown beside the fresh."""
    model = llama()
    kv, same, before = stale(model), stale(model), stale(model)
    repaired = np.isin(SLOTS, range(60, 74))
    leaving = Leaving()
    forward = ForwardPass(TOKENS[SLOTS], SLOTS, repaired=repaired, hook=leaving)
    logits = model.run(kv, forward, logits_of=np.array([len(SLOTS) - 1]))
    assert forward.num_computed == [14, 7, 4, 4]
    at_layer = np.ones((4, len(SLOTS)), np.bool_)
    inside = repaired.nonzero()[0]
    for layer in range(1, 4):
        at_layer[layer, np.setdiff1d(inside, inside[:: 2 ** min(layer, 2)])] = False
    expected = model.run(
        same, ForwardPass(TOKENS[SLOTS], SLOTS, at_layer=at_layer), logits_of=np.array([len(SLOTS) - 1])
    )
    assert_same_kv(kv, same.k, same.v, 0.0)
    torch.testing.assert_close(logits, expected, atol=0, rtol=0)
    for update in leaving.updates:
        assert torch.equal(update.old_k, before.k[update.layer, update.slots])
        assert torch.equal(update.old_v, before.v[update.layer, update.slots])
        assert torch.equal(update.k, kv.k[update.layer, update.slots])


class Zeroed(LayerHook):
    """Puts zeros for the fresh rows of layer 1."""

    def after_write(self, update: LayerUpdate) -> None:
        if update.layer == 1:
            update.kv.k[1, update.slots], update.kv.v[1, update.slots] = 0.0, 0.0


def test_what_a_hook_writes_is_attended_to() -> None:
    """Layer 2 has other values if layer 1's rows were overwritten before anybody saw them."""
    model = llama()
    plain, changed = stale(model), stale(model)
    model.run(plain, ForwardPass(TOKENS[SLOTS], SLOTS), logits_of=np.array([0]))
    model.run(changed, ForwardPass(TOKENS[SLOTS], SLOTS, hook=Zeroed()), logits_of=np.array([0]))
    assert not changed.k[1, SLOTS].any()
    assert torch.equal(plain.v[0], changed.v[0])
    assert float((plain.v[2, SLOTS] - changed.v[2, SLOTS]).abs().max()) > 0.01


def test_what_is_not_visible_is_not_seen() -> None:
    """Hidden slots may hold anything; a row always sees itself; positions need not be slots."""
    model, kv = llama(), stale(llama())
    kv.k[:, 5:12], kv.v[:, 5:12] = 1e4, 1e4
    visible = causal(SLOTS, len(TOKENS))
    visible[:, 5:12] = False
    visible[np.arange(len(SLOTS)), SLOTS] = False
    hidden = model.run(
        kv, ForwardPass(TOKENS[SLOTS], SLOTS, visible=visible), logits_of=np.arange(len(SLOTS))
    )
    # the same with the slots cut out, the positions as they were
    cut = model.model.new_sequence(len(TOKENS) - 7)
    old, kept = stale(model), np.setdiff1d(ALL, np.arange(5, 12))
    cut.k.copy_(old.k[:, kept])
    cut.v.copy_(old.v[:, kept])
    forward = ForwardPass(TOKENS[SLOTS], SLOTS - 7, positions=SLOTS)
    expected = model.run(cut, forward, logits_of=np.arange(len(SLOTS)))
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=0)


def test_a_model_of_other_parts_is_refused() -> None:
    """GPT-2 has no rotary embedding and no `layers`."""
    config = GPT2Config(vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=2, n_positions=128)
    model = EmbeddedModel(GPT2LMHeadModel(config), name="gpt2")
    with pytest.raises(ModelError, match="gpt2: layers cannot be run one by one"):
        LayeredModel(model)
