"""How runs are split into passes. That a pass is exact is tested in test_parity.py."""


def test_passes_are_bounded() -> None:
    """By tokens, and by runs: backends keep buffers for as many sequences as vLLM runs at most."""
    from delta_tree import Span
    from kvshare.vllm_connector.worker.partial_forward import Run, split

    spans = [Span(0, 1), Span(2, 3), Span(4, 5), Span(6, 30), Span(31, 32)]
    batches = list(split([Run((1,), span, tuple(range(32))) for span in spans], 10, 2))
    assert all(len(batch) <= 2 and sum(len(run.span) for run in batch) <= 10 for batch in batches)
    computed = [p for batch in batches for run in batch for p in range(run.span.start, run.span.end)]
    assert computed == [p for span in spans for p in range(span.start, span.end)]
