"""Grammars over a small vocabulary, with and without tokens for markers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from kvshare.conversation.chat import (
    Chat,
    ToolChoice,
    ToolUse,
)
from kvshare.conversation.grammar import grammar_of
from kvshare.conversation.lark import Grammar
from kvshare.conversation.tools import ToolFormat
from kvshare.demo import MODEL_PATH
from tests.kvshare.conversation.answers import CHAT

HERMES, LLAMA3, MISTRAL, XML = ToolFormat
REQUIRED = replace(CHAT, tool_choice=ToolChoice(ToolUse.REQUIRED))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")
ADDED = {True: "with tokens for markers", False: "markers as text"}
CALLS = {
    HERMES: '<tool_call>\n{"name": "weather", "arguments": ARGUMENTS}\n</tool_call>',
    LLAMA3: '{"name": "weather", "parameters": ARGUMENTS}',
    MISTRAL: '[TOOL_CALLS][{"name": "weather", "arguments": ARGUMENTS}]',
    XML: "<tool_call>\n<function=weather>\nARGUMENTS</function>\n</tool_call>",
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
