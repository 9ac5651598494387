"""The grammar that an answer must follow: the requested JSON schema, or tool calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvshare.conversation.call_grammar import CallGrammar, call_grammar, is_strict
from kvshare.conversation.chat import Chat, ToolUse
from kvshare.conversation.lark import Grammar, LarkGrammar
from kvshare.conversation.tools import ToolFormat
from kvshare.errors import RequestError

_NOTHING: Mapping[str, int] = {}


def grammar_of(
    chat: Chat, fmt: ToolFormat, *, added_tokens: Mapping[str, int] = _NOTHING, reasons: bool = False
) -> Grammar | None:
    """
    The grammar of answers to `chat`; None if an answer may be any text.

    There is one if the chat has a schema for its answer, if a tool must be called, or if a strict tool may
    be. `added_tokens`: the tokenizer's, id by text. `reasons`: the prompt ends inside `<think>`.

    Raises:  RequestError if the chat does not have the tool that must be called
    """
    tools = _callable_tools(chat)
    must_call = bool(tools) and chat.tool_choice.use is ToolUse.REQUIRED
    if not must_call and chat.answer_schema is None and not any(map(is_strict, tools)):
        return None
    schema = None if must_call else chat.answer_schema
    lark = LarkGrammar(added_tokens)
    reasoning = _reasoning(lark, reasons=reasons)
    answers = []
    if schema is not None:
        answers.append(lark.json(schema or {"type": "object"}))
    if tools:
        several = chat.parallel_tool_calls and chat.tool_choice.name is None  # a named tool is called once
        calls = call_grammar(lark, fmt, tools, parallel=several)
        any_text = schema is None and not must_call
        answers += _free_text_or(lark, calls) if any_text else [_calls_only(lark, calls)]
    return lark.start(reasoning + lark.rule(" | ".join(answers)))


def _callable_tools(chat: Chat) -> Sequence[Mapping[str, Any]]:
    if not chat.may_call:
        return ()
    name = chat.tool_choice.name
    if name is None:
        return chat.tools
    tools = [tool for tool in chat.tools if tool["function"]["name"] == name]
    if not tools:
        names = ", ".join(repr(tool["function"]["name"]) for tool in chat.tools)
        message = f"'tool_choice' names the function {name!r}; 'tools' has {names}."
        raise RequestError(message, param="tool_choice", quoted=[repr(name), names])
    return tools


def _reasoning(lark: LarkGrammar, *, reasons: bool) -> str:
    """The reasoning before an answer, of models that have a token for it or have begun with it."""
    if not reasons and not lark.is_token("<think>"):
        return ""
    end = rf"{lark.text_until('</think>')} /\s{{0,2}}/"
    return f"{end} " if reasons else f"({lark.literal('<think>')} {end})? "


def _calls_only(lark: LarkGrammar, calls: CallGrammar) -> str:
    return f"{lark.literal(calls.marker)} {calls.rest}" if calls.marker else calls.rest


def _free_text_or(lark: LarkGrammar, calls: CallGrammar) -> list[str]:
    """Any text, with calls at its end. Calls without a marker are the whole answer instead."""
    if not calls.marker:
        return [lark.text_without(calls.excluded, first_not="{"), calls.rest]
    text = lark.text_without(calls.excluded)
    return [text, f"{lark.text_until(calls.marker, without=calls.excluded)} {calls.rest}"]
