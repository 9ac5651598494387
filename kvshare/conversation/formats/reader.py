"""The interface of readers of tool calls, and the growing text of an answer that they read."""

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar
from uuid import uuid4

from kvshare.conversation.chat import CallArguments, CallBegins, Part

_T = TypeVar("_T")

Waiting = Generator[None, None, _T]  # yields when it needs more text
Steps = Generator[Part | None, None, _T]  # None: more text is needed


class Cursor:
    """
    A position in a text that grows at its end.

    Methods that need more text wait for it: their generators yield until there is more, or the answer has
    ended. So results depend on the text only, and not on the pieces that it comes in.
    """

    def __init__(self) -> None:
        self.text = ""  # without what was dropped
        self.at = 0
        self.scanned = 0  # the end of all values that were read, also where the cursor went back
        self.ended = False
        self.starved = False  # the answer ended when more text was needed
        self.num_dropped = 0  # characters that were dropped
        self.hidden_from: int | None = None  # the place in the answer from which on nothing is shown

    def more(self) -> Waiting[bool]:
        """Wait for more text. Returns False if the answer has ended."""
        if self.ended:
            self.starved = True
            return False
        yield
        return True

    def peek(self) -> Waiting[str]:
        """Yield the next character; empty at the end of the answer."""
        while self.at == len(self.text) and (yield from self.more()):
            pass
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Waiting[None]:
        while (yield from self.peek()).isspace():
            self.at += 1

    def accept(self, literal: str) -> Waiting[bool]:
        """Advance over `literal` if it comes next. Returns whether it did."""
        while not self.text.startswith(literal, self.at):
            begun = self.text[self.at : self.at + len(literal)]
            if not literal.startswith(begun) or not (yield from self.more()):
                return False
        self.at += len(literal)
        return True

    def accept_after_space(self, literal: str) -> Waiting[bool]:
        """Advance over white space and `literal` if they come next, else stay. Returns whether they did."""
        start = self.at
        yield from self.skip_space()
        if (yield from self.accept(literal)):
            return True
        self.at = start
        return False

    def take_run(self, pattern: re.Pattern[str]) -> Waiting[str]:
        """Take all next characters that match `pattern`, which must match any number of characters."""
        start = self.at
        while True:
            found = pattern.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text) or not (yield from self.more()):
                return self.text[start : self.at]

    def take_until(self, stop: str) -> Waiting[str | None]:
        """Take the text before `stop`, and advance over both. None if there is no `stop`; it stays then."""
        searched = self.at
        while (end := self.text.find(stop, searched)) < 0:
            searched = max(self.at, len(self.text) - len(stop) + 1)
            if not (yield from self.more()):
                return None
        taken = self.text[self.at : end]
        self.at = end + len(stop)
        return taken

    def hide(self) -> None:
        """Advance over all text. None of it is shown: it begins a call that did not come about."""
        if self.text and self.hidden_from is None:
            self.hidden_from = self.num_dropped
        self.at = len(self.text)

    def drop(self) -> None:
        self.num_dropped += self.at
        self.text = self.text[self.at :]
        self.at = self.scanned = 0


class Calls:
    """Numbers the calls of one answer, and makes their ids."""

    def __init__(self) -> None:
        self.num_begun = 0

    def begin(self, name: str) -> CallBegins:
        self.num_begun += 1
        return CallBegins(self.num_begun - 1, f"call_{uuid4().hex[:24]}", name)

    def arguments(self, text: str) -> CallArguments:
        return CallArguments(self.num_begun - 1, text)


class CallReader(ABC):
    """Reads the tool calls of one format. `tools`: those that may be called."""

    markers: ClassVar[tuple[str, ...]]  # begin a call anywhere in the answer
    first_markers: ClassVar[tuple[str, ...]] = ()  # begin a call at the start of the answer

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tools = tools

    @abstractmethod
    def read(self, cursor: Cursor, calls: Calls, marker: str) -> Steps[bool]:
        """
        Read the calls after `marker`, as far as they are well formed.

        Returns whether a call has begun. If so the cursor is after what was read; the rest is text.
        """
