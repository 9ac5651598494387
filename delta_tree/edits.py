"""
Edit scripts: the steps that turn one prompt's tokens into another's.

These are values that check themselves; align.py finds good scripts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np

from delta_tree.errors import EditRangeError
from delta_tree.spans import Span, TokenIds, token_ids


class Op(Enum):
    """The effect of an edit on a stretch of the source."""

    KEEP = "keep"
    INSERT = "insert"
    REPLACE = "replace"
    DELETE = "delete"


def _replacing(source: Span, target: Span) -> Op:
    """Return the edit that replaces the tokens at `source` by new ones at `target`; one span may be empty."""
    if not source:
        return Op.INSERT
    return Op.REPLACE if target else Op.DELETE


@dataclass(frozen=True, slots=True)
class Edit:
    """One step of a script: the source span it consumes, the target span it produces."""

    op: Op
    source: Span
    target: Span
    tokens: tuple[int, ...] = ()  # the target's tokens, for insert and replace only

    def __post_init__(self) -> None:
        if self.op is Op.KEEP:
            fits = len(self.source) == len(self.target) > 0 and not self.tokens
        else:
            is_op = self.op is _replacing(self.source, self.target)
            fits = is_op and bool(self.source or self.target) and len(self.tokens) == len(self.target)
        if not fits:
            raise EditRangeError(
                f"a {self.op.value} cannot turn {len(self.source)} source tokens into "
                f"{len(self.target)} with {len(self.tokens)} new ones"
            )


class Match(NamedTuple):
    """
    An equal stretch: `length` tokens at `source` in one prompt and at `target` in another.

    A tuple, as `Copy` is.
    """

    source: int
    target: int
    length: int

    @property
    def source_end(self) -> int:
        return self.source + self.length

    @property
    def target_end(self) -> int:
        return self.target + self.length

    def shifted(self, source: int, target: int) -> "Match":
        """Return the match after so many tokens were put before the source and before the target."""
        return Match(self.source + source, self.target + target, self.length)


@dataclass(frozen=True, slots=True, repr=False)
class EditScript:
    """
    Edits that consume a source of `source_length` tokens from left to right, without a gap.

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
        Return the script that keeps `keeps` and replaces, inserts or deletes the tokens between them.

        Raises:  EditRangeError if the keeps overlap, run backwards or reach past an end
        """
        edits: list[Edit] = []
        at_source = at_target = 0
        for keep in (*keeps, Match(source_length, len(target), 0)):
            removed, added = Span(at_source, keep.source), Span(at_target, keep.target)
            if removed or added:
                new_tokens = tuple(target[added.start : added.end].tolist())
                edits.append(Edit(_replacing(removed, added), removed, added, new_tokens))
            at_source, at_target = keep.source_end, keep.target_end
            if keep.length:
                edits.append(Edit(Op.KEEP, Span(keep.source, at_source), Span(keep.target, at_target)))
        return cls(source_length, tuple(edits))

    @property
    def target_length(self) -> int:
        return self.edits[-1].target.end if self.edits else 0

    @property
    def keeps(self) -> tuple[Match, ...]:
        return tuple(
            Match(edit.source.start, edit.target.start, len(edit.source))
            for edit in self.edits
            if edit.op is Op.KEEP
        )

    @property
    def num_kept(self) -> int:
        """Return the number of tokens kept from the source."""
        return sum(keep.length for keep in self.keeps)

    def apply(self, source: TokenIds) -> TokenIds:
        """Return the target's tokens. Raises EditRangeError unless `source` has `source_length` tokens."""
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
