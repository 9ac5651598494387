"""
Edit scripts: how one prompt's tokens become another's, step by step.

Values that check themselves. How a good script is found is align.py's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from delta_tree.errors import EditRangeError
from delta_tree.spans import Span, TokenIds, token_ids


class Op(Enum):
    """What an edit does to a stretch of the source."""

    KEEP = "keep"
    INSERT = "insert"
    REPLACE = "replace"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Edit:
    """One step of a script: the source span it consumes, the target span it produces."""

    op: Op
    source: Span
    target: Span
    tokens: tuple[int, ...] = ()  # the target's tokens, for insert and replace only

    def __post_init__(self) -> None:
        num_new = len(self.target) if self.op in (Op.INSERT, Op.REPLACE) else 0
        shapes = {
            Op.KEEP: len(self.source) == len(self.target) > 0,
            Op.INSERT: not self.source and bool(self.target),
            Op.REPLACE: bool(self.source) and bool(self.target),
            Op.DELETE: bool(self.source) and not self.target,
        }
        if not shapes[self.op] or len(self.tokens) != num_new:
            raise EditRangeError(
                f"a {self.op.value} cannot turn {len(self.source)} source tokens into "
                f"{len(self.target)} with {len(self.tokens)} new ones"
            )


@dataclass(frozen=True, slots=True)
class Match:
    """An equal stretch: `length` tokens at `source` in one prompt and at `target` in another."""

    source: int
    target: int
    length: int


@dataclass(frozen=True, slots=True, repr=False)
class EditScript:
    """
    Edits that consume a source of `source_length` tokens from left to right, without a hole.

    Raises:  EditRangeError if the edits do not cover the source and their target in order
    """

    source_length: int
    edits: tuple[Edit, ...]

    def __post_init__(self) -> None:
        at_source = at_target = 0
        for edit in self.edits:
            if (edit.source.start, edit.target.start) != (at_source, at_target):
                raise EditRangeError(
                    f"edit at source {edit.source.start}, target {edit.target.start}; "
                    f"expected {at_source} and {at_target}"
                )
            at_source, at_target = edit.source.end, edit.target.end
        if at_source != self.source_length:
            raise EditRangeError(f"edits cover {at_source} of {self.source_length} source tokens")

    @classmethod
    def from_keeps(cls, source_length: int, target: TokenIds, keeps: Sequence[Match]) -> "EditScript":
        """
        The script that keeps `keeps` and replaces, inserts or deletes whatever lies between.

        Raises:  EditRangeError if the keeps overlap, run backwards or reach past an end
        """
        edits: list[Edit] = []
        at_source = at_target = 0
        for keep in (*keeps, Match(source_length, len(target), 0)):
            removed, added = Span(at_source, keep.source), Span(at_target, keep.target)
            if removed or added:
                op = Op.INSERT if not removed else Op.REPLACE if added else Op.DELETE
                edits.append(Edit(op, removed, added, tuple(target[added.start : added.end].tolist())))
            at_source, at_target = keep.source + keep.length, keep.target + keep.length
            if keep.length:
                edits.append(Edit(Op.KEEP, Span(keep.source, at_source), Span(keep.target, at_target)))
        return cls(source_length, tuple(edits))

    @property
    def target_length(self) -> int:
        """Tokens the script produces."""
        return self.edits[-1].target.end if self.edits else 0

    @property
    def keeps(self) -> tuple[Match, ...]:
        """The kept stretches in order."""
        return tuple(
            Match(edit.source.start, edit.target.start, len(edit.source))
            for edit in self.edits
            if edit.op is Op.KEEP
        )

    @property
    def num_kept(self) -> int:
        """Tokens taken over from the source."""
        return sum(keep.length for keep in self.keeps)

    def apply(self, source: TokenIds) -> TokenIds:
        """
        The target's tokens.

        Raises:  EditRangeError if `source` has another length than the script was made for
        """
        if len(source) != self.source_length:
            raise EditRangeError(f"the script is for {self.source_length} source tokens, got {len(source)}")
        target = np.zeros(self.target_length, dtype=np.int32)
        for edit in self.edits:
            kept = source[edit.source.start : edit.source.end]
            target[edit.target.start : edit.target.end] = kept if edit.op is Op.KEEP else edit.tokens
        return token_ids(target)

    def __repr__(self) -> str:
        # Counts only: token ids stay out of logs.
        return (
            f"EditScript({self.source_length} -> {self.target_length} tokens, "
            f"{self.num_kept} kept, {len(self.edits)} edits)"
        )
