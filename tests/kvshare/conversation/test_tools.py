"""What a template says of tools, and the system block where it says nothing."""

import json
from dataclasses import replace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from kvshare.conversation.chat import CallArguments, CallBegins, Chat, ToolChoice, ToolUse
from kvshare.conversation.parser import parser_for
from kvshare.conversation.tools import (
    ToolFormat,
    forms_for_template,
    takes_tools,
    tool_format,
    with_tool_block,
)
from kvshare.demo import MODEL_PATH
from tests.kvshare.conversation.answers import CHAT, TOOLS

PLAIN = "{% for message in messages %}{{ message.content }} - a chat without tools{% endfor %}"
HERMES = "{% if tools %}{{ tools | tojson }}{% endif %}{{ '<tool_call>' }}"
XML = "{% for tool in tools %}{% continue %}{% endfor %}<tool_call><function=f><parameter=p>"
LLAMA3 = (
    "{% if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}{% if tools is not none %}"
    '{{ \'Respond in the format {"name": function name, "parameters": dictionary}.\' }}{% endif %}'
)
LLAMA3_TAG = "{% if tools is not none %}{{ '<|python_tag|>' }}{% endif %}"
MISTRAL = (
    "{% if tools is not none %}{{ '[AVAILABLE_TOOLS]' }}{% endif %}{% for message in messages %}"
    "{% for call in message.tool_calls or [] %}{% if call.id | length != 9 %}{{ raise_exception('length') }}"
    "{% endif %}{{ '[TOOL_CALLS]' }}{% endfor %}{% endfor %}"
)
GENERATION = "{% generation %}{{ tools }}{% endgeneration %}"  # a statement that only transformers knows

CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Genève"}}}
HISTORY: tuple[dict[str, Any], ...] = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How is it?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL | {"id": "aBcDe1234"}]},
    {"role": "tool", "content": "12 °C", "tool_call_id": "call_1", "name": "weather"},
    {"role": "tool", "content": "rain", "tool_call_id": "aBcDe1234", "name": "weather"},
    {"role": "assistant", "content": "Wet."},
)


@pytest.mark.parametrize(
    ("template", "fmt", "takes"),
    [
        (None, ToolFormat.HERMES, False),
        ("", ToolFormat.HERMES, False),
        (PLAIN, ToolFormat.HERMES, False),
        (HERMES, ToolFormat.HERMES, True),
        (HERMES + "<|python_tag|>", ToolFormat.HERMES, True),
        (XML, ToolFormat.QWEN_XML, True),
        (LLAMA3, ToolFormat.LLAMA3_JSON, True),
        (LLAMA3_TAG, ToolFormat.LLAMA3_JSON, True),
        (MISTRAL, ToolFormat.MISTRAL, True),
        (GENERATION, ToolFormat.HERMES, True),
        ({"default": PLAIN, "tool_use": XML}, ToolFormat.QWEN_XML, True),
        ({"default": MISTRAL}, ToolFormat.MISTRAL, True),
        ({"rag": MISTRAL}, ToolFormat.HERMES, False),
    ],
)
def test_what_a_template_says(template: str | dict[str, str] | None, fmt: ToolFormat, takes: bool) -> None:
    """Its text shows the format of calls; whether it takes tools, the variables that it reads."""
    assert tool_format(template) is fmt
    assert takes_tools(template) is takes


def test_the_block_is_the_documented_one() -> None:
    """Tools stand in it as they came, one in a line."""
    system, user = with_tool_block(CHAT).chat.messages
    assert user == CHAT.messages[0]
    assert system["role"] == "system"
    assert system["content"] == (
        "# Tools\n\n"
        "You may call one or more functions to help with the user's request. Each line between <tools> and "
        "</tools> describes one function as JSON:\n"
        f"<tools>\n{json.dumps(TOOLS[0])}\n{json.dumps(TOOLS[1])}\n</tools>\n\n"
        "To call a function, write a JSON object with its name and its arguments between <tool_call> and "
        "</tool_call>, once for each call:\n"
        '<tool_call>\n{"name": <name of the function>, "arguments": <JSON object of its arguments>}\n'
        "</tool_call>\n\nWhat a function returns follows between <tool_response> and </tool_response>."
    )


def test_the_block_follows_the_system_message() -> None:
    """There is one system message, also where it was empty."""
    block = with_tool_block(CHAT).chat.messages[0]["content"]
    for text, expected in (("Be brief.", f"Be brief.\n\n{block}"), ("", block)):
        chat = replace(CHAT, messages=({"role": "system", "content": text}, *CHAT.messages))
        assert with_tool_block(chat).chat.messages == (
            {"role": "system", "content": expected},
            *CHAT.messages,
        )


def test_history_becomes_text() -> None:
    """Calls are the assistant's text, what tools returned is one message of the user."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Genève"}}\n</tool_call>'
    assert with_tool_block(Chat(HISTORY)).chat.messages[2:] == (
        {"role": "assistant", "content": f"I look.\n{call}\n{call}"},
        {
            "role": "user",
            "content": "<tool_response>\n12 °C\n</tool_response>\n<tool_response>\nrain\n</tool_response>",
        },
        {"role": "assistant", "content": "Wet."},
    )


def test_calls_in_history_are_read_as_they_were_written() -> None:
    """The text of a call is what the model is asked to write: the parser reads the same call from it."""
    text = with_tool_block(Chat(HISTORY)).chat.messages[2]["content"]
    parser = parser_for(CHAT, ToolFormat.HERMES)
    parts = [*parser.add(text), *parser.end()]
    assert [part.name for part in parts if isinstance(part, CallBegins)] == ["weather", "weather"]
    arguments = [json.loads(part.text) for part in parts if isinstance(part, CallArguments)]
    assert arguments == [{"city": "Genève"}] * 2


def test_without_a_call_to_come_there_is_no_block() -> None:
    """No tools, or none that may be called: only the history changes."""
    assert with_tool_block(Chat(HISTORY[:2], TOOLS, ToolChoice(ToolUse.NONE))).chat.messages == HISTORY[:2]
    assert with_tool_block(Chat(HISTORY[:2])).chat.messages == HISTORY[:2]


def test_any_template_renders_a_chat_with_tools() -> None:
    """The demo model's template knows three roles and no tools."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL_PATH)
    assert not takes_tools(tokenizer.chat_template)
    chat = next(forms_for_template(Chat(HISTORY, TOOLS), tokenizer.chat_template)).chat
    text = tokenizer.apply_chat_template([dict(message) for message in chat.messages], tokenize=False)
    assert isinstance(text, str)
    for shown in ("Be brief.", json.dumps(TOOLS[0]), "<tool_response>\nrain\n</tool_response>"):
        assert shown in text


def test_a_template_that_takes_tools_gets_them() -> None:
    """The chat is not changed for it."""
    chat = Chat(HISTORY, TOOLS)
    assert next(forms_for_template(chat, HERMES)).chat is chat


def test_mistral_gets_ids_of_nine_characters() -> None:
    """A result goes on naming its call, and an id that fits stays as it is."""
    messages = next(forms_for_template(Chat(HISTORY, TOOLS), MISTRAL)).chat.messages
    first, second = (call["id"] for call in messages[2]["tool_calls"])
    assert len(first) == 9
    assert first.isalnum()
    assert second == "aBcDe1234"
    assert [messages[3]["tool_call_id"], messages[4]["tool_call_id"]] == [first, second]
    assert messages[2]["tool_calls"][0]["function"] == CALL["function"]
    assert HISTORY[2]["tool_calls"][0]["id"] == "call_1"
