"""Answers that end inside a call, a thought or JSON."""

from dataclasses import replace

import pytest

from kvshare.conversation.chat import Chat, ToolChoice, ToolUse
from kvshare.conversation.parser import joined, parser_for
from kvshare.conversation.tools import ToolFormat
from tests.kvshare.conversation.answers import CHAT, plain, read_plain

HERMES, LLAMA3, MISTRAL, XML = ToolFormat
REQUIRED = replace(CHAT, tool_choice=ToolChoice(ToolUse.REQUIRED))


@pytest.mark.parametrize(
    ("fmt", "text", "rows"),
    [
        (HERMES, '<tool_call>{"name": "f", "argu', [("call", 0, "f")]),
        (
            HERMES,
            '<tool_call>{"name": "f", "arguments": {"a": "b',
            [("call", 0, "f"), ("arguments", 0, '{"a": "b')],
        ),
        (HERMES, '<tool_call>{"na', [("text", '<tool_call>{"na')]),
        (
            MISTRAL,
            '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"na',
            [("call", 0, "f"), ("arguments", 0, "{}")],
        ),
        (
            XML,
            "<tool_call><function=weather><parameter=city>Ro",
            [("call", 0, "weather"), ("arguments", 0, '{"city": "Ro')],
        ),
        (
            XML,
            "<tool_call><function=weather><parameter=days>1",
            [("call", 0, "weather"), ("arguments", 0, '{"days": 1')],
        ),
    ],
)
def test_an_answer_that_ends_inside_a_call(
    fmt: ToolFormat, text: str, rows: list[tuple[object, ...]]
) -> None:
    """What was begun stays as it is."""
    assert read_plain(fmt, text) == rows


ARGUMENTS = '{"city": "Rome"}'
TWO_CALLS = {
    "hermes": (
        HERMES,
        f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    ),
    "llama 3": (
        LLAMA3,
        f'{{"name": "weather", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
    ),
    "mistral, list": (
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}, '
        '{"name": "now", "arguments": {}}]',
    ),
    "mistral, names": (MISTRAL, f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[ARGS]{{}}"),
    "qwen coder": (
        XML,
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
}


def ended(
    fmt: ToolFormat, text: str, *, chat: Chat, cut: bool
) -> tuple[list[tuple[object, ...]], str, int | None]:
    """What is read of an answer that ends with this text; its text parts; where nothing more is shown."""
    parser = parser_for(chat, fmt)
    rows = plain(joined([*parser.add(text), *parser.end(cut=cut)]))
    return rows, "".join(str(row[1]) for row in rows if row[0] == "text"), parser.hidden_from


@pytest.mark.parametrize(("fmt", "text"), TWO_CALLS.values(), ids=TWO_CALLS)
def test_the_head_of_a_call_that_was_cut_off_is_not_shown(fmt: ToolFormat, text: str) -> None:
    """
    Wherever an answer of two calls is cut, no markup is text: where calls are required whoever cut it, else
    where the model did not end it. A few characters of a first marker may be text, such as "5 <".
    """
    for end in range(len(text)):
        for cut in (False, True):
            _, shown, _ = ended(fmt, text[:end], chat=REQUIRED, cut=cut)
            assert shown == "", text[:end]
        rows, shown, hidden_from = ended(fmt, text[:end], chat=CHAT, cut=True)
        assert len(shown) < 3, text[:end]
        assert text[:end].startswith(shown)
        has_head = end > 0 and not any(row[0] == "call" for row in rows)
        assert (hidden_from == 0) == (has_head and not shown)
        if fmt is not LLAMA3:
            _, shown, hidden_from = ended(fmt, f"I look.\n{text[:end]}", chat=CHAT, cut=True)
            assert shown.removeprefix("I look.").strip() in ("", *(text[:length] for length in (1, 2)))
            assert hidden_from is None or hidden_from >= len("I look.")


def test_a_head_that_the_model_ended_itself_is_text() -> None:
    """It may have written about calls; nothing of that is lost."""
    for text in ("Models write <tool_call>", "<tool_call>{", "ends in <tool_ca"):
        assert ended(HERMES, text, chat=CHAT, cut=False) == ([("text", text)], text, None)


@pytest.mark.parametrize(
    ("text", "chat", "shown"),
    [
        ('{"name": "wea', CHAT, ""),
        ('{"name": "weather"', CHAT, ""),
        ('{"name": "weat"', CHAT, '{"name": "weat"'),
        ('{"name": "Ann', CHAT, '{"name": "Ann'),
        ('{"name": "wea', replace(CHAT, answer_schema={"type": "object"}), '{"name": "wea'),
    ],
)
def test_json_that_is_cut_off_is_text_unless_it_may_be_a_call(text: str, chat: Chat, shown: str) -> None:
    """Llama 3's calls have no marker: an object that names no tool, or that was asked for, is an answer."""
    assert ended(LLAMA3, text, chat=chat, cut=True)[1] == shown


@pytest.mark.parametrize(
    ("text", "in_reasoning", "rows"),
    [
        ("<thi", False, []),
        ("<think>Hm. </thi", False, [("thought", "Hm.")]),
        ("Hm. </thi", True, [("thought", "Hm.")]),
        ("Hm. 5 <", True, [("thought", "Hm. 5"), ("thought", " <")]),
    ],
)
def test_tags_of_thoughts_that_were_cut_off_are_not_shown(
    text: str, in_reasoning: bool, rows: list[tuple[object, ...]]
) -> None:
    """Neither as text nor as thoughts."""
    parser = parser_for(CHAT, HERMES, in_reasoning=in_reasoning)
    found = plain([*parser.add(text), *parser.end(cut=True)])
    assert [row[0] for row in found] == [row[0] for row in rows]
    assert "".join(str(row[1]) for row in found).split() == "".join(str(row[1]) for row in rows).split()
