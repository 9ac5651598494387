"""What our kernels do with a batch of copies, and what plain indexing does with the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.kv.layout import KVLayout
from kvshare.kv.movement import STAYS, Movement
from kvshare.vllm_connector.worker.kernel_tables import StagedCopy, StagedPart

CPU = torch.device("cpu")
FAR = 100_003  # a shift whose angle has no digits left in float32


@dataclass(frozen=True)
class Case:
    """`memory`: the order of layers, blocks, heads, tokens of a block and content in vLLM's cache."""

    memory: str = "LBNHC"
    dtype: str = "bfloat16"
    dim: int = 64
    block_size: int = 16
    num_heads: int = 2
    num_layers: int = 2
    movement: str = "half"
    batch: str = "cut at pieces"

    @property
    def num_pieces(self) -> int:
        return self.num_heads * self.num_layers

    @property
    def torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def layout(self) -> KVLayout:
        layout = KVLayout.uniform(
            self.num_layers, self.num_heads, self.dim, dtype=self.torch_dtype, device=CPU
        )
        return layout.moving([_movements(self.movement, layer, self.dim) for layer in range(self.num_layers)])


def _movements(name: str, layer: int, dim: int) -> tuple[Movement, Movement]:
    def turning(num_pairs: int, base: float = 1e4) -> tuple[float, ...]:
        return tuple(base ** (-pair / num_pairs) for pair in range(num_pairs))

    half = Movement(turning(dim // 2))
    return {
        "half": (half, STAYS),
        "interleaved": (Movement(turning(dim // 2), "interleaved"), STAYS),
        "first dimensions": (Movement(turning(dim // 8)), STAYS),
        "last dimensions": (Movement(turning(dim // 8), "interleaved", dim - dim // 4), STAYS),
        "values, too": (half, Movement(turning(dim // 4, 500.0))),
        "by layer": [(half, STAYS), (STAYS, STAYS), (Movement(turning(dim // 4, 1e6), first=dim // 4), half)][
            layer % 3
        ],
        "nothing": (STAYS, STAYS),
    }[name]  # fmt: skip


class Batch:
    """Segments of random rows, where their parts lie in staging, and copies of them to random slots."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._random = np.random.default_rng(7)
        self.parts: list[StagedPart] = []
        self.segments: list[torch.Tensor] = []  # (H, L, 2, T, D) each
        self.copies: list[StagedCopy] = []
        BATCHES[case.batch](self)
        num_tokens = sum(len(copy.source) for copy in self.copies)
        self.num_blocks = -(-(2 * num_tokens + 40) // case.block_size)
        self._slots = self._random.permutation(self.num_blocks * case.block_size)
        each = self._by_copy(self._slots[:num_tokens])
        self.copies = [replace(copy, slots=own) for copy, own in zip(self.copies, each, strict=True)]

    def other_slots(self) -> list[NDArray[np.int64]]:
        """As many as those of the copies, by copy: none of them is among those."""
        return self._by_copy(self._slots[::-1])

    def _by_copy(self, slots: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        ends = np.cumsum([len(copy.source) for copy in self.copies])
        return np.split(slots[: ends[-1]], ends[:-1])

    def add(self, num_tokens: int, pieces: range, *, of_bits: bool = False, of_head: int = 0) -> StagedPart:
        """`of_bits`: rows that are no numbers."""
        case = self.case
        shape = (case.num_heads, case.num_layers, 2, num_tokens, case.dim)
        rows = self._bits(shape) if of_bits else self.numbers(shape)
        part = StagedPart(self.num_bytes, num_tokens, pieces.start, len(pieces), of_head)
        self.parts.append(part)
        self.segments.append(rows)
        return part

    def numbers(self, shape: Sequence[int]) -> torch.Tensor:
        """Random rows that can be rotated."""
        rows = torch.from_numpy(self._random.standard_normal(shape)).to(self.case.torch_dtype)
        if self.case.movement == "first dimensions":
            rows[..., -1] = (
                torch.finfo(rows.dtype).max if rows.itemsize == 1 else torch.inf
            )  # stays what it is: it is not rotated by an angle of 0
        return rows

    def copy(self, part: StagedPart, source: Span, shift: int = 0) -> None:
        self.copies.append(StagedCopy(part, source, np.zeros(0, np.int64), shift))

    @property
    def num_bytes(self) -> int:
        """Of staging, up to where the next part begins: not next to the last one."""
        row_bytes = self.case.dim * self.case.torch_dtype.itemsize
        ends = (part.offset + part.num_pieces * 2 * part.num_tokens * row_bytes for part in self.parts)
        return max((-(-end // 16) * 16 + 32 for end in ends), default=48)

    def room(self) -> torch.Tensor:
        """Staging, with something in it."""
        return torch.from_numpy(self._random.integers(0, 256, self.num_bytes, np.uint8))

    def caches(self) -> list[torch.Tensor]:
        """L of (B, H, N, 2 D), with something in them."""
        case = self.case
        sizes = (case.num_layers, self.num_blocks, case.num_heads, case.block_size, 2 * case.dim)
        of_letter = dict(zip("LBHNC", sizes, strict=True))
        cache = self._bits([of_letter[letter] for letter in case.memory])
        return list(cache.permute([case.memory.index(letter) for letter in "LBHNC"]).unbind())

    def _bits(self, shape: Sequence[int]) -> torch.Tensor:
        """All bit patterns, not a number among them."""
        dtype = self.case.torch_dtype
        found = self._random.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, np.uint8)
        return torch.from_numpy(found).view(dtype).view(*shape)


def _cut_at_pieces(batch: Batch) -> None:
    """A batch begins and ends inside a segment; copies overlap, move either way, far, or not at all."""
    count = batch.case.num_pieces
    tail = batch.add(5, range(1, count), of_bits=True)
    whole, head = batch.add(23, range(count)), batch.add(40, range(count - 1))
    batch.copy(tail, Span(0, 5))
    batch.copy(whole, Span(2, 23), 3)
    batch.copy(whole, Span(0, 23), -17)
    batch.copy(head, Span(7, 40), FAR)
    batch.copy(head, Span(39, 40))
    batch.copy(head, Span(0, 7), -FAR)


def _cut_at_layers(batch: Batch) -> None:
    """Of one segment the last layer of each head, of another all: blocks of tokens have parts of both."""
    case = batch.case
    for head in range(case.num_heads):
        last = (head + 1) * case.num_layers
        batch.copy(batch.add(41, range(last - 1, last)), Span(3, 41), 5)
    batch.copy(batch.add(9, range(case.num_pieces)), Span(0, 9), -5)


def _some_layers(batch: Batch) -> None:
    """The last layers of every head, next to a whole segment: heads follow each other in staging."""
    case = batch.case
    num_layers = case.num_layers - 1
    for num_tokens in (41, 7):
        pieces = range(1, 1 + case.num_heads * num_layers)
        batch.copy(batch.add(num_tokens, pieces, of_head=num_layers), Span(2, num_tokens), 5)
    batch.copy(batch.add(9, range(case.num_pieces)), Span(0, 9), -5)


def _without_movement(batch: Batch) -> None:
    tail = batch.add(5, range(1, batch.case.num_pieces), of_bits=True)
    whole = batch.add(23, range(batch.case.num_pieces), of_bits=True)
    for part in (tail, whole):
        batch.copy(part, Span(1, part.num_tokens))


def _scattered(batch: Batch) -> None:
    """1,000 copies of 300 segments: more than a program looks through at once."""
    parts = [batch.add(3 + number % 2, range(1, 2)) for number in range(300)]
    for number in range(1000):
        part = parts[number % len(parts)]
        batch.copy(part, Span(number % 3, part.num_tokens), number % 7 - 3)


def _long(batch: Batch) -> None:
    """A piece that several programs add up, next to one of a single token."""
    for num_tokens in (700, 1):
        part = batch.add(num_tokens, range(2, 4))
        batch.copy(part, Span(num_tokens // 2, num_tokens), 1)


BATCHES = {
    "cut at pieces": _cut_at_pieces,
    "cut at layers": _cut_at_layers,
    "some layers": _some_layers,
    "without movement": _without_movement,
    "scattered": _scattered,
    "long": _long,
}
