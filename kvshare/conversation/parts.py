"""The parts of an answer, as it streams: text, reasoning, tool calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """More of the text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A tool call begins; its arguments follow."""

    number: int  # of the calls in this answer, from 0
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    number: int
    text: str


Part = Text | Reasoning | CallBegins | CallArguments
