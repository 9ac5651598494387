"""
Two requests' copies in place, all that lies between them computed by `PartialForward`: what comes of it on a
backend, and how far that is from dense attention over the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from delta_tree import Span, gaps
from kvshare.vllm_connector.worker.attention_hooks import Watch
from kvshare.vllm_connector.worker.kept_rows import KeptRows
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import PartialForward
from kvshare.vllm_connector.worker.runs import Run
from tests.kvshare.vllm_connector.without_gpu.attention_model import (
    POISON,
    VOCAB_SIZE,
    Dense,
    Setting,
)

Spans = Mapping[str, Sequence[Span]]
"""What is to be computed, by request."""

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, CommonAttentionMetadata]
"""Of a pass: token ids, positions, slots and what attention needs."""

Fault = Callable[[Setting], AbstractContextManager[None]]

PROBED_BLOCK = 1
LONG: Spans = {
    "first": (Span(3, 20), Span(24, 25), Span(45, 67)),
    "second": (Span(0, 17), Span(20, 27), Span(40, 41)),
}
SINGLE: Spans = {"first": (Span(3, 4), Span(37, 38), Span(69, 70)), "second": (Span(48, 49),)}
"""Of 1, 17 and more than a block's tokens, more runs than one pass takes; single tokens, as probes are."""

_NUM_TOKENS = {"first": 70, "second": 50}
_BLOCK_IDS = {"first": (21, 5, 30, 17, 2), "second": (9, 31, 3, 24)}


@dataclass(frozen=True)
class Outcome:
    """Errors in units of the typical value; 0 where bits are compared."""

    layout: str
    read_back: float  # rows that were written: by `read`, and the same by `rows` and `keys`
    attention: float  # what the runs' rows got from attention
    kv: float  # all slots of both requests afterwards
    elsewhere: float  # slots that nobody was to write


class Request:
    """Tokens, where they lie, and what is right for them."""

    def __init__(self, name: str, setting: Setting, spans: Sequence[Span]) -> None:
        random = torch.Generator().manual_seed(len(name))
        self.token_ids = tuple(torch.randint(0, VOCAB_SIZE, (_NUM_TOKENS[name],), generator=random).tolist())
        self.block_ids = _BLOCK_IDS[name]
        self.everything = Span(0, len(self.token_ids))
        self.dense: Dense = setting.dense(self.token_ids)
        self.runs = [Run(self.block_ids, span, self.token_ids) for span in spans]
        self.copies = gaps(spans, len(self.token_ids))

    def place_copies(self, cache: PagedCache) -> None:
        for span in self.copies:
            rows = slice(span.start, span.end)
            cache.write(self.dense.k[:, rows], self.dense.v[:, rows], cache.slots(self.block_ids, span))


@contextmanager
def nothing_wrong(_: Setting) -> Iterator[None]:
    yield


def try_out(setting: Setting, spans: Spans, fault: Fault = nothing_wrong) -> Outcome:
    """`fault`: made while the runs are computed."""
    cache = setting.cache
    problem = cache.find_layout(PROBED_BLOCK)
    assert problem is None, problem
    requests = [Request(name, setting, runs) for name, runs in spans.items()]
    for request in requests:
        request.place_copies(cache)
    read_back = max(_not_read_back(cache, request) for request in requests)
    attention = _compute(setting, requests, fault)
    return Outcome(
        cache.layout,
        read_back,
        attention,
        max(_wrong_slots(cache, request) for request in requests),
        _written_elsewhere(setting, requests),
    )


def _not_read_back(cache: PagedCache, request: Request) -> float:
    """How far the copies are from what was written. 0: bit by bit, in all ways of reading."""
    table = cache.table(request.block_ids, len(request.everything))
    wrong = 0.0
    for span in request.copies:
        positions = range(span.start, span.end)
        read = cache.read(request.block_ids, span)
        kept = KeptRows(cache, request.block_ids, positions)
        kept.keep_all()
        for plane, want in enumerate((request.dense.k, request.dense.v)):
            for found in (read.planes[plane], kept.rows[plane]):
                wrong = max(wrong, _largest(found - want[:, span.start : span.end]))
        for layer, want in enumerate(request.dense.k):
            keys = cache.keys(layer, table, span.end)[span.start :]
            wrong = max(wrong, _largest(keys - want[span.start : span.end]))
    return wrong


