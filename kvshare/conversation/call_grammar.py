"""The grammar of tool calls in each format. `kvshare.conversation.formats` reads what follows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvshare.conversation.formats.json_readers import HermesReader, Llama3Reader, MistralReader
from kvshare.conversation.formats.qwen_xml import QwenXmlReader
from kvshare.conversation.lark import LarkGrammar, any_of, quoted
from kvshare.conversation.parameters import Parameters
from kvshare.conversation.tools import ToolFormat

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """One call, or more where parallel calls are allowed."""

    marker: str  # the text before the first call; empty: none
    rest: str  # the expression of what follows the marker
    excluded: tuple[str, ...]  # text before calls must not contain these: they would be read as calls


def call_grammar(
    lark: LarkGrammar, fmt: ToolFormat, tools: Sequence[Mapping[str, Any]], *, parallel: bool
) -> CallGrammar:
    """The grammar of calls of these tools, with arguments that follow their schemas."""
    match fmt:
        case ToolFormat.HERMES:
            return _hermes(lark, tools, parallel)
        case ToolFormat.LLAMA3_JSON:
            calls = _repeated(any_of(_objects(lark, tools, "parameters")), quoted("; "), parallel)
            return CallGrammar("", calls, Llama3Reader.markers)
        case ToolFormat.MISTRAL:
            return _mistral(lark, tools, parallel)
        case ToolFormat.QWEN_XML:
            return _qwen_xml(lark, tools, parallel)


def is_strict(tool: Mapping[str, Any]) -> bool:
    return tool["function"].get("strict") is True


def _hermes(lark: LarkGrammar, tools: Sequence[Mapping[str, Any]], parallel: bool) -> CallGrammar:
    (marker,) = HermesReader.markers
    objects = any_of(_objects(lark, tools, "arguments"))
    return _tagged(lark, marker, f'"\\n" {objects} "\\n"', parallel, HermesReader.markers)


def _qwen_xml(lark: LarkGrammar, tools: Sequence[Mapping[str, Any]], parallel: bool) -> CallGrammar:
    marker = QwenXmlReader.markers[0]
    value = lark.rule(f'{lark.text_until("</parameter>")} "\\n"')
    functions = [
        " ".join([quoted(f"\n<function={_name(tool)}>\n"), *_xml_parameters(lark, tool, value)])
        for tool in tools
    ]
    return _tagged(lark, marker, f'{any_of(functions)} "</function>\\n"', parallel, QwenXmlReader.markers)


def _tagged(
    lark: LarkGrammar, marker: str, inner: str, parallel: bool, excluded: tuple[str, ...]
) -> CallGrammar:
    call = lark.rule(f"{inner} {lark.literal('</tool_call>')}")
    more = f' ("\\n" {lark.literal(marker)} {call})*' if parallel else ""
    return CallGrammar(marker, call + more, excluded)


def _mistral(lark: LarkGrammar, tools: Sequence[Mapping[str, Any]], parallel: bool) -> CallGrammar:
    """`name[ARGS]{..}` if the tokenizer has a token for `[ARGS]`, else a JSON list of calls."""
    (marker,) = MistralReader.markers
    if not lark.is_token("[ARGS]"):
        calls = _repeated(any_of(_objects(lark, tools, "arguments")), quoted(", "), parallel)
        return CallGrammar(marker, f'" "? "[" {calls} "]"', MistralReader.markers)
    named = [f"{quoted(_name(tool))} {lark.literal('[ARGS]')} {_arguments(lark, tool)}" for tool in tools]
    call = lark.rule(any_of(named))
    more = f" ({lark.literal(marker)} {call})*" if parallel else ""
    return CallGrammar(marker, call + more, MistralReader.markers)


def _objects(lark: LarkGrammar, tools: Sequence[Mapping[str, Any]], key: str) -> Iterator[str]:
    for tool in tools:
        opening = f'{{"name": {quoted(_name(tool))}, "{key}": '
        yield lark.rule(f'{quoted(opening)} {_arguments(lark, tool)} "}}"')


def _arguments(lark: LarkGrammar, tool: Mapping[str, Any]) -> str:
    """Arguments are an object, also if their schema has no type."""
    schema = tool["function"].get("parameters") or _NO_ARGUMENTS
    return lark.json({"type": "object", **schema}, lenient=not is_strict(tool))


def _xml_parameters(lark: LarkGrammar, tool: Mapping[str, Any], text: str) -> Iterator[str]:
    """Each parameter once, in the schema's order. `text`: the expression of any text and the closing tag."""
    parameters = Parameters(tool)
    end = quoted("\n</parameter>\n")
    for name in parameters.names:
        types = parameters.types(name)
        if strings := parameters.strings(name):
            value = f"{any_of(map(quoted, strings))} {end}"
        elif not types or "string" in types:
            value = text
        else:
            value = f"{lark.json(parameters.schema(name), lenient=not is_strict(tool))} {end}"
        parameter = lark.rule(f"{quoted(f'<parameter={name}>' + chr(10))} {value}")
        yield parameter if name in parameters.required else f"{parameter}?"


def _repeated(call: str, separator: str, parallel: bool) -> str:
    return f"{call} ({separator} {call})*" if parallel else call


def _name(tool: Mapping[str, Any]) -> str:
    name: str = tool["function"]["name"]
    return name
