"""
The least that a prefill which is partly shared could take, counted and not measured.

What is computed costs its floating-point operations at the rate of a full prefill, what is laid costs its
bytes at the bandwidth of a plain copy in memory. Looking up, planning and sending are not in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig

from delta_tree import Span, merge
from kvshare.vllm_protocol.messages import Finished

_COPIED_BYTES = 256 * 2**20  # more than any cache of a processor
_COPIES = 5


def prefill_flops(config: LlamaConfig, spans: Iterable[Span]) -> int:
    """
    Floating-point operations of the tokens at these positions, each seeing all before it and itself.

    Of a token at position p, counted from 0, in each layer: 2 per weight of the linear layers, and
    4 (p + 1) heads x head size for attention (queries x keys, probabilities x values). Norms, rotation,
    softmax, and the logits of the last token are left out.
    """
    width = config.num_attention_heads * _head_size(config)
    num_tokens = seen = 0
    for span in spans:
        num_tokens += len(span)
        seen += (span.start + 1 + span.end) * len(span) // 2
    per_layer = 2 * _layer_weights(config) * num_tokens + 4 * width * seen
    return int(config.num_hidden_layers) * per_layer


def model_size(config: LlamaConfig) -> dict[str, int]:
    """What a document says of its model: layers, width, and weights of the layers without embeddings."""
    return {
        "num_layers": int(config.num_hidden_layers),
        "hidden_size": int(config.hidden_size),
        "layer_parameters": int(config.num_hidden_layers) * _layer_weights(config),
    }


def computed_spans(finished: Finished) -> tuple[Span, ...]:
    """
    Where the prompt tokens stand that vLLM computed for a request: where it retained new KV.

    The first `num_computed` of these, as an answer's stand behind them. Where nothing was retained, the first
    positions of the prompt are taken, whose count of operations is the smallest.
    """
    spans = [Span(stored.start, stored.start + stored.length) for stored in finished.stored]
    found: list[Span] = []
    left = finished.num_computed
    for span in merge(spans):
        start = max(span.start, finished.num_local)
        end = min(span.end, start + left)
        if start < end:
            found.append(Span(start, end))
            left -= end - start
    if not left:
        return tuple(found)
    return (Span(finished.num_local, finished.num_local + finished.num_computed),)


@dataclass(frozen=True, slots=True)
class Bound:
    """Of one prompt: the share of a full prefill's operations that is computed, and the bytes laid."""

    flop_share: float
    num_bytes: int
    copied_bytes_per_s: float

    def seconds(self, full_s: float) -> float:
        """Given what a full prefill takes."""
        return full_s * self.flop_share + self.num_bytes / self.copied_bytes_per_s


def bound_of(
    config: LlamaConfig, finished: Finished, *, num_tokens: int, bytes_per_token: int, bytes_per_s: float
) -> Bound:
    """Of a prompt of so many tokens that vLLM has served."""
    num_laid = num_tokens - finished.num_computed - finished.num_local
    whole = prefill_flops(config, (Span(0, num_tokens),))
    share = prefill_flops(config, computed_spans(finished)) / whole
    return Bound(share, num_laid * bytes_per_token, bytes_per_s)


def copied_bytes_per_s(num_threads: int, num_bytes: int = _COPIED_BYTES) -> float:
    """Bandwidth of memcpy between two buffers of so many bytes each, the best of a few copies."""
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
        return num_bytes / min(_copy_seconds(source, target) for _ in range(_COPIES))
    finally:
        torch.set_num_threads(threads)


def throughput_bound(prefill_s: float, decode_s: float, flop_share: float) -> float:
    """
    How many times the requests a second there are, at best, where prefill costs only this share.

    (P + D) / (c P + D) of the CPU seconds that prefill and decoding take without sharing.
    """
    return (prefill_s + decode_s) / (flop_share * prefill_s + decode_s)


def _copy_seconds(source: torch.Tensor, target: torch.Tensor) -> float:
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


def _layer_weights(config: LlamaConfig) -> int:
    """Of the linear layers of one layer: queries and output, keys and values, and the three of the MLP."""
    hidden, size = _int(config.hidden_size), _head_size(config)
    attention = 2 * hidden * size * (_int(config.num_attention_heads) + _int(config.num_key_value_heads))
    return attention + 3 * hidden * _int(config.intermediate_size)


def _head_size(config: LlamaConfig) -> int:
    return _int(config.hidden_size) // _int(config.num_attention_heads)


def _int(value: Any) -> int:
    """Of a configuration, whose fields may be unset."""
    return int(value)
