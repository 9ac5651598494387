"""
A lower bound for the time of a partly shared prefill, counted rather than measured, and the bandwidth of
copies, on which it depends.

Computed tokens cost their floating-point operations at the rate of a full prefill. Copied tokens cost their
bytes at the bandwidth of memcpy. Looking up, planning and sending cost nothing.
"""

import timeit
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from delta_tree import Span, merge
from kvshare.embedded.stored_model import head_dim_of
from kvshare.kv.layout import ALL_EARLIER, Reach
from kvshare.vllm_protocol.messages import FinishedReport

_COPIED_BYTES = 256 * 2**20  # more than any processor's cache
_COPIES = 5


@dataclass(frozen=True, slots=True)
class ModelSize:
    """
    What decides the floating-point operations of a prefill.

    `layer_parameters`: weights of all layers' linear modules, without embeddings and output layer; of a
    mixture of experts all experts count. `reaches`: one for each layer; none if all attend to all earlier
    tokens.
    """

    num_layers: int
    hidden_size: int
    layer_parameters: int
    attention_width: int  # query heads x head size; the mean of layers that differ
    reaches: Sequence[Reach] = ()

    @classmethod
    def of_network(cls, network: PreTrainedModel, reaches: Sequence[Reach] = ()) -> Self:
        config = network.config
        layers = config.per_layer_config
        output = network.get_output_embeddings()  # type: ignore[no-untyped-call]  # no types
        linear = (
            each for each in network.modules() if isinstance(each, torch.nn.Linear) and each is not output
        )
        return cls(
            num_layers=int(config.num_hidden_layers),
            hidden_size=int(config.hidden_size),
            layer_parameters=sum(each.weight.numel() for each in linear),
            attention_width=round(mean(own.num_attention_heads * head_dim_of(own) for own in layers)),
            reaches=reaches,
        )

    @classmethod
    def of_config(cls, config: PreTrainedConfig) -> Self:
        """Of a model that need not exist; of one that takes media, its language model."""
        with torch.device("meta"):
            if config.get_text_config() is config:
                return cls.of_network(AutoModelForCausalLM.from_config(config))  # type: ignore[no-untyped-call]
            whole = AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
            return cls.of_network(whole.get_decoder())

    def flops(self, spans: Iterable[Span]) -> int:
        """
        Operations for the tokens at these positions, each of which attends to itself and to those before it.

        A token costs 2 for each weight, and in each layer 4 x attention width for every token that it attends
        to (queries x keys, probabilities x values). Norms, rotation, softmax and logits are left out.
        """
        places = torch.cat([torch.arange(0), *(torch.arange(span.start, span.end) for span in spans)])
        layers = Counter(self.reaches or (ALL_EARLIER,) * self.num_layers)
        attended = sum(
            count * int((places + 1 - reach.firsts(places)).sum()) for reach, count in layers.items()
        )
        return 2 * self.layer_parameters * len(places) + 4 * self.attention_width * attended

    def to_json(self) -> dict[str, int]:
        names = ("num_layers", "hidden_size", "layer_parameters")
        return {name: getattr(self, name) for name in names}


def spans_of(positions: NDArray[np.int64]) -> tuple[Span, ...]:
    """Positions as ascending spans."""
    return merge([Span(place, place + 1) for place in np.unique(positions).tolist()])


def computed_spans(finished: FinishedReport) -> tuple[Span, ...]:
    """
    The positions of the prompt that vLLM computed for a request: where new KV was stored.

    The answer's KV is stored after that of the prompt, so only the first `num_computed` positions count.
    Where less was stored, the first positions of the prompt are taken: they cost the fewest operations.
    """
    stored = merge([Span(each.start, each.start + each.length) for each in finished.stored])
    places = np.concatenate([np.arange(0), *(np.arange(span.start, span.end) for span in stored)])
    places = places[places >= finished.num_local][: finished.num_computed]
    if len(places) < finished.num_computed:
        return (Span(finished.num_local, finished.num_local + finished.num_computed),)
    return spans_of(places)


@dataclass(frozen=True, slots=True)
class Bound:
    """Of one prompt: the share of a full prefill's operations that is computed, and the bytes copied."""

    flop_share: float
    num_bytes: int
    copied_bytes_per_s: float

    @classmethod
    def of(
        cls,
        size: ModelSize,
        computed: Iterable[Span],
        *,
        num_tokens: int,
        num_copied: int,
        bytes_per_token: int,
        bytes_per_s: float,
    ) -> Self:
        """Of a prompt of which these spans were computed and so many other tokens copied."""
        share = size.flops(computed) / size.flops([Span(0, num_tokens)])
        return cls(share, num_copied * bytes_per_token, bytes_per_s)

    def seconds(self, full_s: float) -> float:
        """The bound, where a full prefill takes `full_s`."""
        return full_s * self.flop_share + self.num_bytes / self.copied_bytes_per_s


def bound_figures(bounds: Sequence[Bound], *, full_s: float, shared_s: float) -> Mapping[str, Any]:
    """Medians over an arm's repeats. `of_bound`: bound over measured seconds, at most 1 but for noise."""
    seconds = median(bound.seconds(full_s) for bound in bounds)
    return {
        "of_bound": seconds / shared_s,
        "bound": {
            "speedup": full_s / seconds,
            "seconds": seconds,
            "flop_share": median(bound.flop_share for bound in bounds),
            "bytes": float(median(bound.num_bytes for bound in bounds)),
            "copied_bytes_per_s": bounds[0].copied_bytes_per_s,
        },
    }


def throughput_bound(prefill_s: float, decode_s: float, flop_share: float) -> float:
    """(P + D) / (c P + D): the best ratio of requests a second where prefill costs only a share c of P."""
    return (prefill_s + decode_s) / (flop_share * prefill_s + decode_s)


def copy_rates(num_bytes: int = _COPIED_BYTES) -> dict[str, float | None]:
    """
    Bytes a second within host memory, and to and from a CUDA device with pinned and pageable host memory:
    medians of some copies of this size. Without a device all but `host_to_host` are None.
    """
    target, source = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    found: dict[str, float | None] = {"num_bytes": num_bytes}
    found["host_to_host"] = num_bytes / median(_copy_seconds(target, source))
    has_device = torch.cuda.is_available()
    for name in ("pinned", "pageable"):
        found |= dict.fromkeys((f"to_device_{name}", f"to_host_{name}"))
        if has_device:
            host, device = source.pin_memory() if name == "pinned" else source, source.cuda()
            found[f"to_device_{name}"] = num_bytes / median(_copy_seconds(device, host))
            found[f"to_host_{name}"] = num_bytes / median(_copy_seconds(host, device))
    if has_device:
        torch.cuda.empty_cache()  # a vLLM is started beside this process
    return found


def copied_bytes_per_s(num_threads: int, num_bytes: int = _COPIED_BYTES) -> float:
    """Bandwidth of memcpy between two buffers in host memory, the best of some copies."""
    target, source = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        return num_bytes / min(_copy_seconds(target, source))
    finally:
        torch.set_num_threads(before)


def _copy_seconds(target: torch.Tensor, source: torch.Tensor) -> list[float]:
    """Of each copy but the first, which touches the pages."""

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return timeit.repeat(copy, number=1, repeat=_COPIES + 1)[1:]
