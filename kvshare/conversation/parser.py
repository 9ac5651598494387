"""Cuts the text of an answer, as it streams, into what is said, thought and called."""

from __future__ import annotations

from kvshare.conversation.chat import Chat
from kvshare.conversation.parts import Part
from kvshare.conversation.tools import ToolFormat


class AnswerParser:
    """Of one answer. However the text is cut into pieces, the joined parts are the same."""

    def add(self, text: str) -> list[Part]:
        """The parts that are certain once `text` has followed what was added before."""
        raise NotImplementedError

    def end(self) -> list[Part]:
        """What was held back; the answer has ended."""
        raise NotImplementedError

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        raise NotImplementedError


def parser_for(chat: Chat, fmt: ToolFormat, *, reasons: bool = False) -> AnswerParser:
    """For one answer to `chat`. `reasons`: the prompt ends inside `<think>`."""
    raise NotImplementedError
