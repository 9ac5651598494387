"""The grammar of an answer: which calls it requires, permits and excludes."""

from dataclasses import replace

import pytest

from kvshare.conversation.chat import (
    Chat,
    ToolChoice,
    ToolUse,
)
from kvshare.conversation.grammar import grammar_of
from kvshare.conversation.tools import ToolFormat
from kvshare.errors import RequestError
from tests.kvshare.conversation.answers import CHAT, WEATHER_SCHEMA, tool
from tests.kvshare.conversation.vocabularies import (
    ADDED,
    HERMES,
    LLAMA3,
    MISTRAL,
    REQUIRED,
    SCHEMA,
    XML,
    accepts,
    matcher,
    vocabulary,
    written,
)

ONE_CALL = replace(REQUIRED, parallel_tool_calls=False)
NAMED = replace(CHAT, tool_choice=ToolChoice(ToolUse.REQUIRED, "now"))
STRICT = replace(CHAT, tools=(tool("weather", WEATHER_SCHEMA, strict=True), tool("now")))
BETWEEN = {
    HERMES: ("</tool_call><tool_call>", "</tool_call>\n<tool_call>"),
    LLAMA3: ("}{", "}; {"),
    MISTRAL: ("][TOOL_CALLS][", ", "),
    XML: ("</tool_call><tool_call>", "</tool_call>\n<tool_call>"),
}


@pytest.mark.parametrize("fmt", ToolFormat)
@pytest.mark.parametrize(
    "chat", [CHAT, Chat(CHAT.messages), replace(STRICT, tool_choice=ToolChoice(ToolUse.NONE))]
)
def test_free_text_has_no_grammar(chat: Chat, fmt: ToolFormat) -> None:
    """Nor have calls that may be, unless a tool is strict."""
    assert grammar_of(chat, fmt) is None


@pytest.mark.parametrize("markers", ADDED, ids=ADDED.values())
@pytest.mark.parametrize("fmt", ToolFormat)
@pytest.mark.parametrize("chat", [REQUIRED, ONE_CALL, NAMED, STRICT, Chat((), answer_schema=SCHEMA)])
def test_every_grammar_compiles(chat: Chat, fmt: ToolFormat, markers: bool) -> None:
    """In each format, with and without a schema for text, with and without thoughts."""
    words = vocabulary(markers)
    for schema in (chat.answer_schema, {}, SCHEMA):
        asked = replace(chat, answer_schema=schema)
        for in_reasoning in (False, True):
            matcher(grammar_of(asked, fmt, added_tokens=words.added, in_reasoning=in_reasoning), words)


@pytest.mark.parametrize("markers", ADDED, ids=ADDED.values())
@pytest.mark.parametrize("fmt", [HERMES, LLAMA3, XML])
def test_arguments_follow_the_schema(fmt: ToolFormat, markers: bool) -> None:
    """What is required is there, types and values are the schema's, and so is the order."""
    good: dict[str, object] = {"city": "Rome", "days": 3, "unit": "C", "hourly": None, "place": {"x": 1.5}}
    for arguments in (good, {"city": "Rome"}, {"city": "Rome", "unit": "F"}):
        assert accepts(REQUIRED, fmt, written(fmt, arguments), markers=markers)
    bad: list[dict[str, object]] = [
        {},
        {"days": 3},
        {"city": "Rome", "days": "x"},
        {"city": "Rome", "unit": "K"},
        {"city": "R", "z": 1},
    ]
    for arguments in bad:
        assert not accepts(REQUIRED, fmt, written(fmt, arguments), markers=markers)


def test_mistral_with_and_without_a_token_for_arguments() -> None:
    """Newer models, which have the token, name a function; others write a list."""
    listed = written(MISTRAL, {"city": "Rome"})
    named = '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}'
    assert [accepts(REQUIRED, MISTRAL, text) for text in (listed, named)] == [True, False]
    assert [accepts(REQUIRED, MISTRAL, text, markers=True) for text in (listed, named)] == [False, True]
    assert accepts(REQUIRED, MISTRAL, named * 2, markers=True)
    assert not accepts(ONE_CALL, MISTRAL, named * 2, markers=True)
    assert not accepts(REQUIRED, MISTRAL, '[TOOL_CALLS]weather[ARGS]{"days": 3}', markers=True)


