"""Splits an answer, while it streams, into text, reasoning and tool calls."""

import re
from collections.abc import Iterable, Sequence

from kvshare.conversation.chat import CallArguments, CallBegins, Chat, Part, Reasoning, Text, ToolUse
from kvshare.conversation.formats import READERS
from kvshare.conversation.formats.reader import CallReader, Calls, Cursor, Steps, Waiting
from kvshare.conversation.tools import ToolFormat

_REASONING_BEGINS = "<think>"
_REASONING_ENDS = "</think>"


class AnswerParser:
    """
    Parses one answer. The joined parts do not depend on the pieces that the text comes in.

    An answer may end inside the head of a call, before the tool's name is complete. If the model ended it
    there by itself, the head is shown as text, since it may be meant as text. If the answer was cut, or had
    to call a tool, the head is hidden.
    """

    def __init__(self, chat: Chat, reader: CallReader | None, *, in_reasoning: bool) -> None:
        self.num_calls = 0
        self._one_call = not chat.parallel_tool_calls  # what is after the first call is ignored
        self._cursor = Cursor()
        may_begin = not chat.continue_final_message
        self._tail = _Tail(chat)
        self._steps = _read_answer(
            self._cursor, reader, self._tail, in_reasoning=in_reasoning, may_begin=may_begin
        )

    @property
    def num_read(self) -> int:
        """Characters of the answer whose parts were returned."""
        return self._cursor.num_dropped

    @property
    def hidden_from(self) -> int | None:
        """Return the place in the answer from which on nothing is shown; None: all is."""
        return self._cursor.hidden_from

    def add(self, text: str) -> list[Part]:
        """Add text. Returns the parts that no later text can change."""
        self._cursor.text += text
        return self._advance()

    def end(self, *, cut: bool = False) -> list[Part]:
        """End the answer. Returns the parts that were held back. `cut`: the model did not end it itself."""
        self._cursor.ended = True
        self._tail.cut = cut
        return self._advance()

    def _advance(self) -> list[Part]:
        parts: list[Part] = []
        for part in self._steps:
            if part is None:
                break
            is_after_first = self._one_call and self.num_calls > 0
            if not is_after_first or (isinstance(part, CallArguments) and part.number == 0):
                self.num_calls += isinstance(part, CallBegins)
                parts.append(part)
        return joined(parts)


def parser_for(chat: Chat, fmt: ToolFormat, *, in_reasoning: bool = False) -> AnswerParser:
    """Make the parser of one answer to `chat`. `in_reasoning`: the prompt ends inside `<think>`."""
    return AnswerParser(chat, READERS[fmt](chat.tools) if chat.may_call else None, in_reasoning=in_reasoning)


def joined(parts: Iterable[Part]) -> list[Part]:
    """Return the same parts, with neighbours of one kind joined."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if isinstance(part, Text) and isinstance(last, Text):
            result[-1] = Text(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            result[-1] = Reasoning(last.text + part.text)
        elif (
            isinstance(part, CallArguments) and isinstance(last, CallArguments) and part.number == last.number
        ):
            result[-1] = CallArguments(part.number, last.text + part.text)
        else:
            result.append(part)
    return result


_TELLING = 3  # so many characters of a marker are unlikely in other text; one or two are not: "5 <"


class _Tail:
    """Decides whether text at the end of an answer, which may begin a call or thoughts, is hidden."""

    def __init__(self, chat: Chat) -> None:
        self.cut = False
        self._must_call = chat.may_call and chat.tool_choice.use is ToolUse.REQUIRED
        self._is_json = chat.answer_schema is not None
        self._names = [str(tool["function"]["name"]) for tool in chat.tools]

    def hides_head(self, head: str, *, marked: bool) -> bool:
        """Return whether to hide what may be a call's head. `marked`: it has a marker, not just `{`."""
        return self._must_call or (self.cut and (marked or self._may_call(head)))

    def hides_marker(self, text: str, *, after_call: bool) -> bool:
        """Return whether to hide text that may begin a marker. `after_call`: any text there may be one."""
        num = len(text.strip())
        return self._must_call or (self.cut and num >= (1 if after_call else _TELLING))

    def _may_call(self, head: str) -> bool:
        """Return whether JSON that is cut off may be a call of one of the tools."""
        match = re.search(r'"name"\s*:\s*"([^"]*)("?)', head)
        if self._is_json or match is None:
            return not self._is_json
        name, is_whole = match[1], bool(match[2])
        return any(each == name if is_whole else each.startswith(name) for each in self._names)


