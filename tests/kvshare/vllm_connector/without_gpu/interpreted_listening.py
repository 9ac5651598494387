"""
What the fixture `own_listening` starts: our listening kernels in Triton's interpreter, against the operations
of torch that they replace. Each line of stdin is a `Case`, and for each there is one on stdout with the
largest error, as a share of what a slot was given.

A process of its own, with TRITON_INTERPRET=1: Triton looks at it once, when imported.
"""

from __future__ import annotations

import json
import sys
import traceback
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from delta_tree import Span
from kvshare.kv.listening import Listener, ListeningRows, placed
from kvshare.vllm_connector.worker import listening_kernels
from tests.kvshare.vllm_connector.without_gpu import interpreted_triton

CPU = torch.device("cpu")
LAYERS, LAYER = 2, 1


@dataclass(frozen=True)
class Case:
    """`memory`: the order of blocks, heads, tokens of a block and content in a layer's cache."""

    num_slots: int = 300
    num_rows: int = 7
    group: int = 4
    num_heads: int = 2
    dim: int = 64
    dtype: str = "bfloat16"
    memory: str = "BNHC"
    block_size: int = 16
    num_passes: int = 1
    common: float = 0.0  # of all keys, in one dimension
    programs: int = listening_kernels.PROGRAMS
    hooked: bool = False  # the connector calls the kernels
    fault: str = "nothing"

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found


class Passes:
    """Passes over the same rows: queries, paged keys, and listeners for both ways."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._random = torch.Generator().manual_seed(0)
        num_blocks = -(-case.num_slots // case.block_size)
        self.table = torch.randperm(num_blocks + 3, generator=self._random)[:num_blocks]
        self.cache = self._cache(num_blocks + 3)
        self.spans = self._spans()
        self._query_heads = case.group * case.num_heads

    def _cache(self, num_blocks: int) -> torch.Tensor:
        """(B, H, N, 2 D). What no row may see is no number."""
        case = self._case
        sizes = dict(zip("BHNC", (num_blocks, case.num_heads, case.block_size, 2 * case.dim), strict=True))
        cache = torch.full([sizes[letter] for letter in case.memory], torch.nan, dtype=case.torch_dtype)
        cache = cache.permute([case.memory.index(letter) for letter in "BHNC"])
        slots = torch.arange(case.num_slots)
        keys = self._normal(case.num_slots, case.num_heads, case.dim)
        keys[..., 1] += case.common
        block = self.table[slots // case.block_size]
        cache[block, :, slots % case.block_size, : case.dim] = keys.to(case.torch_dtype)
        return cache

    def _spans(self) -> tuple[Span, ...]:
        """The last slot, the first one, and others here and there."""
        case = self._case
        others = torch.randperm(case.num_slots - 2, generator=self._random)[: max(0, case.num_rows - 2)] + 1
        chosen = sorted({case.num_slots - 1, *others.tolist(), *([0] if case.num_rows > 1 else [])})
        return tuple(Span(place, place + 1) for place in chosen)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random)

    def next(self, listeners: list[Listener]) -> tuple[torch.Tensor, list[ListeningRows]]:
        """Queries (M, H_q, D) of a pass, whose rows do not lie in the order of positions; see `Listener`."""
        case = self._case
        runs = placed(self.spans[::-1])
        query = self._normal(len(runs), self._query_heads, case.dim).to(case.torch_dtype)
        rows = [listener.rows_of(runs) for listener in listeners]
        assert all(rows)
        return query, [found for found in rows if found is not None]

    def keys(self, end: int) -> torch.Tensor:
        """(H, S, D), copied out of the cache."""
        blocks = self.cache[self.table, ..., : self._case.dim]
        return blocks.transpose(0, 1).flatten(1, 2)[:, :end]


def error(case: Case) -> float:
    listening_kernels.PROGRAMS = case.programs
    passes = Passes(case)
    found, expected = (
        Listener(passes.spans, num_layers=LAYERS, num_slots=case.num_slots + 5, device=CPU) for _ in range(2)
    )
    for _ in range(case.num_passes):
        query, (of_kernels, of_torch) = passes.next([found, expected])
        keys = passes.keys(of_torch.end)
        of_torch.observe(LAYER, query.transpose(0, 1).float(), keys.float(), scaling=0.2)
        query, table, positions = query.clone(), passes.table.clone(), of_kernels.positions
        match case.fault:
            case "a slot further":
                positions += 1
            case "a slot less":
                positions -= 1
            case "heads exchanged":
                query = query.flip(1)
            case "blocks exchanged":
                table[:2] = table[:2].flip(0)
            case "another row":
                of_kernels.indices[0] -= 1
        if case.hooked:
            _watched(passes, query, found)
        else:
            listening_kernels.listen(of_kernels, LAYER, query, passes.cache, table, scaling=0.2)
    want, got = expected.attended, found.attended
    floor = want[LAYER, : case.num_slots].mean() * 1e-2
    return float(torch.nan_to_num((want - got).abs() / (want + floor), nan=torch.inf).max())


def _watched(passes: Passes, query: torch.Tensor, listener: Listener) -> None:
    """As a pass of the connector with a GPU has it."""
    from kvshare.vllm_connector.worker import partial_forward
    from kvshare.vllm_connector.worker.block_layout import find_layout
    from kvshare.vllm_connector.worker.paged_cache import PagedCache
    from kvshare.vllm_connector.worker.runs import Run

    impl = SimpleNamespace(scale=0.2, sliding_window=None)
    caches = [torch.zeros_like(passes.cache), passes.cache]
    layers = {str(layer): SimpleNamespace(kv_cache=cache, impl=impl) for layer, cache in enumerate(caches)}
    cache = PagedCache(layers, block_size=passes.cache.shape[2])
    block = caches[0][0]

    def write(k: torch.Tensor, v: torch.Tensor) -> None:
        block.copy_(torch.cat((k, v), dim=-1).transpose(0, 1))

    cache._layout = find_layout(block, write)
    partial_forward.listening_kernels = lambda *_: listening_kernels  # this process has no GPU
    forward = partial_forward.PartialForward.__new__(partial_forward.PartialForward)
    forward._cache = cache
    blocks = tuple(passes.table.tolist())
    runs = [Run(blocks, span, (), listener=listener) for span in passes.spans[::-1]]
    forward.listening(runs)(LAYER, query, query)


def main() -> None:
    interpreted_triton.prepare()
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"error_share": error(Case(**json.loads(line)))}
        except Exception:  # noqa: BLE001  the test that asked fails with it
            answer = {"error": traceback.format_exc()}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
