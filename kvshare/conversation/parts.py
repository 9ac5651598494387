"""What an answer is made of, as it streams: text, thoughts, calls of tools."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """More of what is said to the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what a reasoning model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call of a tool begins; its arguments follow."""

    number: int  # of the calls in this answer, from 0
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of that call's arguments."""

    number: int
    text: str


Part = Text | Reasoning | CallBegins | CallArguments
