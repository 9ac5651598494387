"""What reading an answer yields, and how a format of calls is read."""

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
    """Numbers the calls of one answer."""

    def __init__(self) -> None:
        self.num_begun = 0

    def begin(self, name: str) -> CallBegins:
        self.num_begun += 1
        return CallBegins(self.num_begun - 1, f"call_{uuid4().hex[:24]}", name)

    def arguments(self, text: str) -> CallArguments:
        """More of the last call's."""
        return CallArguments(self.num_begun - 1, text)


class CallReader(ABC):
    """Reads the calls of one format."""

    markers: ClassVar[tuple[str, ...]]  # a call may begin with one of these, anywhere in the answer
    first_markers: ClassVar[tuple[str, ...]] = ()  # or with one of these, at its very start

    @abstractmethod
    def read(self, cursor: Cursor, calls: Calls, marker: str) -> Steps[bool]:
        """
        Read the calls behind `marker`, as far as they are well formed.

        Returns whether a call has begun. If so the cursor stands behind what was read; the rest is text.
        """
