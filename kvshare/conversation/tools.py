"""Detects the format of tool calls in a chat template, and adapts chats to templates without tools."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, meta

from kvshare.conversation.chat import Chat

ChatTemplate = str | Mapping[str, str] | None  # Hugging Face: one template, several by name, or none

_PARSER = Environment(extensions=["jinja2.ext.loopcontrols"])  # only parses: nothing is rendered with it

# Describes tools to a model whose template takes none.
_TOOL_BLOCK = Path(__file__).with_name("tool_block.txt").read_text(encoding="utf-8").rstrip("\n")

_FROM_TOOLS = "from_tools"  # marks a message that was results of tools


class ToolFormat(StrEnum):
    """The form in which a model writes tool calls in its answer."""

    HERMES = "hermes"  # <tool_call>{"name": .., "arguments": {..}}</tool_call>
    LLAMA3_JSON = "llama3_json"  # {"name": .., "parameters": {..}}, the whole answer
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name": .., "arguments": {..}}], or [TOOL_CALLS]name[ARGS]{..}
    QWEN_XML = "qwen_xml"  # <tool_call><function=name><parameter=key>value</parameter></function></tool_call>


def tool_format(chat_template: ChatTemplate) -> ToolFormat:
    """Return the format in which the template writes earlier calls; HERMES if it has no known format."""
    text = _for_tools(chat_template)
    if "<function=" in text and "<parameter=" in text:
        return ToolFormat.QWEN_XML
    if "[TOOL_CALLS]" in text:
        return ToolFormat.MISTRAL
    if "<tool_call>" not in text and ("<|python_tag|>" in text or '{"name": function name' in text):
        return ToolFormat.LLAMA3_JSON
    return ToolFormat.HERMES


def takes_tools(chat_template: ChatTemplate) -> bool:
    return _reads_tools(_for_tools(chat_template))


@lru_cache(maxsize=16)
def _reads_tools(text: str) -> bool:
    """Parsing takes milliseconds, and each request asks."""
    try:
        return "tools" in meta.find_undeclared_variables(_PARSER.parse(text))
    except TemplateSyntaxError:  # statements that only transformers knows, such as `{% generation %}`
        return re.search(r"\btools\b", text) is not None


@dataclass(frozen=True, slots=True, eq=False)
class TemplateForm:
    """A chat as a template may take it. `shows`: what its prompt has, unless the template drops it."""

    chat: Chat
    shows: tuple[str, ...] = ()


def forms_for_template(chat: Chat, chat_template: ChatTemplate) -> Iterator[TemplateForm]:
    """
    Yield the chat in the forms that this template may take, the most usual first.

    A template may reject or drop a system message, tool messages, or two messages of a user in a row, though
    the client sent none: it is the description of tools that became a system message, and results of tools
    that became messages of the user. So further forms put the description into the first message of the user,
    and join results with the user's next message.
    """
    has_tools = chat.may_call or any(map(_is_of_tools, chat.messages))
    if takes_tools(chat_template):
        fmt = tool_format(chat_template)
        if fmt is ToolFormat.MISTRAL:
            chat = replace(chat, messages=tuple(map(_with_short_ids, chat.messages)))
        yield TemplateForm(chat, tuple(_telling_words(chat.messages)))
        if fmt is not ToolFormat.HERMES:  # the description asks for calls in this format
            return
    else:
        yield with_tool_block(chat)
    if has_tools:
        if takes_tools(chat_template):
            yield with_tool_block(chat)
        yield with_tool_block(chat, in_turns=True)


def with_tool_block(chat: Chat, *, in_turns: bool = False) -> TemplateForm:
    """
    Return the same chat for a template that takes no tools, with messages of system, user and assistant only.

    If the answer may call tools, the system message ends with their description. Earlier calls become text of
    the assistant, and results of tools become text of the user.
    `in_turns`: the first message of the user begins with the description instead, and results of tools are
    one message with the user's next.
    """
    messages = list(_as_text(chat.messages))
    if in_turns:
        messages = list(_joined_results(messages))
    plain = [{key: value for key, value in message.items() if key != _FROM_TOOLS} for message in messages]
    if not chat.may_call:
        return TemplateForm(replace(chat, messages=tuple(plain), tools=()))
    block = _TOOL_BLOCK.format(tools="\n".join(_json(tool) for tool in chat.tools))
    described = (_with_user if in_turns else _with_system)(plain, block)
    return TemplateForm(replace(chat, messages=tuple(described), tools=()), (block,))


def _telling_words(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the longest word of each result of a tool: a template may write the text in JSON."""
    for message in messages:
        if message["role"] == "tool" and (words := re.findall("[A-Za-z0-9]+", message["content"])):
            yield max(words, key=len)


def _is_of_tools(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or bool(message.get("tool_calls"))


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with call ids of nine letters and digits: Mistral's templates reject others."""
    if message["role"] == "tool":
        return {**message, "tool_call_id": _short_id(message["tool_call_id"])}
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [call | {"id": _short_id(call["id"])} for call in message["tool_calls"]]}


def _short_id(call_id: str) -> str:
    """Nine letters and digits; equal ids get equal ones."""
    if re.fullmatch("[A-Za-z0-9]{9}", call_id):
        return call_id
    return sha256(call_id.encode()).hexdigest()[:9]


def _for_tools(chat_template: ChatTemplate) -> str:
    if isinstance(chat_template, Mapping):
        return chat_template.get("tool_use") or chat_template.get("default") or ""
    return chat_template or ""


def _as_text(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for from_tools, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if from_tools:
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            yield {"role": "user", "content": "\n".join(results), _FROM_TOOLS: True}
        else:
            yield from map(_with_calls_as_text, group)


def _with_calls_as_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if not message.get("tool_calls"):
        return message
    texts = [message["content"]] if message["content"] else []
    for call in message["tool_calls"]:
        shown = {key: call["function"][key] for key in ("name", "arguments")}
        texts.append(f"<tool_call>\n{_json(shown)}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return rest | {"content": "\n".join(texts)}


def _joined_results(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Results of tools and the user's messages next to them are one message."""
    for from_user, group in groupby(messages, key=lambda message: message["role"] == "user"):
        neighbours = list(group)
        if from_user and any(_FROM_TOOLS in message for message in neighbours):
            yield {"role": "user", "content": "\n".join(message["content"] for message in neighbours)}
        else:
            yield from neighbours


def _with_user(messages: Sequence[Mapping[str, Any]], block: str) -> list[Mapping[str, Any]]:
    first = next((at for at, message in enumerate(messages) if message["role"] == "user"), None)
    if first is None:
        at = 1 if messages and messages[0]["role"] == "system" else 0
        return [*messages[:at], {"role": "user", "content": block}, *messages[at:]]
    message = messages[first]
    content = f"{block}\n\n{message['content']}" if message["content"] else block
    return [*messages[:first], {**message, "content": content}, *messages[first + 1 :]]


def _with_system(messages: Sequence[Mapping[str, Any]], block: str) -> list[Mapping[str, Any]]:
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": block}, *messages]
    first = messages[0]
    content = f"{first['content']}\n\n{block}" if first["content"] else block
    return [{**first, "content": content}, *messages[1:]]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
