"""What an answer must follow, in llguidance's Lark dialect: a JSON schema, or calls of tools."""

from __future__ import annotations

from kvshare.conversation.chat import Chat
from kvshare.conversation.tools import ToolFormat
from kvshare.engines.base import Grammar


def grammar_of(chat: Chat, fmt: ToolFormat) -> Grammar | None:
    """None: the answer may be any text."""
    raise NotImplementedError
