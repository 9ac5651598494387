"""Grammars compile, refuse what is wrong, and all that they allow is read as what was asked for."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from tokenizers import AddedToken, Tokenizer

from kvshare.conversation.chat import (
    CallArguments,
    CallBegins,
    Chat,
    Part,
    Reasoning,
    Text,
    ToolChoice,
    ToolUse,
)
from kvshare.conversation.grammar import grammar_of
from kvshare.conversation.lark import Grammar
from kvshare.conversation.tools import ToolFormat
from kvshare.demo import MODEL_PATH
from kvshare.errors import RequestError
from tests.kvshare.conversation.answers import CHAT, WEATHER_SCHEMA, read, tool

HERMES, LLAMA3, MISTRAL, XML = ToolFormat
REQUIRED = replace(CHAT, tool_choice=ToolChoice(ToolUse.REQUIRED))
ONE_CALL = replace(REQUIRED, parallel_tool_calls=False)
NAMED = replace(CHAT, tool_choice=ToolChoice(ToolUse.REQUIRED, "now"))
STRICT = replace(CHAT, tools=(tool("weather", WEATHER_SCHEMA, strict=True), tool("now")))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
ADDED = {True: "with tokens for markers", False: "markers as text"}

CALLS = {
    HERMES: '<tool_call>\n{"name": "weather", "arguments": ARGUMENTS}\n</tool_call>',
    LLAMA3: '{"name": "weather", "parameters": ARGUMENTS}',
    MISTRAL: '[TOOL_CALLS][{"name": "weather", "arguments": ARGUMENTS}]',
    XML: "<tool_call>\n<function=weather>\nARGUMENTS</function>\n</tool_call>",
}
BETWEEN = {
    HERMES: ("</tool_call><tool_call>", "</tool_call>\n<tool_call>"),
    LLAMA3: ("}{", "}; {"),
    MISTRAL: ("][TOOL_CALLS][", ", "),
    XML: ("</tool_call><tool_call>", "</tool_call>\n<tool_call>"),
}


class Vocabulary:
    """The demo model's tokenizer, with or without tokens for the markers."""

    def __init__(self, *, has_markers: bool) -> None:
        tokenizer = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
        self.added: Mapping[str, int] = {}
        if has_markers:
            tokenizer.add_tokens([AddedToken(marker, special=marker[0] == "[") for marker in MARKERS])
            numbers = {marker: tokenizer.token_to_id(marker) for marker in MARKERS}
            self.added = {marker: number for marker, number in numbers.items() if number is not None}
        self._tokenizer = tokenizer
        self.llguidance = LLTokenizer(tokenizer.to_str())

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


@cache
def vocabulary(has_markers: bool) -> Vocabulary:
    return Vocabulary(has_markers=has_markers)


def matcher(grammar: Grammar | None, words: Vocabulary) -> LLMatcher:
    assert grammar is not None
    source = LLMatcher.grammar_from_lark(grammar.lark)
    assert LLMatcher.validate_grammar(source, words.llguidance) == ""
    return LLMatcher(words.llguidance, source)


def accepts(
    chat: Chat, fmt: ToolFormat, text: str, *, markers: bool = False, in_reasoning: bool = False
) -> bool:
    """Whether the tokens of this text are a whole answer by the chat's grammar."""
    words = vocabulary(markers)
    match = matcher(grammar_of(chat, fmt, added_tokens=words.added, in_reasoning=in_reasoning), words)
    ids = words.encode(text)
    return match.try_consume_tokens(ids) == len(ids) and match.is_accepting()


def written(fmt: ToolFormat, arguments: Mapping[str, object]) -> str:
    """A call of `weather` as models of this format write it."""
    shown = json.dumps(arguments)
    if fmt is XML:
        texts = [
            (key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items()
        ]
        shown = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts)
    return CALLS[fmt].replace("ARGUMENTS", shown)


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


def test_arguments_are_an_object() -> None:
    """Also where the schema leaves that out."""
    chat = replace(REQUIRED, tools=(tool("weather", {"properties": {"city": {"type": "string"}}}),))
    assert accepts(chat, LLAMA3, written(LLAMA3, {"city": "Rome"}))
    assert not accepts(chat, LLAMA3, '{"name": "weather", "parameters": 3}')


