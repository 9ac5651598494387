"""Detects the format of tool calls in a chat template, and adapts chats to templates without tools."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
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


class ToolFormat(StrEnum):
    """How a model writes tool calls in its answer."""

    HERMES = "hermes"  # <tool_call>{"name": .., "arguments": {..}}</tool_call>
    LLAMA3_JSON = "llama3_json"  # {"name": .., "parameters": {..}}, the whole answer
    MISTRAL = "mistral"  # [TOOL_CALLS][{"name": .., "arguments": {..}}], or [TOOL_CALLS]name[ARGS]{..}
    QWEN_XML = "qwen_xml"  # <tool_call><function=name><parameter=key>value</parameter></function></tool_call>


def tool_format(chat_template: ChatTemplate) -> ToolFormat:
    """The format in which the template writes earlier calls; HERMES if it has no known format."""
    text = _for_tools(chat_template)
    if "<function=" in text and "<parameter=" in text:
        return ToolFormat.QWEN_XML
    if "[TOOL_CALLS]" in text:
        return ToolFormat.MISTRAL
    if "<tool_call>" not in text and ("<|python_tag|>" in text or '{"name": function name' in text):
        return ToolFormat.LLAMA3_JSON
    return ToolFormat.HERMES


def takes_tools(chat_template: ChatTemplate) -> bool:
    """Whether the template puts `tools` into the prompt."""
    text = _for_tools(chat_template)
    try:
        return "tools" in meta.find_undeclared_variables(_PARSER.parse(text))
    except TemplateSyntaxError:  # statements that only transformers knows, such as `{% generation %}`
        return re.search(r"\btools\b", text) is not None


def fit_to_template(chat: Chat, chat_template: ChatTemplate) -> Chat:
    """The chat in a form that this template can render."""
    if not takes_tools(chat_template):
        return with_tool_block(chat)
    if tool_format(chat_template) is ToolFormat.MISTRAL:
        return replace(chat, messages=tuple(map(_with_short_ids, chat.messages)))
    return chat


def with_tool_block(chat: Chat) -> Chat:
    """
    The same chat for a template that takes no tools, with messages of system, user and assistant only.

    If the answer may call tools, the system message ends with their description. Earlier calls become text of
    the assistant, and results of tools become text of the user.
    """
    messages = list(_as_text(chat.messages))
    if chat.may_call:
        lines = "\n".join(_json(tool) for tool in chat.tools)
        messages = _with_system(messages, _TOOL_BLOCK.format(tools=lines))
    return replace(chat, messages=tuple(messages))


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
    """The template that Hugging Face uses for chats with tools."""
    if isinstance(chat_template, Mapping):
        return chat_template.get("tool_use") or chat_template.get("default") or ""
    return chat_template or ""


def _as_text(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for from_tools, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if from_tools:
            results = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            yield {"role": "user", "content": "\n".join(results)}
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


def _with_system(messages: Sequence[Mapping[str, Any]], block: str) -> list[Mapping[str, Any]]:
    if not messages or messages[0]["role"] != "system":
        return [{"role": "system", "content": block}, *messages]
    first = messages[0]
    content = f"{first['content']}\n\n{block}" if first["content"] else block
    return [{**first, "content": content}, *messages[1:]]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