def _compute(setting: Setting, requests: Sequence[Request], fault: Fault) -> float:
    """Compute all runs. Returns the error of what attention gave them."""
    wrong = [0.0]
    dense = {request.token_ids: request.dense for request in requests}

    def watching(runs: Sequence[Run]) -> Watch:
        def watch(layer: int, _: torch.Tensor, output: torch.Tensor) -> None:
            want = [dense[tuple(run.token_ids)].output[layer, run.span.start : run.span.end] for run in runs]
            wrong.append(_error(output, torch.cat(want)))

        return watch

    with fault(setting):
        setting.forward.compute([run for request in requests for run in request.runs], watching=watching)
    return max(wrong)


def _wrong_slots(cache: PagedCache, request: Request) -> float:
    found = cache.read(request.block_ids, request.everything)
    return max(_error(found.k, request.dense.k), _error(found.v, request.dense.v))


def _written_elsewhere(setting: Setting, requests: Sequence[Request]) -> float:
    """How far slots are from `POISON` that belong to nobody."""
    cache = setting.cache
    own = torch.zeros(cache.num_blocks * cache.block_size, dtype=torch.bool)
    own[cache.slots((PROBED_BLOCK,), Span(0, cache.block_size))] = True
    for request in requests:
        own[cache.slots(request.block_ids, request.everything)] = True
    others = (~own).view(-1, cache.kernel_block_size)
    return max(_largest(layer.kv_cache.transpose(1, 2)[others] - POISON) for layer in cache.layers.values())


def _largest(difference: torch.Tensor) -> float:
    return float(difference.float().abs().max())


def _error(found: torch.Tensor, want: torch.Tensor) -> float:
    """Of the worst row of a head: root mean square. NaN, what was not computed at all, counts as far off."""
    difference = (found.float() - want.float()).nan_to_num(1e9)
    return float(difference.square().mean(dim=-1).sqrt().max() / want.float().std())


def fault_in_metadata(
    change: Callable[[CommonAttentionMetadata], CommonAttentionMetadata],
) -> Fault:
    """What `PartialForward` hands to vLLM's builder is not what it made."""

    @contextmanager
    def faulty(_: Setting) -> Iterator[None]:
        inputs = PartialForward._inputs

        def changed(forward: PartialForward, runs: Sequence[Run]) -> Inputs:
            *others, metadata = inputs(forward, runs)
            return *others, change(metadata)

        with patch.object(PartialForward, "_inputs", changed):
            yield

    return faulty


def fault_in_slots(change: Callable[[torch.Tensor], torch.Tensor]) -> Fault:
    @contextmanager
    def faulty(_: Setting) -> Iterator[None]:
        inputs = PartialForward._inputs

        def changed(forward: PartialForward, runs: Sequence[Run]) -> Inputs:
            token_ids, positions, slots, metadata = inputs(forward, runs)
            slots = change(slots)
            return token_ids, positions, slots, replace(metadata, slot_mapping=slots)

        with patch.object(PartialForward, "_inputs", changed):
            yield

    return faulty


def _exchanged(table: torch.Tensor) -> torch.Tensor:
    """Its second and third block are taken for each other."""
    return table[:, [0, 2, 1, *range(3, table.shape[1])]]


FAULTS = {
    "nothing": nothing_wrong,
    "blocks exchanged": fault_in_metadata(
        lambda made: replace(made, block_table_tensor=_exchanged(made.block_table_tensor))
    ),
    "one slot too many": fault_in_metadata(
        lambda made: replace(made, seq_lens=made.seq_lens + 1, max_seq_len=made.max_seq_len + 1)
    ),
    "slot off by one": fault_in_slots(lambda slots: slots + 1),
}
"""What a machine would compute without complaint."""