NO_PARAMETERS: list[dict[str, Any] | None] = [
    None,
    {},
    {"type": "object", "properties": {}},
    {"type": "object", "properties": None},
    {"properties": {}, "required": [], "title": "Nothing", "description": "None."},
    {"type": "object", "additionalProperties": False},
    {"type": "object", "properties": {}, "$comment": "x", "examples": [{}], "default": {}, "x-order": 1},
]
ANY_PARAMETERS: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": ["object", "null"]},
    {"type": "object", "properties": {}, "additionalProperties": True},
    {"type": "object", "properties": {}, "additionalProperties": {"type": "integer"}},
    {"properties": {}, "patternProperties": {"^a": {"type": "integer"}}},
    {"properties": {}, "anyOf": [{"type": "object"}]},
    {"properties": {}, "$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}},
    {"properties": {}, "minProperties": 1},
]


@pytest.mark.parametrize("fmt", [HERMES, LLAMA3, MISTRAL])
def test_a_tool_without_parameters_gets_an_empty_object(fmt: ToolFormat) -> None:
    """An absent schema and an empty list of properties leave nothing to invent; other schemas may."""
    for schema in NO_PARAMETERS:
        for strict in (False, True):
            given = tool("weather", schema, strict=strict)
            chat = Chat((), (given,), ToolChoice(ToolUse.REQUIRED))
            assert accepts(chat, fmt, written(fmt, {})), schema
            assert not accepts(chat, fmt, written(fmt, {"a": 1})), schema
    for schema in ANY_PARAMETERS:
        chat = Chat((), (tool("weather", schema),), ToolChoice(ToolUse.REQUIRED))
        assert accepts(chat, fmt, written(fmt, {"a": 1})), schema


@pytest.mark.parametrize("given", ["string", "array", ["string", "null"]])
def test_arguments_that_are_no_object_are_refused(given: object) -> None:
    """No client could read them; tools that are only read for, not enforced, may say what they like."""
    tools = (tool("weather", {"type": given}),)
    for chat in (
        Chat((), tools, ToolChoice(ToolUse.REQUIRED)),
        Chat((), (tool("weather", {"type": given}, strict=True),)),
    ):
        with pytest.raises(RequestError, match="function 'weather' are no object") as refusal:
            grammar_of(chat, HERMES)
        assert refusal.value.param == "tools"
    assert grammar_of(Chat((), tools), HERMES) is None


@pytest.mark.parametrize("schema", [{"enum": []}, {"anyOf": []}, {"allOf": [False]}])
def test_a_schema_without_any_answer_is_not_said_to_be_endless_only(schema: dict[str, object]) -> None:
    """The reason names both ways in which no answer is finite."""
    with pytest.raises(RequestError, match="no answer follows it, or each answer would contain"):
        grammar_of(Chat((), answer_schema=schema), HERMES)


@pytest.mark.parametrize("schema", [{}, {"type": "object"}])
def test_any_json_object(schema: dict[str, object]) -> None:
    """What `json_object` asks for."""
    chat = Chat((), answer_schema=schema)
    for text in ("{}", '{"a": [1, {"b": null}], "ü": "x"}', '{"a":1,"b":2}'):
        assert accepts(chat, HERMES, text)
    for text in ("", "[]", "3", '{"a": }', "Here: {}", '{"a": 1} and', '{"a":  1}'):
        assert not accepts(chat, HERMES, text)


def test_json_of_a_schema() -> None:
    """Of that schema; where a tool may be called, a call as well."""
    chat = Chat((), answer_schema=SCHEMA)
    assert accepts(chat, HERMES, '{"a": 1}')
    assert not accepts(chat, HERMES, '{"a": "x"}')
    assert not accepts(chat, HERMES, written(HERMES, {"city": "Rome"}))
    asked = replace(CHAT, answer_schema=SCHEMA)
    assert accepts(asked, HERMES, '{"a": 1}')
    assert accepts(asked, HERMES, written(HERMES, {"city": "Rome"}))
    assert not accepts(asked, HERMES, "Rome is warm.")
    assert not accepts(replace(REQUIRED, answer_schema=SCHEMA), HERMES, '{"a": 1}')


def test_schemas_beyond_the_library() -> None:
    """They are an error where the schema is promised; a tool that is not strict gets what is known of it."""
    unknown = {"type": "object", "properties": {"a": {"type": "string", "format": "uri-template"}}}
    lenient = Chat((), (tool("f", unknown),), ToolChoice(ToolUse.REQUIRED))
    assert accepts(lenient, HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>')
    for chat in (
        Chat((), answer_schema=unknown),
        Chat((), (tool("f", unknown, strict=True),), ToolChoice(ToolUse.REQUIRED)),
    ):
        grammar = grammar_of(chat, HERMES)
        assert grammar is not None
        assert "uri-template" in LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar.lark))


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


