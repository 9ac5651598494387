"""Counts of the rows that could not be read, as reports have them: fixed words, never a row's text."""

from pydantic import BaseModel, ConfigDict


class UnreadableLine(BaseModel):
    """The place of one row, and why it cannot be read."""

    model_config = ConfigDict(frozen=True)

    source: str
    line: int
    reason: str


class Unreadable(BaseModel):
    """Rows that could not be read, by reason, and the first of them."""

    model_config = ConfigDict(frozen=True)

    num_rows: int = 0
    reasons: dict[str, int] = {}
    lines: tuple[UnreadableLine, ...] = ()
