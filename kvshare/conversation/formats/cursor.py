"""Where reading stands in an answer that is still growing."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

_T = TypeVar("_T")

Waiting = Generator[None, None, _T]  # yields where it needs more text than there is


class Cursor:
    """
    A place in a text that grows at its end.

    What has to know more of the text waits for it: its generator yields until there is more, or until the
    answer has ended. So a result depends on the text and never on the pieces that it came in.
    """

    def __init__(self) -> None:
        self.text = ""  # without what was dropped
        self.at = 0
        self.scanned = 0  # up to here values were followed, also where the cursor went back
        self.ended = False
        self.starved = False  # more was needed than came

    def more(self) -> Waiting[bool]:
        """Wait. False: the answer has ended, there will be no more."""
        if self.ended:
            self.starved = True
            return False
        yield
        return True

    def peek(self) -> Waiting[str]:
        """The next character; empty at the end."""
        while self.at == len(self.text) and (yield from self.more()):
            pass
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Waiting[None]:
        while (yield from self.peek()).isspace():
            self.at += 1

    def accept(self, literal: str) -> Waiting[bool]:
        """Go behind `literal` if the text goes on with it."""
        while not self.text.startswith(literal, self.at):
            begun = self.text[self.at : self.at + len(literal)]
            if not literal.startswith(begun) or not (yield from self.more()):
                return False
        self.at += len(literal)
        return True

    def accept_after_space(self, literal: str) -> Waiting[bool]:
        """Go behind white space and `literal`, or nowhere."""
        start = self.at
        yield from self.skip_space()
        if (yield from self.accept(literal)):
            return True
        self.at = start
        return False

    def take_run(self, pattern: re.Pattern[str]) -> Waiting[str]:
        """All characters from here that fit `pattern`, which fits any number of single characters."""
        start = self.at
        while True:
            found = pattern.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if self.at < len(self.text) or not (yield from self.more()):
                return self.text[start : self.at]

    def take_until(self, stop: str) -> Waiting[str | None]:
        """The text in front of `stop`; the cursor goes behind it. None, and nowhere: there is no `stop`."""
        searched = self.at
        while (end := self.text.find(stop, searched)) < 0:
            searched = max(self.at, len(self.text) - len(stop) + 1)
            if not (yield from self.more()):
                return None
        taken = self.text[self.at : end]
        self.at = end + len(stop)
        return taken

    def drop(self) -> None:
        """Forget what has been read."""
        self.text = self.text[self.at :]
        self.at = self.scanned = 0
