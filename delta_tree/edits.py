"""
The steps of an edit script: what may happen to a stretch of tokens, and where.

Values that check themselves; that the steps of one script fit together is script.py's business.
"""

from dataclasses import dataclass
from enum import Enum

from delta_tree.errors import EditRangeError
from delta_tree.spans import Span


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
