"""Reads the transitions of a state machine from a table for people: rows are events, columns are states."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

_State = TypeVar("_State", bound=StrEnum)
_Event = TypeVar("_Event", bound=StrEnum)


def transitions(
    table: str, states: type[_State], events: type[_Event]
) -> Mapping[tuple[_State, _Event], _State]:
    """Return {(state, event): next state}. `-` means none; text after the last column is a comment."""
    header, *rows = [line.split() for line in table.strip().splitlines()]
    return {
        (states(state), events(event)): states(following)
        for event, *cells in rows
        for state, following in zip(header, cells, strict=False)
        if following != "-"
    }
