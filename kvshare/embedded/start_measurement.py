"""
Measures at start what prefills and loads cost here, before the first request: it takes a few seconds.

    full prefills    of three lengths, up to what the engine computes in one pass
    loads            from host memory, of one segment and of a long context
    passes           of few and of many tokens after that context: what attending to it costs

The cost model observes each of them, as it does those of requests. Tokens are random; nothing is stored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
import torch
import transformers

import kvshare
from delta_tree import Copy, NodeId, Segment, SegmentId, Span, token_ids
from kvshare import machine
from kvshare.embedded.model import EmbeddedModel
from kvshare.kv.sequence import SequenceKV
from kvshare.kv.tier import MemoryTier
from kvshare.safe_logging import classes_and_places
from kvshare.sharing.cost import LOAD, PREFILL, CostModel
from kvshare.sharing.kept_costs import Fingerprint
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import Estimate

log = logging.getLogger(__name__)

_LENGTHS = (16, 4, 1)  # divisors of the longest prefill
_LONG_S = 1.0  # after a prefill that took this long, no longer one is measured
_QUICK_S = 0.25  # a faster pass is measured again: the first one may have had cold caches
_CONTEXT_TOKENS, _CONTEXT_BYTES = 8192, 256 * 2**20
_SHORT_PASS = 16  # tokens
_SEGMENT, _DONOR = SegmentId(1), NodeId(1)  # in a tier that only the measurement uses


def fingerprint_of(model: EmbeddedModel) -> Fingerprint:
    """Return the conditions on which the costs of this model in this process depend."""
    device = model.layout.device
    where = f"{machine.processor()}, {machine.num_cores()} cores, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        where = f"{torch.cuda.get_device_name(device)}, {where}"
    dtype = str(model.layout.dtype).removeprefix("torch.")
    num_parameters = sum(parameter.numel() for parameter in model.network.parameters())
    return Fingerprint(
        machine=where,
        model=f"{model.name}, {num_parameters} parameters, {dtype}, {model.layout}, {model.fingerprint}",
        versions=f"kvshare {kvshare.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
    )


def measure(
    model: EmbeddedModel, cost: CostModel, *, chunk_tokens: int, is_stopping: Callable[[], bool]
) -> None:
    """Measure the costs, unless they are known. A failure is logged; then they are learned from requests."""
    if not cost.is_learning or {PREFILL, LOAD} <= cost.measured:
        return
    began = time.perf_counter()
    try:
        kv, last_s = _measure_prefills(model, cost, min(chunk_tokens, model.max_model_len), is_stopping)
        if not is_stopping():
            _measure_reuse(model, cost, kv, is_quick=last_s < _LONG_S)
    except (RuntimeError, ValueError) as exc:  # as where memory runs out
        log.warning("costs could not be measured, they are learned: %s", classes_and_places(exc))
        return
    rates = cost.rates
    log.info(
        "measured in %.1f s: a prefill of 1,024 tokens takes %.0f ms, loading them %.1f ms, on %s",
        *(time.perf_counter() - began, 1e3 * rates.full_s(1024), 1e3 * rates.load_s(1024), cost.machine),
    )


def _measure_prefills(
    model: EmbeddedModel, cost: CostModel, longest: int, is_stopping: Callable[[], bool]
) -> tuple[SequenceKV, float]:
    """Measure prefills of growing lengths. Returns the KV of the last one, and its seconds."""
    seconds = 0.0
    for num_tokens in sorted({max(1, longest // divisor) for divisor in _LENGTHS}):
        kv = model.new_sequence(num_tokens)
        seconds = min(_seconds(model, num_tokens, NoPlan(), kv))
        cost.observe_prefill(num_tokens, seconds)
        if seconds > _LONG_S or is_stopping():
            break
    return kv, seconds


def _measure_reuse(model: EmbeddedModel, cost: CostModel, kv: SequenceKV, *, is_quick: bool) -> None:
    """Load the computed KV, once and as often as a long context has room; then continue that context."""
    tier, segment = MemoryTier(0), kv.cut(Span(0, kv.capacity))
    described = Segment(_SEGMENT, "", 0, kv.capacity, 0, segment.num_bytes, segment.checksum())
    tier.put(described, segment)
    segments = tier.fetch([_SEGMENT]).segments
    context = min(model.max_model_len, _CONTEXT_TOKENS, _CONTEXT_BYTES // model.layout.bytes_per_token)
    long = model.new_sequence(max(context, kv.capacity))
    for end in sorted({kv.capacity, long.capacity}):
        began = time.perf_counter()
        num_bytes = long.write_copies(_copies(kv.capacity, end), segments)
        _wait_for(model)
        cost.observe_load(num_bytes, time.perf_counter() - began)
    for num_tokens in (_SHORT_PASS, kv.capacity) if is_quick else (_SHORT_PASS,):
        if num_tokens < long.capacity:
            plan = _continuation(long.capacity, num_tokens, kv.capacity)
            cost.observe(plan.work(), min(_seconds(model, long.capacity, plan, long)))


def _seconds(model: EmbeddedModel, num_tokens: int, plan: Plan | NoPlan, kv: SequenceKV) -> list[float]:
    """Time one pass that computes what the plan leaves, or two if that is quick: caches may be cold."""
    tokens = token_ids(np.random.default_rng(0).integers(model.vocab_size, size=num_tokens))
    times: list[float] = []
    while len(times) < 2 and sum(times) < _QUICK_S:
        began = time.perf_counter()
        model.prefill(tokens, plan, kv).advance(max_queries=num_tokens)
        _wait_for(model)
        times.append(time.perf_counter() - began)
    return times


def _wait_for(model: EmbeddedModel) -> None:
    """Wait until the device has finished: calls of a GPU return before."""
    if model.layout.device.type == "cuda":
        torch.cuda.synchronize(model.layout.device)


def _copies(length: int, end: int) -> tuple[Copy, ...]:
    """Return copies of one segment that fill [0, end), as if it had been computed there: without shifts."""
    return tuple(
        Copy(_DONOR, _SEGMENT, 0, min(length, end - start), start, source_position=start, donor_start=0)
        for start in range(0, end, length)
    )


def _continuation(num_tokens: int, num_computed: int, length: int) -> Plan:
    """Return the plan of a prompt whose prefix is stored, in segments of `length` tokens."""
    end = num_tokens - num_computed
    return Plan(
        num_tokens,
        exact_length=end,
        copies=_copies(length, end),
        placeholders=(Span(end, num_tokens),),
        repairs=(),
        generation=0,
        estimate=Estimate(0.0, 0.0),
    )