def test_names_that_json_escapes() -> None:
    """Names of tools and values are quoted for JSON and for the grammar."""
    name, value = 'a"b\\c/ü', 'x"\\\n/y'
    schema = {"type": "object", "properties": {name: {"enum": [value]}}, "required": [name]}
    chat = Chat((), (tool(name, schema),), ToolChoice(ToolUse.REQUIRED))
    arguments = json.dumps({name: value}, ensure_ascii=False)
    call = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": {arguments}}}'
    assert accepts(chat, LLAMA3, call)


HINTS = {
    HERMES: ["\n</tool_call>", '"}}', "</think>"],
    LLAMA3: ['"}}', "</think>"],
    MISTRAL: ['"}', "}]", "</think>"],
    XML: ["</parameter>\n", "</function>\n</tool_call>", "</think>"],
}
SHORT: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 20},
        "unit": {"enum": ["C", "F"]},
        "hourly": {"type": "boolean"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def walk(chat: Chat, fmt: ToolFormat, words: Vocabulary, chance: random.Random) -> str | None:
    """The text of allowed tokens drawn at random; None if it did not come to an end."""
    match = matcher(grammar_of(chat, fmt, added_tokens=words.added), words)
    ids: list[int] = []
    mask = allocate_token_bitmask(1, words.llguidance.vocab_size)
    while len(ids) < 400:
        if match.is_accepting() and chance.random() < 0.5:
            return words.decode(ids)
        if chance.random() < 0.3:  # or texts would hardly ever end
            hint = words.encode(chance.choice(HINTS[fmt]))
            ids += hint[: match.try_consume_tokens(hint)]
            continue
        fill_next_token_bitmask(match, mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != words.llguidance.eos_token]
        if not allowed.size:
            return words.decode(ids)
        token = int(chance.choice(allowed))
        assert match.consume_token(token), match.get_error()
        ids.append(token)
    return None


@pytest.mark.parametrize("markers", ADDED, ids=ADDED.values())
@pytest.mark.parametrize("fmt", ToolFormat)
def test_whatever_is_allowed_is_read_as_calls(fmt: ToolFormat, markers: bool) -> None:
    """Answers drawn at random from a grammar are calls of its tools, with arguments by their schemas."""
    tools = (tool("weather", SHORT), tool("now"), tool("weather_map", SHORT))
    chat = Chat((), tools, ToolChoice(ToolUse.REQUIRED))
    chance, words = random.Random(7), vocabulary(markers)
    texts = [text for _ in range(25) if (text := walk(chat, fmt, words, chance)) is not None]
    assert len(texts) >= 8
    for text in texts:
        _check_calls(read(fmt, text, chat=chat), fmt, text)


def _check_calls(parts: Sequence[Part], fmt: ToolFormat, text: str) -> None:
    assert not [part for part in parts if isinstance(part, Text)], text
    spoken = [part for part in parts if not isinstance(part, Reasoning)]
    for begins, arguments in zip(spoken[::2], spoken[1::2], strict=True):
        assert isinstance(begins, CallBegins), text
        assert isinstance(arguments, CallArguments), text
        values = json.loads(arguments.text)
        if begins.name == "now":
            assert values == {}
            continue
        assert begins.name in ("weather", "weather_map")
        assert {"city", "days"} <= set(values) <= set(SHORT["properties"])
        assert isinstance(values["city"], str)
        assert type(values["days"]) is int
        assert 0 <= values["days"] <= 20
        assert values.get("unit", "C") in ("C", "F")
        assert isinstance(values.get("hourly", True), bool)


@pytest.mark.parametrize("fmt", ToolFormat)
def test_whatever_is_allowed_beside_strict_tools(fmt: ToolFormat) -> None:
    """Answers drawn at random: no text that looks like a call, no call without all its arguments."""
    chat = Chat((), (tool("weather", SHORT, strict=True),))
    chance, words = random.Random(3), vocabulary(True)
    texts = [text for _ in range(15) if (text := walk(chat, fmt, words, chance)) is not None]
    assert len(texts) >= 5
    for text in texts:
        parts = [part for part in read(fmt, text, chat=chat) if not isinstance(part, Text)]
        _check_calls(parts, fmt, text)
