"""The interface of readers of tool calls, and the parts that they yield."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import ClassVar, TypeVar
from uuid import uuid4

from kvshare.conversation.formats.cursor import Cursor
from kvshare.conversation.parts import CallArguments, CallBegins, Part

_T = TypeVar("_T")

Steps = Generator[Part | None, None, _T]  # None: more text is needed


class Calls:
    """Numbers the calls of one answer, and makes their ids."""

    def __init__(self) -> None:
        self.num_begun = 0

    def begin(self, name: str) -> CallBegins:
        self.num_begun += 1
        return CallBegins(self.num_begun - 1, f"call_{uuid4().hex[:24]}", name)

    def arguments(self, text: str) -> CallArguments:
        """More of the last call's arguments."""
        return CallArguments(self.num_begun - 1, text)


class CallReader(ABC):
    """Reads the tool calls of one format."""

    markers: ClassVar[tuple[str, ...]]  # begin a call anywhere in the answer
    first_markers: ClassVar[tuple[str, ...]] = ()  # begin a call at the start of the answer

    @abstractmethod
    def read(self, cursor: Cursor, calls: Calls, marker: str) -> Steps[bool]:
        """
        Read the calls after `marker`, as far as they are well formed.

        Returns whether a call has begun. If so the cursor is after what was read; the rest is text.
        """
