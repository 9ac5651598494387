"""How runs are split into passes, and their inputs. That a pass is exact is tested in test_parity.py."""

from __future__ import annotations

import numpy as np

from tests.kvshare.vllm_connector.worker.small_worker import BLOCK_SIZE, new_worker, one_rank


def test_passes_are_bounded() -> None:
    """By tokens, and by runs: backends keep buffers for as many sequences as vLLM runs at most."""
    from delta_tree import Span
    from kvshare.vllm_connector.worker.runs import Run, split

    spans = [Span(0, 1), Span(2, 3), Span(4, 5), Span(6, 30), Span(31, 32)]
    batches = list(split([Run((1,), span, tuple(range(32))) for span in spans], 10, 2))
    assert all(len(batch) <= 2 and sum(len(run.span) for run in batch) <= 10 for batch in batches)
    computed = [p for batch in batches for run in batch for p in range(run.span.start, run.span.end)]
    assert computed == [p for span in spans for p in range(span.start, span.end)]


def test_a_head_gets_the_following_tokens_and_writes_what_the_target_keeps() -> None:
    """Of a prompt's last token, the token itself follows: vLLM knows the right one, and computes it again."""
    from delta_tree import Span
    from kvshare.vllm_connector.metadata import LoadRequest
    from kvshare.vllm_connector.worker.pass_inputs import following_ids, kept_rows
    from kvshare.vllm_connector.worker.runs import runs_of, split

    token_ids = np.arange(100, 120, dtype=np.int32)
    load = LoadRequest("r", (3, 5, 9, 2, 7), 0, 20, token_ids, ())
    runs = runs_of(load, [Span(1, 4), Span(6, 7), Span(10, 20)], kept=(2, 6, 10))
    assert [run.kept for run in runs] == [(2,), (6,), (10,)]
    (batch,) = split(runs, 100)
    assert following_ids(batch).tolist() == [102, 103, 104, 107, *range(111, 120), 119]
    assert kept_rows(batch).nonzero()[0].tolist() == [1, 3, 4]
    (_, second) = split(runs[-1:], 5)
    assert not kept_rows(second).any()


def test_the_inputs_of_a_pass_are_those_of_each_run() -> None:
    """Of several requests, in any order, some shifted; blocks are looked up once for each request."""
    from delta_tree import Span
    from kvshare.vllm_connector.worker.pass_inputs import pass_inputs
    from kvshare.vllm_connector.worker.runs import Run

    rng = np.random.default_rng(0)
    with one_rank():
        cache = new_worker(1).attached.cache
    runs, looked_up, find = list[Run](), list[object](), cache.kernel_blocks
    for number in range(3):
        block_ids = tuple(rng.permutation(20)[:9].tolist())
        token_ids = rng.integers(1000, size=9 * BLOCK_SIZE, dtype=np.int32)
        edges = np.sort(rng.choice(9 * BLOCK_SIZE, 10, replace=False)).tolist()
        spans = [Span(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True)]
        runs += [Run(block_ids, span, token_ids, shift=number) for span in spans]
    runs = [runs[index] for index in rng.permutation(len(runs))]
    cache.kernel_blocks = lambda *given: looked_up.append(given) or find(*given)  # type: ignore[method-assign, func-returns-value]
    made = pass_inputs(runs, cache)
    assert len(looked_up) == 3
    for number, run in enumerate(runs):
        own, blocks = slice(*made.starts[number : number + 2]), find(run.block_ids, Span(0, run.span.end))
        places = np.arange(run.span.start, run.span.end)
        assert (made.token_ids[own] == run.token_ids[places]).all()
        assert (made.positions[own] == places + run.shift).all()
        assert (made.slots[own] == cache.slot_numbers(run.block_ids, run.span)).all()
        assert made.ends[number] == run.span.end
        assert made.table[number, : len(blocks)].tolist() == list(blocks)
        assert not made.table[number, len(blocks) :].any()
    assert made.longest == max(len(run.span) for run in runs)
    assert [each.dtype.itemsize for each in (made.token_ids, made.table, made.slots)] == [4, 4, 8]
