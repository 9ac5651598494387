"""A pass over placeholders, without a model: what it writes, what each row sees, and how it is cut."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from delta_tree import Span
from kvshare.kv.attention import PartialPass, take_pass
from kvshare.kv.layout import PLAIN, AttentionForm, KVLayout, Reach
from kvshare.kv.sequence import SequenceKV

CPU = torch.device("cpu")
LAYOUT = KVLayout.uniform(2, 2, 8, dtype=torch.float32, device=CPU)
SHORT_AND_LONG = (Span(0, 3), Span(5, 6), Span(9, 90), Span(100, 101), Span(104, 108), Span(190, 200))
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])


def sequence(capacity: int = 200) -> SequenceKV:
    kv = SequenceKV(LAYOUT, capacity)
    generator = torch.Generator().manual_seed(capacity)
    for plane in kv.planes:
        plane.copy_(torch.randn(plane.shape, generator=generator))
    return kv


def by_hand(current: PartialPass, query: torch.Tensor, form: AttentionForm) -> torch.Tensor:
    """Softmax for each row and head alone, over the slots that the row sees. (1, H_q, N, D)"""
    key, value = current.kv.layer(0, current.num_visible)
    output = torch.empty_like(query)
    for row, position in enumerate(current.positions.tolist()):
        slots = slice(form.reach.first(position), position + 1)
        for head in range(query.shape[1]):
            keys, values = key[0, head // 2, slots], value[0, head // 2, slots]
            scores = keys @ query[0, head, row] / math.sqrt(query.shape[3])
            if form.softcap is not None:
                scores = form.softcap * torch.tanh(scores / form.softcap)
            sink = [] if form.sinks is None else [form.sinks[head : head + 1]]
            weights = torch.cat([scores, *sink]).softmax(dim=0)[: len(scores)]
            output[0, head, row] = weights @ values
    return output


@pytest.mark.parametrize("runs", [SHORT_AND_LONG, (Span(0, 70),), (Span(150, 151),)], ids=str)
@pytest.mark.parametrize(
    "form",
    [
        PLAIN,
        AttentionForm(Reach(20)),
        AttentionForm(Reach(500)),
        AttentionForm(Reach(16, is_chunked=True)),
        AttentionForm(softcap=1.5),
        AttentionForm(sinks=SINKS),
        AttentionForm(Reach(20), softcap=1.5, sinks=SINKS),
    ],
    ids=["plain", "window", "window of all", "chunks", "capped", "sinks", "all three"],
)
def test_each_row_sees_what_its_layer_lets_it_see(
    form: AttentionForm, runs: tuple[Span, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However runs share calls, and however many scores are held at a time where no kernel computes them."""
    monkeypatch.setattr("kvshare.kv.attention._SCORES", 1000)
    current = PartialPass(sequence(), runs)
    query = torch.randn(1, 4, current.num_queries, 8, generator=torch.Generator().manual_seed(1))
    key, value = current.kv.layer(0, current.num_visible)
    found = current.attend(0, query, key, value, scaling=None, form=form)
    torch.testing.assert_close(found, by_hand(current, query, form), atol=1e-5, rtol=0)


def test_new_rows_are_in_their_slots_before_a_layer_attends() -> None:
    """Of this layer only; all that lies after the last run is not handed out."""
    kv = sequence(20)
    before = [plane.clone() for plane in kv.planes]
    current = PartialPass(kv, (Span(3, 5), Span(9, 10)))
    k, v = torch.randn(2, 1, 2, 3, 8)
    keys, values = current.store(1, k, v)
    assert keys.shape == values.shape == (1, 2, 10, 8)
    assert torch.equal(keys[:, :, [3, 4, 9]], k)
    assert torch.equal(values[:, :, [3, 4, 9]], v)
    for plane, old in zip(kv.planes, before, strict=True):
        assert torch.equal(plane[0], old[0])
        others = [slot for slot in range(20) if slot not in (3, 4, 9)]
        assert torch.equal(plane[1, others], old[1, others])


@pytest.mark.parametrize(
    ("max_queries", "runs", "rest"),
    [
        (9, [(2, 6), (8, 9), (20, 24)], []),
        (8, [(2, 6), (8, 9), (20, 23)], [(23, 24)]),
        (5, [(2, 6), (8, 9)], [(20, 24)]),  # no run without tokens
        (4, [(2, 6)], [(8, 9), (20, 24)]),
        (1, [(2, 3)], [(3, 6), (8, 9), (20, 24)]),
    ],
)
def test_a_pass_takes_what_fits_from_the_left(
    max_queries: int, runs: Sequence[tuple[int, int]], rest: Sequence[tuple[int, int]]
) -> None:
    """All that is left comes in later passes, in order."""
    current, left = take_pass(sequence(30), (Span(2, 6), Span(8, 9), Span(20, 24)), max_queries=max_queries)
    assert current.runs == tuple(Span(*run) for run in runs)
    assert left == tuple(Span(*run) for run in rest)
