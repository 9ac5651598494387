"""
The grammar that an answer must follow: the requested JSON schema, or tool calls in the model's format.

`kvshare.conversation.formats` reads the calls that follow it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvshare.conversation.chat import Chat, ToolUse
from kvshare.conversation.formats import READERS
from kvshare.conversation.lark import Grammar, LarkGrammar, any_of, quoted
from kvshare.conversation.parameters import Parameters, takes_nothing
from kvshare.conversation.tools import ToolFormat
from kvshare.errors import RequestError

_NOTHING: Mapping[str, int] = {}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def may_have_grammar(chat: Chat) -> bool:
    """Return false if `grammar_of` has nothing to read in a chat: its answer may be any text."""
    return chat.answer_schema is not None or chat.may_call


def grammar_of(
    chat: Chat, fmt: ToolFormat, *, added_tokens: Mapping[str, int] = _NOTHING, in_reasoning: bool = False
) -> Grammar | None:
    """
    The grammar of answers to `chat`; None if an answer may be any text.

    There is one if the chat has a schema for its answer, if a tool must be called, or if a strict tool may
    be. `added_tokens`: the tokenizer's, id by text. `in_reasoning`: the prompt ends inside `<think>`.

    Raises:  RequestError if the chat does not have the tool that must be called, or if a tool's arguments
             would not be an object; UnsupportedFormatError for a schema that no answer can follow
    """
    if not may_have_grammar(chat):
        return None
    tools = _callable_tools(chat)
    must_call = bool(tools) and chat.tool_choice.use is ToolUse.REQUIRED
    if not must_call and chat.answer_schema is None and not any(map(_is_strict, tools)):
        return None
    _check_objects(tools)
    schema = None if must_call else chat.answer_schema
    lark = LarkGrammar(added_tokens, param="tools" if schema is None else chat.answer_param)
    reasoning = _reasoning(lark, in_reasoning=in_reasoning)
    answers = []
    if schema is not None:
        answers.append(lark.json(schema or {"type": "object"}))
    if tools:
        several = chat.parallel_tool_calls and chat.tool_choice.name is None  # a named tool is called once
        calls = _call_grammar(lark, fmt, tools, parallel=several)
        if schema is None and not must_call:
            answers += _free_text_or(lark, calls)
        else:
            answers.append(f"{lark.literal(calls.marker)} {calls.rest}" if calls.marker else calls.rest)
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


def _check_objects(tools: Sequence[Mapping[str, Any]]) -> None:
    """Raises RequestError for a tool whose arguments are to be anything but an object, as OpenAI does."""
    for tool in tools:
        given = (tool["function"].get("parameters") or {}).get("type")
        if given is not None and "object" not in (given if isinstance(given, list) else [given]):
            name = _name(tool)
            message = (
                f"'tools': the parameters of the function {name!r} are not an object; expected type 'object'."
            )
            raise RequestError(message, param="tools", quoted=[repr(name)])


def _reasoning(lark: LarkGrammar, *, in_reasoning: bool) -> str:
    """Return the reasoning before an answer, of models that have a token for it or have begun with it."""
    if not in_reasoning and not lark.is_token("<think>"):
        return ""
    end = rf"{lark.text_until('</think>')} /\s{{0,2}}/"
    return f"{end} " if in_reasoning else f"({lark.literal('<think>')} {end})? "


def _free_text_or(lark: LarkGrammar, calls: "CallGrammar") -> list[str]:
    """Any text, with calls at its end. Calls without a marker are the whole answer instead."""
    if not calls.marker:
        return [lark.text_without(calls.excluded, first_not="{"), calls.rest]
    text = lark.text_without(calls.excluded)
    return [text, f"{lark.text_until(calls.marker, without=calls.excluded)} {calls.rest}"]


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """One call, or more where parallel calls are allowed."""

    marker: str  # the text before the first call; empty: none
    rest: str  # the expression of what follows the marker
    excluded: tuple[str, ...]  # text before calls must not contain these: they would be read as calls


def _call_grammar(
    lark: LarkGrammar, fmt: ToolFormat, tools: Sequence[Mapping[str, Any]], *, parallel: bool
) -> CallGrammar:
    """The grammar of calls of these tools, with arguments that follow their schemas."""
    markers = READERS[fmt].markers
    marker = markers[0]
    match fmt:
        case ToolFormat.HERMES:
            objects = any_of(_objects(lark, tools, "arguments"))
            calls = _tagged(lark, marker, f'"\\n" {objects} "\\n"', parallel)
        case ToolFormat.LLAMA3_JSON:
            marker = ""
            calls = _repeated(any_of(_objects(lark, tools, "parameters")), quoted("; "), parallel)
        case ToolFormat.MISTRAL if lark.is_token("[ARGS]"):
            args = lark.literal("[ARGS]")
            named = [f"{quoted(_name(tool))} {args} {_arguments(lark, tool)}" for tool in tools]
            calls = _repeated(lark.rule(any_of(named)), lark.literal(marker), parallel)
        case ToolFormat.MISTRAL:
            objects = _repeated(any_of(_objects(lark, tools, "arguments")), quoted(", "), parallel)
            calls = f'" "? "[" {objects} "]"'
        case ToolFormat.QWEN_XML:
            value = lark.rule(f'{lark.text_until("</parameter>")} "\\n"')
            functions = [
                " ".join([quoted(f"\n<function={_name(tool)}>\n"), *_xml_parameters(lark, tool, value)])
                for tool in tools
            ]
            calls = _tagged(lark, marker, f'{any_of(functions)} "</function>\\n"', parallel)
    return CallGrammar(marker, calls, markers)


def _is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _tagged(lark: LarkGrammar, marker: str, inner: str, parallel: bool) -> str:
    """Calls that each end with a tag; a line break and the marker come before a further one."""
    call = lark.rule(f"{inner} {lark.literal('</tool_call>')}")
    return _repeated(call, f'"\\n" {lark.literal(marker)}', parallel)


def _objects(lark: LarkGrammar, tools: Sequence[Mapping[str, Any]], key: str) -> Iterator[str]:
    for tool in tools:
        opening = f'{{"name": {quoted(_name(tool))}, "{key}": '
        yield lark.rule(f'{quoted(opening)} {_arguments(lark, tool)} "}}"')


def _arguments(lark: LarkGrammar, tool: Mapping[str, Any]) -> str:
    """Arguments are an object, also if their schema has no type."""
    schema = tool["function"].get("parameters")
    schema = _NO_ARGUMENTS if takes_nothing(schema) else {**schema, "type": "object"}
    return lark.json(schema, lenient=not _is_strict(tool))


def _xml_parameters(lark: LarkGrammar, tool: Mapping[str, Any], text: str) -> Iterator[str]:
    """Yield each parameter once, in the schema's order. `text`: the expression of text and closing tag."""
    parameters = Parameters(tool)
    end = quoted("\n</parameter>\n")
    for name in parameters.names:
        types = parameters.types(name)
        if strings := parameters.strings(name):
            value = f"{any_of(map(quoted, strings))} {end}"
        elif not types or "string" in types:
            value = text
        else:
            value = f"{lark.json(parameters.schema(name), lenient=not _is_strict(tool))} {end}"
        parameter = lark.rule(f"{quoted(f'<parameter={name}>' + chr(10))} {value}")
        yield parameter if name in parameters.required else f"{parameter}?"


def _repeated(call: str, separator: str, parallel: bool) -> str:
    return f"{call} ({separator} {call})*" if parallel else call


def _name(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name
