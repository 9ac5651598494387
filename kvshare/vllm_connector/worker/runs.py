"""What a pass computes: runs of positions."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from delta_tree import Span
from kvshare.kv.listening import Listener
from kvshare.vllm_connector.metadata import LoadRequest, Tokens


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a request's positions to compute, with its block table and token ids."""

    block_ids: tuple[int, ...]
    span: Span
    token_ids: Tokens  # the request's, from position 0 on
    shift: int = 0  # added to the positions that the model sees; slots stay as they are
    listener: Listener | None = None  # records what some of the rows attend to
    kept: tuple[int, ...] = ()  # positions whose KV the target keeps; only a drafting head writes there
    num_layers: int | None = None  # that are needed, from the first on; None: all


def runs_of(
    request: LoadRequest,
    spans: Sequence[Span],
    *,
    kept: Sequence[int] = (),
    listener: Listener | None = None,
    num_layers: int | None = None,
) -> list[Run]:
    """Return a run for each span of a load. `kept`: ascending positions; `num_layers`: see `Run`."""

    def run(span: Span) -> Run:
        kept_here = kept[bisect_left(kept, span.start) : bisect_left(kept, span.end)]
        return Run(
            request.block_ids,
            span,
            request.token_ids,
            listener=listener,
            kept=tuple(kept_here),
            num_layers=num_layers,
        )

    return [run(span) for span in spans]


def split(runs: Sequence[Run], max_tokens: int, max_runs: int = sys.maxsize) -> Iterator[list[Run]]:
    """
    Yield passes of at most `max_tokens` tokens and `max_runs` runs; long runs are cut.

    The runs of each request must be in order of position. Then everything to which a run attends is computed
    in the same pass or an earlier one.
    """
    batch: list[Run] = []
    room = max_tokens
    for run in runs:
        start = run.span.start
        while start < run.span.end:
            if not room or len(batch) == max_runs:
                yield batch
                batch, room = [], max_tokens
            part = Span(start, min(run.span.end, start + room))
            batch.append(replace(run, span=part))
            room -= len(part)
            start = part.end
    if batch:
        yield batch


def layers_needed(runs: Sequence[Run]) -> int | None:
    """Return the number of layers that a pass must compute; None: all."""
    found = [run.num_layers for run in runs]
    return None if None in found else max(number for number in found if number is not None)
