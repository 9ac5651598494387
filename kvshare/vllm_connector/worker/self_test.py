"""
The self-test: checks on the running model before the first request. Without it nothing is shared.

    layout     rows that vLLM writes into scattered blocks are read back bit by bit
    scales     numbers of 8 bits times the layer's scale are those that the model computes
    partial    partial attention over scattered runs gives the KV of one full pass
    graphs     so do passes by vLLM's CUDA graphs
    listening  attention weights computed from queries and stored keys give the kernel's output, and add up
    movement   how rows move to other positions is determined layer by layer; see `movement_test.py`

Layers without positions, a mask that is not causal, or a kernel that reads its cache in another way fail one
of these checks. Negative controls must deviate, or the test is inconclusive: rows of another token, block or
head, and a run that attended to wrong rows.

Alphabet: L layers, T tokens, H kv heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from delta_tree import Span
from kvshare.kv.listening import Listener, attention
from kvshare.kv.sequence import SegmentKV
from kvshare.sharing.plan import MAX_LISTENERS
from kvshare.sharing.repair_choice import num_listening_layers
from kvshare.vllm_connector.worker.attention_hooks import Watch
from kvshare.vllm_connector.worker.cache_dtype import (
    as_stored,
    has_same_bits,
    random_rows,
    scale_of,
    steps_apart,
)
from kvshare.vllm_connector.worker.checks import tried
from kvshare.vllm_connector.worker.computed_rows import ComputedRows
from kvshare.vllm_connector.worker.deviation import CLEARLY, ROUNDING, Expected
from kvshare.vllm_connector.worker.movement_test import (
    FEW_TOKENS,
    FIRST_BLOCK,
    FIRST_PLACE,
    SHIFTS,
    Found,
    MovementTest,
)
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import PartialForward
from kvshare.vllm_connector.worker.runs import Run

_NUM_TOKENS = 620  # so that a run is longer than 512
_NUM_BLOCKS = 4  # the prompt is longer than so many blocks, if there is room
_BEYOND_WINDOW = 64  # tokens by which the prompt is longer than the shortest window
_LONGEST = 4096
_TOLERANCE = {
    torch.float32: 2e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 8e-2,
    torch.float8_e4m3fn: 0.15,
    torch.float8_e5m2: 0.25,
}
_OFF = 0.01  # share of 8-bit numbers that may be more than a step off, as they are rounded elsewhere


class SelfTest:
    """The checks of one worker. It overwrites blocks, so it must run before the first request."""

    def __init__(
        self, cache: PagedCache, forward: PartialForward, *, vocab_size: int, max_model_len: int
    ) -> None:
        self._cache = cache
        self._forward = forward
        num_blocks = cache.num_blocks - FIRST_BLOCK
        layers = range(cache.kv_layout.num_layers)
        windows = (forward.form(layer).reach.size for layer in layers)
        beyond = min((w + _BEYOND_WINDOW for w in windows if w is not None), default=0)
        wanted = max(_NUM_TOKENS, _NUM_BLOCKS * cache.block_size + 1, min(beyond, _LONGEST))
        room = min(max_model_len - max(SHIFTS) - FIRST_PLACE - 1, num_blocks * cache.block_size)
        self._length = max(FEW_TOKENS, min(wanted, room))
        self.block_ids = _scattered(num_blocks, -(-self._length // cache.block_size))
        generator = torch.Generator().manual_seed(7)
        self.tokens = tuple(torch.randint(0, vocab_size, (self._length,), generator=generator).tolist())
        self._movement_test = MovementTest(
            cache,
            forward,
            tokens=self.tokens[:FEW_TOKENS],
            block_ids=self.block_ids,
            tolerance=_TOLERANCE[torch.bfloat16] if cache.is_quantised else self.tolerance,
        )

    @property
    def _runs(self) -> tuple[Span, ...]:
        """Return runs of 7, 1, 17 and many tokens, and the rest."""
        last = max(25, self._length - 40)
        return tuple(filter(None, map(Span, (0, 7, 8, 25, last), (7, 8, 25, last, self._length))))

    def check_layout(self) -> str | None:
        """Return why blocks cannot be read, or None."""
        if problem := self._cache.find_layout(FIRST_BLOCK):
            return problem
        layout, generator = self._cache.kv_layout, torch.Generator().manual_seed(11)
        shapes = (plane.shape(self._length) for plane in layout.planes)
        written = [random_rows(shape, generator, layout.dtype) for shape in shapes]
        slots = self._cache.slots(self.block_ids, Span(0, self._length))
        writes = [self._cache.write_layer]
        if self._cache.is_quantised:  # otherwise the kernel writes layers, too
            writes.append(self._cache.write_by_kernel)
        for write in writes:
            self._write([rows.flip(dims=(1,)) for rows in written], self._length)
            there = [rows.to(layout.device) for rows in written]
            for layer in range(layout.num_layers):
                write(layer, *layout.of_layer(there, layer), slots)
            read_back = self._cache.read(self.block_ids, Span(0, self._length))
            if not all(map(has_same_bits, read_back.planes, written)):
                return "rows written into scattered blocks are not read back"
        return None

    def check_scales(self) -> str | None:
        """Return why stored numbers of 8 bits are not those that the model computes, or None."""
        if not self._cache.is_quantised:
            return None
        computed = self._computed([Run(self.block_ids, Span(0, self._length), self.tokens)])
        stored = self._cache.read(self.block_ids, Span(0, self._length))
        for layer, module in enumerate(self._cache.layers.values()):
            both = (self._cache.kv_layout.of_layer(rows.planes, layer) for rows in (stored, computed))
            for name, rows, numbers in zip("kv", *both, strict=True):
                expected = as_stored(numbers, scale_of(module, name), rows.dtype)
                if float((steps_apart(expected, rows) > 1).float().mean()) > _OFF:
                    return f"{name} of layer {layer} is not stored by the layer's scale"
        return None

    def check_partial_attention(self) -> str | None:
        """Return why partial attention is not exact here, or None."""
        whole, runs = self._compute([Span(0, self._length)]), self._runs
        expected, tolerance, errors = self._expected(whole), self.tolerance, list[float]()
        # All runs in one pass, then one run per pass: in the second case wrong blocks would hold other rows.
        for passes in ([runs], [[run] for run in runs]):
            self._poison(whole)
            errors.append(expected.deviation(self._compute(*passes)))
        if not all(error <= tolerance for error in errors):  # NaN is no error that is small
            return "partial attention does not give the KV of a full prefill"
        clearly = CLEARLY * max(*errors, ROUNDING * tolerance)
        if any(expected.deviation(wrong) < clearly for wrong in self._mistaken(whole)):
            return "rows of this model are too similar to detect errors: the self-test is inconclusive"
        if self._cache.kv_layout.num_layers > 1:  # KV of the first layer does not depend on attention
            start = runs[-1].start
            self._write([rows.flip(dims=(1,)) for rows in whole.planes], start)
            blind = self._compute(runs[-1:])
            if not self._expected(_behind(whole, start)).deviation(_behind(blind, start)) >= clearly:
                return "a run does not depend on the rows before it: the self-test is inconclusive"
        return None

    def check_graphs(self) -> str | None:
        """Return why passes by CUDA graphs do not give the KV of passes without them, or None."""
        whole, (*first, long, _) = self._compute([Span(0, self._length)]), self._runs
        middle = (long.start + self._length) // 2
        parts = Span(long.start, middle), Span(middle, middle + 1), Span(middle + 1, self._length)
        self._poison(whole)  # a graph that reads ids from elsewhere does not give the expected rows
        self._forward.uses_graphs = True
        computed = self._compute([*first, parts[0]], parts[1:2], parts[2:])
        is_exact = self._expected(whole).deviation(computed) <= self.tolerance
        return None if is_exact else "they do not give the KV of passes without them"

    def check_stopping(self) -> str | None:
        """Return why a pass cannot end after some of the layers, or None."""
        num_layers, seen = num_listening_layers(self._cache.kv_layout.num_layers), list[int]()
        whole, spans = self._compute([Span(0, self._length)]), self._runs[:3]  # few tokens, as for a graph
        self._forward.may_stop = True
        runs = [Run(self.block_ids, span, self.tokens, num_layers=num_layers) for span in spans]
        self._forward.compute(runs, watching=lambda _: lambda layer, *_: seen.append(layer))
        if set(seen) != set(range(num_layers)):
            return "it goes on"
        is_exact = self._expected(whole).deviation(self._compute(self._runs)) <= self.tolerance
        return None if is_exact else "the next pass does not give the KV of a full prefill"

    def _poison(self, like: SegmentKV) -> None:
        """Overwrite all rows of the prompt by numbers that no model computes."""
        poison = {"k": 3.0, "v": -3.0}
        planes = zip(self._cache.kv_layout.planes, like.planes, strict=True)
        self._write([torch.full_like(rows, poison[plane.name]) for plane, rows in planes], self._length)

    def _mistaken(self, whole: SegmentKV) -> Iterator[SegmentKV]:
        """Yield negative controls: the rows with a small error."""
        yield SegmentKV(tuple(rows.roll(1, dims=1) for rows in whole.planes))  # slots off by one
        if self._length > self._cache.block_size:  # blocks swapped
            yield SegmentKV(tuple(rows.roll(self._cache.block_size, dims=1) for rows in whole.planes))
        if any(rows.shape[2] > 1 for rows in whole.planes):
            yield SegmentKV(tuple(rows.roll(1, dims=2) for rows in whole.planes))

    def _write(self, planes: Sequence[torch.Tensor], num_tokens: int) -> None:
        """Write the rows of the first tokens."""
        layout = self._cache.kv_layout
        there = [rows[:, :num_tokens].contiguous().to(layout.device) for rows in planes]
        slots = self._cache.slots(self.block_ids, Span(0, num_tokens))
        for layer in range(layout.num_layers):
            self._cache.write_layer(layer, *layout.of_layer(there, layer), slots)

    @property
    def tolerance(self) -> float:
        return _TOLERANCE.get(self._cache.kv_layout.dtype, 0.0)

    def _expected(self, rows: SegmentKV) -> Expected:
        device = self._cache.kv_layout.device
        return Expected(rows, tolerance=self.tolerance, device=device)

    def check_listening(self) -> str | None:
        """Return why attention weights cannot be computed from stored keys, or None."""
        problem = tried(self._check_listening, "watching attention")
        if problem is not None and self._forward.simplify():
            problem = tried(self._check_listening, "watching attention")
        return problem

    def _check_listening(self) -> str | None:
        length, num_layers = min(self._length, self._forward.max_tokens), self._cache.kv_layout.num_layers
        if self._cache.is_quantised and self._cache.kv_layout.device.type != "cpu":
            return "keys of 8 bits are not read on a GPU"
        layout, whole, agree = self._cache.kv_layout, self._compute([Span(0, length)]), list[bool]()
        expected = torch.zeros(num_layers, length, device=self._cache.kv_layout.device)
        last = Span(length - min(length, MAX_LISTENERS), length)
        listener = Listener([last], num_layers=num_layers, num_slots=length, device=expected.device)
        table = self._cache.table(self.block_ids, length)

        def watch(index: int, query: torch.Tensor, output: torch.Tensor) -> None:
            keys = self._cache.keys(index, table, length)
            _, stored = layout.of_layer(whole.planes, index)
            values = self._cache.values_of(index, stored.to(keys.device))  # (S, H, D)
            outputs = []
            for head, weights in enumerate(self._weights(index, query, keys)):  # all at once may be GiBs
                outputs.append(weights @ values[:, head])
                expected[index] += weights[:, last.start :].sum(dim=(0, 1))
            agree.append(self._are_near(torch.cat(outputs).transpose(0, 1), output))

        def watching(runs: Sequence[Run]) -> Watch:
            listening = self._forward.listening(runs)

            def both(index: int, query: torch.Tensor, output: torch.Tensor) -> None:
                listening(index, query, output)
                watch(index, query, output)

            return both

        whole_prompt = Run(self.block_ids, Span(0, length), self.tokens, listener=listener)
        self._forward.compute([whole_prompt], watching=watching)
        if len(agree) != num_layers:
            return "the attention kernels cannot be watched"
        if not all(agree):
            return "attention does not follow from queries and stored keys"
        heard, right = (each / each.sum(dim=1, keepdim=True) for each in (listener.attended, expected))
        is_right = all(map(self._are_near, right, heard))
        return None if is_right else "what rows attend to is added up wrongly"

    def _weights(self, layer: int, query: torch.Tensor, keys: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the weights (G, S, S) of each key head. Shapes:  query (S, H_q, D); keys (S, H, D)"""
        positions = torch.arange(len(query), device=keys.device)
        scaling, form = self._forward.scaling(layer), self._forward.form(layer)
        for head, group in enumerate(query.transpose(0, 1).chunk(keys.shape[1])):
            yield attention(positions, group, keys[:, head], scaling=scaling, form=form, group=head)

    def _are_near(self, expected: torch.Tensor, got: torch.Tensor) -> bool:
        difference, scale = (expected - got.float()).abs().max(), expected.abs().max().clamp(min=1e-6)
        return bool(difference <= _TOLERANCE.get(self._cache.computed_dtype, 0.0) * scale)

    def movements(self, tables: Sequence[torch.Tensor]) -> Found:
        """Find which of these tables, if any, rotates each layer's K and V to other positions."""
        return self._movement_test.movements(tables)

    def movements_despite_rounding(self, tables: Sequence[torch.Tensor], so_far: Found) -> Found:
        """Complete what `movements` has found; see `MovementTest`."""
        return self._movement_test.movements_despite_rounding(tables, so_far)

    def _compute(self, *passes: Sequence[Span]) -> SegmentKV:
        """Compute the spans of each pass, and return all rows up to the last one's end."""
        for spans in passes:
            self._forward.compute([Run(self.block_ids, span, self.tokens) for span in spans])
        return self._cache.read(self.block_ids, Span(0, passes[-1][-1].end))

    def _computed(self, runs: Sequence[Run]) -> SegmentKV:
        """Compute the runs, and return their rows before they are quantised."""
        rows = ComputedRows(self._cache)
        with rows.recorded():
            self._forward.compute(runs)
        return rows.read()


def _scattered(num_blocks: int, count: int) -> tuple[int, ...]:
    """Return the ids of free blocks, far apart and in random order."""
    apart = np.linspace(FIRST_BLOCK, FIRST_BLOCK + num_blocks - 1, count).astype(int)
    return tuple(np.random.default_rng(3).permutation(apart).tolist())


def _behind(rows: SegmentKV, start: int) -> SegmentKV:
    return SegmentKV(tuple(plane[:, start:] for plane in rows.planes))