def _read_answer(
    cursor: Cursor, reader: CallReader | None, tail: _Tail, *, in_reasoning: bool, may_begin: bool
) -> Steps[None]:
    """`reader`: None if no tool may be called. `may_begin`: the answer may begin with `<think>`."""
    if in_reasoning or may_begin:
        yield from _read_reasoning(cursor, tail, begun=in_reasoning)
    calls = Calls()
    if reader is None:
        yield from _text_before(cursor, (), Text)
    else:
        yield from _read_calls(cursor, reader, calls, tail)
        if tail.hides_marker(cursor.text, after_call=calls.num_begun > 0):
            cursor.hide()
            return
    rest = cursor.text.rstrip() if calls.num_begun else cursor.text
    cursor.at = len(cursor.text)
    cursor.drop()
    if rest:
        yield Text(rest)


def _read_reasoning(cursor: Cursor, tail: _Tail, *, begun: bool) -> Steps[None]:
    """White space around reasoning belongs neither to it nor to the text after it."""
    if not (yield from cursor.accept_after_space(_REASONING_BEGINS)) and not begun:
        if cursor.starved and tail.cut and tail.hides_marker(cursor.text, after_call=False):
            cursor.hide()
            cursor.drop()
        return
    yield from cursor.skip_space()
    cursor.drop()
    if (yield from _text_before(cursor, (_REASONING_ENDS,), Reasoning)) is None:
        if tail.hides_marker(cursor.text, after_call=False):
            cursor.hide()
        elif rest := cursor.text.rstrip():
            yield Reasoning(rest)
        cursor.at = len(cursor.text)
    yield from cursor.skip_space()
    cursor.drop()


def _read_calls(cursor: Cursor, reader: CallReader, calls: Calls, tail: _Tail) -> Steps[None]:
    """Read text and calls. The cursor holds the text that remains at the end."""
    marker = yield from _accept_any(cursor, reader.first_markers)
    if marker is None:
        marker = yield from _text_before(cursor, reader.markers, Text)
    while marker is not None:
        marker_end = cursor.at
        begun = yield from reader.read(cursor, calls, marker)
        if not begun and cursor.starved and tail.hides_head(cursor.text, marked=marker in reader.markers):
            cursor.hide()
        elif not begun:
            # Text that was not a call is not searched again: that could take quadratic time.
            cursor.at = max(marker_end, cursor.scanned)
            yield Text(cursor.text[: cursor.at])
        elif cursor.starved:  # the answer ends inside the call, or right after it
            cursor.at = len(cursor.text)
        cursor.drop()
        marker = yield from _text_before(cursor, reader.markers, Text)


def _accept_any(cursor: Cursor, markers: Sequence[str]) -> Waiting[str | None]:
    for marker in markers:
        if (yield from cursor.accept_after_space(marker)):
            return marker
    return None


def _text_before(cursor: Cursor, markers: Sequence[str], kind: type[Text | Reasoning]) -> Steps[str | None]:
    """
    Yield the text before the next marker as it comes, without the white space right before the marker.

    Returns the marker; the cursor is after it. Returns None if the answer ends before a marker; the cursor is
    then before the text that was held back.
    """
    while True:
        match = re.search("|".join(map(re.escape, markers)), cursor.text) if markers else None
        certain = match.start() if match else _num_certain(cursor.text, markers)
        if markers:
            certain = len(cursor.text[:certain].rstrip())
        if certain:
            yield kind(cursor.text[:certain])
            cursor.at = certain
            cursor.drop()
        if match:
            cursor.at = match.end() - certain
            return match[0]
        if not (yield from cursor.more()):
            return None


def _num_certain(text: str, markers: Sequence[str]) -> int:
    """Return the number of characters before the first place where a marker may have begun."""
    for start in range(max(0, len(text) - max(map(len, markers), default=0)), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)
