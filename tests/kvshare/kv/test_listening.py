"""What a pass's rows attend to, against the model's own eager attention."""

from typing import Any

import numpy as np
import pytest
import torch

from delta_tree import Span, token_ids
from kvshare.embedded.model import EmbeddedModel
from kvshare.kv.attention import take_pass
from kvshare.kv.layout import PLAIN, AttentionForm, Reach
from kvshare.kv.listening import Listener, attention, hidden, placed
from kvshare_lab.bench.random_models import tiny_model

TOKENS = token_ids(np.random.default_rng(3).integers(16, 290, 40))
LISTENING = (Span(9, 11), Span(30, 40))
FORMS = [
    AttentionForm(Reach(7)),
    AttentionForm(Reach(16, is_chunked=True)),
    AttentionForm(softcap=2.0),
    AttentionForm(sinks=torch.arange(6.0)),
    AttentionForm(Reach(9), softcap=3.0, sinks=torch.arange(6.0)),
]


def eager(family: str) -> torch.Tensor:
    """(L, T, T) attention as transformers computes it, mean over heads."""
    network = tiny_model(family)
    network.set_attn_implementation("eager")
    ids = torch.from_numpy(TOKENS.astype(np.int64))[None]
    with torch.inference_mode():
        weights = network(ids, output_attentions=True).attentions
    return torch.stack([layer[0].mean(dim=0) for layer in weights])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt-oss", "cohere2", "llama4"])
@pytest.mark.parametrize("max_queries", [64, 7])
def test_it_hears_what_eager_attention_has(family: str, max_queries: int) -> None:
    """Grouped heads, norms on queries and keys, windows, chunks, caps, sinks; rows of several passes."""
    rows = [place for span in LISTENING for place in range(span.start, span.end)]
    expected = eager(family)[:, rows].mean(dim=1)
    model = EmbeddedModel(tiny_model(family), name=family)
    kv = model.new_sequence(len(TOKENS))
    remaining: tuple[Span, ...] = (Span(0, len(TOKENS)),)
    listener = Listener(
        LISTENING, num_layers=model.layout.num_layers, num_slots=len(TOKENS), device=torch.device("cpu")
    )
    while remaining:
        current, remaining = take_pass(kv, remaining, max_queries=max_queries, listener=listener)
        span = current.runs[0]
        model.compute(current, TOKENS[span.start : span.end])
    assert listener.attended.numpy() == pytest.approx(expected.numpy(), abs=1e-6)
    if family != "gpt-oss":  # whose sinks take a share
        assert listener.attended.numpy().sum(axis=1) == pytest.approx(
            np.ones(model.layout.num_layers), abs=1e-5
        )


def test_rows_that_nobody_asked_for_are_not_heard() -> None:
    listener = Listener([Span(3, 4)], num_layers=1, num_slots=8, device=torch.device("cpu"))
    assert listener.rows_of([(0, Span(4, 6)), (2, Span(0, 3))]) is None


def test_a_row_does_not_hear_what_comes_behind_it() -> None:
    spans = [Span(2, 3), Span(5, 6)]
    listener = Listener(spans, num_layers=1, num_slots=6, device=torch.device("cpu"))
    rows = listener.rows_of([(0, Span(5, 6)), (1, Span(2, 3))])
    assert rows is not None
    rows.observe(0, torch.randn(2, 2, 4), torch.ones(1, 6, 4), scaling=None)  # all keys alike: even weights
    both, last = (1 / 3 + 1 / 6) / 2, 1 / 6 / 2
    assert listener.attended.numpy()[0].tolist() == pytest.approx([both] * 3 + [last] * 3)


@pytest.mark.parametrize("rounds", [False, True])
def test_in_16_bits_weights_are_nearly_those_of_32(rounds: bool) -> None:
    """Of keys with a large common part, as many models have them: to 2 % of what each slot gets in all."""
    torch.manual_seed(1)
    query, key = torch.randn(3, 16, 64).bfloat16(), torch.randn(500, 64).bfloat16()
    key[:, 3] += 40.0
    positions = torch.arange(484, 500)
    found, expected = (
        attention(positions, rows, keys, scaling=None, rounds=rounds).sum(dim=(0, 1), dtype=torch.float32)
        for rows, keys in ((query, key), (query.float(), key.float()))
    )
    assert found.dtype == torch.float32
    assert torch.allclose(found, expected, rtol=0.02, atol=1e-4)