@pytest.mark.parametrize("fmt", ToolFormat)
def test_parallel_calls(fmt: ToolFormat) -> None:
    """Several only where they are allowed."""
    call = written(fmt, {"city": "Rome"})
    old, new = BETWEEN[fmt]
    two = (call + call).replace(old, new)
    assert accepts(REQUIRED, fmt, two)
    assert accepts(ONE_CALL, fmt, call)
    assert not accepts(ONE_CALL, fmt, two)


@pytest.mark.parametrize("fmt", ToolFormat)
def test_a_call_that_is_required(fmt: ToolFormat) -> None:
    """Nothing but calls; if one function is named, calls of that one."""
    call = written(fmt, {"city": "Rome"})
    assert not accepts(REQUIRED, fmt, "Rome is warm.")
    assert not accepts(REQUIRED, fmt, "")
    assert not accepts(NAMED, fmt, call)
    assert not accepts(NAMED, fmt, call.replace("weather", "now"))
    nothing = written(fmt, {}).replace("weather", "now")
    assert accepts(NAMED, fmt, nothing)


def test_a_named_function_must_be_there() -> None:
    """The error says what was found and what there is."""
    chat = replace(CHAT, tool_choice=ToolChoice(ToolUse.REQUIRED, "rain"))
    with pytest.raises(
        RequestError, match="'tool_choice' names the function 'rain'; 'tools' has 'weather', 'now'"
    ):
        grammar_of(chat, HERMES)


@pytest.mark.parametrize("markers", ADDED, ids=ADDED.values())
@pytest.mark.parametrize("fmt", [HERMES, LLAMA3, XML])
def test_a_strict_tool_may_be_called(fmt: ToolFormat, markers: bool) -> None:
    """Any text, but what would be read as a call must follow the schema."""
    for text in ("", "It is < 5 °C [today].\n\n", "{}" if fmt is not LLAMA3 else " it"):
        assert accepts(STRICT, fmt, text, markers=markers)
    good, bad = written(fmt, {"city": "Rome"}), written(fmt, {"city": "Rome", "days": "x"})
    assert accepts(STRICT, fmt, good, markers=markers)
    assert not accepts(STRICT, fmt, bad, markers=markers)
    if fmt is not LLAMA3:
        assert accepts(STRICT, fmt, f"I look.\n{good}", markers=markers)
        assert not accepts(STRICT, fmt, f"I look.\n{bad}", markers=markers)


def test_no_other_marker_stands_in_text_beside_strict_tools() -> None:
    """What the parser would read as a call is not allowed by the grammar as text."""
    good = written(XML, {"city": "Rome"})
    assert accepts(STRICT, XML, f"so {good}")
    assert not accepts(STRICT, XML, "so <function=weather>\n</function>")
    assert not accepts(STRICT, XML, f"so <function=weather>\n</function> {good}")
    assert not accepts(STRICT, LLAMA3, 'so <|python_tag|>{"name": "weather", "parameters": {}}')


def test_a_reasoning_model_may_think_first() -> None:
    """It is one if it has a token for that, or if the prompt has opened its thoughts, which then must end."""
    call = written(HERMES, {"city": "Rome"})
    thought = f"<think>\nRome?\n</think>\n\n{call}"
    assert accepts(REQUIRED, HERMES, thought, markers=True)
    assert accepts(REQUIRED, HERMES, call, markers=True)
    assert not accepts(REQUIRED, HERMES, thought)
    for markers in (False, True):
        assert accepts(REQUIRED, HERMES, f"Rome?</think>\n{call}", markers=markers, in_reasoning=True)
        assert not accepts(REQUIRED, HERMES, call, markers=markers, in_reasoning=True)
