"""How runs are split into passes. That a pass is exact is tested in test_parity.py."""


def test_passes_are_bounded() -> None:
    """By tokens, and by runs: backends keep buffers for as many sequences as vLLM runs at most."""
    from delta_tree import Span
    from kvshare.vllm_connector.worker.partial_forward import Run, split

    spans = [Span(0, 1), Span(2, 3), Span(4, 5), Span(6, 30), Span(31, 32)]
    runs = [Run((1,), span, tuple(range(span.start, span.end)), span.start) for span in spans]
    batches = list(split(runs, 10, 2))
    assert all(len(batch) <= 2 and sum(len(run.span) for run in batch) <= 10 for batch in batches)
    computed = [token for batch in batches for run in batch for token in run.token_ids]
    assert computed == [token for run in runs for token in run.token_ids]
