"""The least that a shared prefill could take: operations counted one by one, bytes, and bandwidth."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, LlamaForCausalLM

from delta_tree import SegmentId, Span
from kvshare.kv.layout import ALL_EARLIER, Reach
from kvshare.vllm_protocol.messages import FinishedReport, StoredSegment
from kvshare_lab.bench.bound import (
    Bound,
    ModelSize,
    computed_spans,
    copied_bytes_per_s,
    spans_of,
    throughput_bound,
)
from kvshare_lab.bench.random_models import llama_config

CONFIG = llama_config("small", max_position_embeddings=64, vocab_size=32)
SIZE = ModelSize.of_config(CONFIG)


def brute_force(spans: list[Span], length: int) -> int:
    """Operations of the model itself, one token at a time behind all before it; no logits."""
    config = llama_config("small", max_position_embeddings=64, vocab_size=32)
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).train(False)
    computed = {place for span in spans for place in range(span.start, span.end)}
    cache, total = DynamicCache(config=config), 0
    with torch.inference_mode():
        for place in range(length):
            with FlopCounterMode(display=False) as counter:
                model.model(torch.tensor([[place % 32]]), past_key_values=cache)
            if place in computed:
                total += counter.get_total_flops()
    return total


@pytest.mark.parametrize("spans", [[Span(0, 9)], [Span(0, 1)], [Span(2, 4), Span(7, 9)]])
def test_operations_are_those_of_the_model(spans: list[Span]) -> None:
    """As counted while a Llama computes those tokens at those positions."""
    assert SIZE.flops(spans) == brute_force(spans, 9)


def test_later_tokens_cost_more() -> None:
    """A whole prompt is its parts, and a token at its end sees more than one at its top."""
    whole = SIZE.flops([Span(0, 300)])
    assert whole == SIZE.flops([Span(0, 120), Span(120, 300)])
    assert SIZE.flops([Span(299, 300)]) > SIZE.flops([Span(0, 1)])
    assert SIZE.flops([]) == 0


def test_a_model_is_described_by_its_size() -> None:
    """Weights of the layers, as the model has them."""
    layers = LlamaForCausalLM(CONFIG).model.layers
    weights = sum(w.numel() for name, w in layers.named_parameters() if "norm" not in name)
    assert SIZE.to_json() == {"num_layers": 4, "hidden_size": 256, "layer_parameters": weights}
    assert SIZE.attention_width == 4 * 64


def test_windows_and_chunks_bound_what_a_token_attends_to() -> None:
    """Counted one by one: a window of 3 tokens, chunks of 4, and all earlier tokens."""
    places = range(2, 9)
    seen = {ALL_EARLIER: [p + 1 for p in places], Reach(3): [min(p + 1, 3) for p in places]}
    seen[Reach(4, is_chunked=True)] = [p % 4 + 1 for p in places]
    for reach, attended in seen.items():
        size = replace(SIZE, num_layers=1, reaches=(reach,))
        expected = 2 * SIZE.layer_parameters * 7 + 4 * SIZE.attention_width * sum(attended)
        assert size.flops([Span(2, 9)]) == expected


def finished(*stored: tuple[int, int], num_computed: int, num_local: int = 0) -> FinishedReport:
    """What a connector reports; rows are start and length."""
    segments = tuple(StoredSegment(SegmentId(number + 1), *row, 0) for number, row in enumerate(stored))
    return FinishedReport(
        "1", "approx", None, num_computed=num_computed, num_local=num_local, stored=segments
    )


def test_computed_tokens_stand_where_new_kv_was_retained() -> None:
    """Those of the prompt; what stands behind them is the answer's."""
    assert computed_spans(finished((90, 10), (5, 10), (100, 7), num_computed=20)) == (
        Span(5, 15),
        Span(90, 100),
    )
    assert computed_spans(finished((0, 60), num_computed=28, num_local=32)) == (Span(32, 60),)


def test_computed_tokens_that_were_not_retained_are_counted_at_the_top() -> None:
    """Their positions are not known; at the top they cost least."""
    assert computed_spans(finished(num_computed=20)) == (Span(0, 20),)


def test_the_bound_adds_computing_and_copying() -> None:
    """Seconds of a full prefill by the share of operations, and bytes over bandwidth."""
    assert Bound(flop_share=0.1, num_bytes=3000, copied_bytes_per_s=1000.0).seconds(20.0) == 5.0
    computed = spans_of(np.arange(50, 100))
    found = Bound.of(SIZE, computed, num_tokens=100, num_copied=50, bytes_per_token=8, bytes_per_s=1e9)
    assert found.num_bytes == 50 * 8
    assert 0.5 < found.flop_share < 0.6, "the second half sees more"


def test_the_bound_of_throughput_is_what_decoding_leaves() -> None:
    """(P + D) / (cP + D)."""
    assert throughput_bound(9.0, 1.0, 0.5) == pytest.approx(10 / 5.5)
    assert throughput_bound(9.0, 1.0, 1.0) == 1.0


def test_the_bandwidth_of_a_copy_is_measured() -> None:
    """The number of threads is as it was before."""
    threads = torch.get_num_threads()
    assert np.isfinite(copied_bytes_per_s(1, num_bytes=1 << 20))
    assert torch.get_num_threads() == threads