@pytest.mark.parametrize("form", [PLAIN, *FORMS], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_together_have_the_weights_of_each(form: AttentionForm, dtype: torch.dtype) -> None:
    """As a GPU computes them: windows, chunks, caps and sinks with the heads that they belong to."""
    torch.manual_seed(2)
    query, key = torch.randn(3, 2, 5, 16).to(dtype), torch.randn(3, 40, 16).to(dtype)
    positions = torch.tensor([20, 31, 32, 33, 39])
    together = attention(positions, query, key, scaling=None, first=20, form=form)
    alone = [
        attention(positions, query[head], key[head], scaling=None, first=20, form=form, group=head)
        for head in range(3)
    ]
    assert torch.allclose(together, torch.stack(alone), atol=1e-6 if dtype == torch.float32 else 1e-2)


def test_what_all_keys_have_in_common_does_not_count() -> None:
    """In bfloat16 as well: a large common part cancels in the softmax, if nothing was rounded before."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 64).bfloat16(), torch.randn(8, 64).bfloat16()
    query[:, :, 0], key[:, 0] = 16.0, 16.0
    shifted = key.clone()
    shifted[:, 0] = 256.0  # 480 more on every score
    positions = torch.arange(4, 8)
    plain, common = (attention(positions, query, keys, scaling=None) for keys in (key, shifted))
    assert torch.allclose(plain, common, atol=1e-4)


def test_runs_of_a_pass_are_placed_one_after_the_other() -> None:
    """Each with its first row."""
    runs = [Span(4, 6), Span(9, 10), Span(20, 23)]
    assert placed(runs) == [(0, runs[0]), (2, runs[1]), (3, runs[2])]
    assert placed([]) == []


def listener_of(*spans: Span, num_layers: int = 2, **options: Any) -> Listener:
    return Listener(spans, num_layers=num_layers, num_slots=12, device=torch.device("cpu"), **options)


def test_only_the_rows_in_question_are_found_in_a_pass() -> None:
    """With their positions, and up to where any of them sees; whatever runs they come in."""
    rows = listener_of(Span(2, 5), Span(8, 10)).rows_of(placed([Span(0, 4), Span(8, 12)]))
    assert rows is not None
    assert rows.indices.tolist() == [2, 3, 4, 5]
    assert rows.positions.tolist() == [2, 3, 8, 9]
    assert (rows.first, rows.end) == (2, 10)


def test_it_is_complete_with_its_last_row_in_its_last_layer() -> None:
    """In the middle of a pass: choosing begins there. Each row counts once, in whatever pass it comes."""
    completed: list[int] = []
    listener = listener_of(Span(2, 5), Span(8, 10), when_complete=lambda: completed.append(1))
    for runs in ([Span(0, 4)], [Span(4, 9)], [Span(9, 12)]):
        assert completed == []
        rows = listener.rows_of(placed(runs))
        assert rows is not None
        listener.note(0, rows)
        assert completed == []
        listener.note(1, rows)
    assert completed == [1]


def test_layers_above_the_last_one_in_question_are_not_listened_to() -> None:
    """The second pass is launched while they are still computed."""
    rows = listener_of(Span(2, 5), num_layers=2).rows_of(placed([Span(0, 12)]))
    assert rows is not None
    assert [rows.listen_in(layer) for layer in range(4)] == [True, True, False, False]


def test_without_rows_there_is_nothing_and_no_division_by_it() -> None:
    assert not listener_of().attended.numpy().any()


def test_rows_of_several_passes_add_up_to_those_of_one() -> None:
    """And a layer's sums are its own."""
    torch.manual_seed(4)
    query, key = torch.randn(2, 12, 4), torch.randn(1, 12, 4)
    together, apart = listener_of(Span(3, 9)), listener_of(Span(3, 9))
    for listener, passes in ((together, [Span(0, 12)]), (apart, [Span(0, 5), Span(5, 12)])):
        for run in passes:
            rows = listener.rows_of(placed([run]))
            assert rows is not None
            rows.observe(1, query[:, run.start : run.end], key, scaling=None)
    assert apart.attended.numpy() == pytest.approx(together.attended.numpy(), abs=1e-6)
    assert together.attended.numpy()[1].sum() == pytest.approx(1.0, abs=1e-5)
    assert not together.attended.numpy()[0].any()
    assert not together.attended.numpy()[1, 9:].any()  # later tokens


@pytest.mark.parametrize(
    ("reach", "first", "expected"),
    [
        (Reach(), 0, ["..xxxx", "....xx"]),
        (Reach(), 2, ["xxxx", "..xx"]),  # all see the first two
        (Reach(2), 0, ["..xxxx", "xx..xx"]),
        (Reach(2), 2, ["..xxxx", "xx..xx"]),  # not here
        (Reach(3, is_chunked=True), 0, ["..xxxx", "xxx.xx"]),
    ],
)
def test_what_a_row_does_not_see_is_hidden(reach: Reach, first: int, expected: list[str]) -> None:
    """Of rows at 1 and 3, and six slots."""
    found = hidden(torch.tensor([1, 3]), Span(0, 6), reach, first=first)
    assert ["".join("x" if each else "." for each in row) for row in found.tolist()] == expected
