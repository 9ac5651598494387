"""The grammar of an answer: which arguments and JSON documents it permits."""

import json
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher

from kvshare.conversation.chat import (
    Chat,
    ToolChoice,
    ToolUse,
)
from kvshare.conversation.grammar import grammar_of
from kvshare.conversation.tools import ToolFormat
from kvshare.errors import RequestError
from tests.kvshare.conversation.answers import CHAT, tool
from tests.kvshare.conversation.vocabularies import (
    HERMES,
    LLAMA3,
    MISTRAL,
    REQUIRED,
    SCHEMA,
    accepts,
    written,
)


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
        with pytest.raises(RequestError, match="function 'weather' are not an object") as refusal:
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


def test_names_that_json_escapes() -> None:
    """Names of tools and values are quoted for JSON and for the grammar."""
    name, value = 'a"b\\c/ü', 'x"\\\n/y'
    schema = {"type": "object", "properties": {name: {"enum": [value]}}, "required": [name]}
    chat = Chat((), (tool(name, schema),), ToolChoice(ToolUse.REQUIRED))
    arguments = json.dumps({name: value}, ensure_ascii=False)
    call = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": {arguments}}}'
    assert accepts(chat, LLAMA3, call)
