"""The Responses and the Messages API: the real command, the real model, the real clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import jsonschema
import openai
import pytest
from anthropic.resources import Messages
from anthropic.types import TextBlock, ToolUseBlock
from openai.resources.responses import Responses
from openai.types.responses import ResponseFunctionToolCall
from pydantic import BaseModel

from tests.conftest import Server
from tests.weather import PARAMETERS

MODEL = "kvshare-demo"
QUESTION = "What is the weather in Paris?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
GREEDY: dict[str, Any] = {"extra_body": {"temperature": 0}}  # the anthropic client has no parameter for it


class Form(BaseModel):
    """What an answer must look like."""

    pages: Literal[1, 2, 3]
    kind: Literal["letter", "form"]


@pytest.fixture
def responses(server: Server) -> Iterator[Responses]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key("ann"), max_retries=0) as client:
        yield client.responses


@pytest.fixture
def messages(server: Server) -> Iterator[Messages]:
    with anthropic.Anthropic(base_url=server.url, api_key=server.key("ann"), max_retries=0) as client:
        yield client.messages


def text_of(block: object) -> str:
    assert isinstance(block, TextBlock)
    return block.text


def test_tools_by_responses(responses: Responses) -> None:
    """Two rounds: arguments follow the schema, streamed as whole; the output sent back is answered."""
    tool = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
    options: dict[str, Any] = {"model": MODEL, "tools": [tool], "temperature": 0, "max_output_tokens": 120}
    forced = {**options, "tool_choice": "required", "parallel_tool_calls": False}
    first = responses.create(input=MESSAGES, **forced)
    with responses.stream(input=MESSAGES, **forced) as stream:
        streamed = stream.get_final_response()
    (call,), (other,) = first.output, streamed.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert isinstance(other, ResponseFunctionToolCall)
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)
    assert (call.name, call.arguments) == (other.name, other.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    turns: list[Any] = [
        *MESSAGES,
        call,
        result,
    ]  # the client takes its own items back, its types do not say so
    second = responses.create(input=turns, **{**options, "tool_choice": "none"})
    assert second.output_text


def test_tools_by_messages(messages: Messages) -> None:
    """The same with tool_use and tool_result blocks."""
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    options: dict[str, Any] = {"model": MODEL, "tools": [tool], "max_tokens": 120, **GREEDY}
    forced = {**options, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    first = messages.create(messages=MESSAGES, **forced)
    with messages.stream(messages=MESSAGES, **forced) as stream:
        streamed = stream.get_final_message()
    assert first.stop_reason == streamed.stop_reason == "tool_use"
    (use,), (other,) = first.content, streamed.content
    assert isinstance(use, ToolUseBlock)
    assert isinstance(other, ToolUseBlock)
    jsonschema.validate(use.input, PARAMETERS)
    assert (use.name, use.input) == (other.name, other.input)
    turns: list[Any] = [
        *MESSAGES,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"}]},
    ]
    second = messages.create(messages=turns, **{**options, "tool_choice": {"type": "none"}})
    assert text_of(second.content[0])
    assert second.stop_reason in ("end_turn", "max_tokens")


def test_schemas(responses: Responses, messages: Messages) -> None:
    """Both clients get an object of the class that they ask for."""
    response = responses.parse(model=MODEL, input=QUESTION, text_format=Form, max_output_tokens=120)
    assert isinstance(response.output_parsed, Form)
    message = messages.parse(model=MODEL, messages=MESSAGES, output_format=Form, max_tokens=120)
    assert isinstance(message.parsed_output, Form)


def test_three_apis_share_one_prompt(server: Server, responses: Responses, messages: Messages) -> None:
    """The same conversation is the same prompt by each API: the later ones reuse it, and say the same."""
    system, user = "You answer shortly.", "Which of the two books is the longer one? " * 20
    options: dict[str, Any] = {"model": MODEL, "temperature": 0}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key("ann")) as client:
        chat = client.chat.completions.create(
            messages=[{"role": "system", "content": system}, {"role": "user", "content": user}],
            max_tokens=8,
            **options,
        )
    server.settle()
    response = responses.create(instructions=system, input=user, max_output_tokens=8, **options)
    server.settle()
    asked: dict[str, Any] = {"system": system, "messages": [{"role": "user", "content": user}]}
    message = messages.create(model=MODEL, **asked, max_tokens=8, **GREEDY)
    assert chat.choices[0].message.content == response.output_text == text_of(message.content[0])
    assert chat.usage is not None
    assert response.usage is not None
    num_tokens = chat.usage.prompt_tokens
    assert response.usage.input_tokens == num_tokens
    assert response.usage.input_tokens_details.cached_tokens == num_tokens - 1
    assert message.usage.cache_read_input_tokens == num_tokens - 1
    assert message.usage.input_tokens == 1
    assert messages.count_tokens(model=MODEL, **asked).input_tokens == num_tokens


def test_a_stop_sequence_is_named(messages: Messages) -> None:
    """The engine says which of the stop strings it met, and shows nothing of it."""
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 40, **GREEDY}
    text = text_of(messages.create(**options).content[0])
    stop = text[3:6]
    stopped = messages.create(**options, stop_sequences=["\u2603", stop])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert text_of(stopped.content[0]) == text[: text.index(stop)]


def test_an_answer_that_is_begun(messages: Messages) -> None:
    """The prompt ends with the assistant's own words, so it has no second beginning of a message."""
    begun: list[Any] = [*MESSAGES, {"role": "assistant", "content": "The weather is"}]
    answer = messages.create(model=MODEL, messages=begun, max_tokens=2)
    assert text_of(answer.content[0])
    count = messages.count_tokens(model=MODEL, messages=begun).input_tokens
    closed = messages.count_tokens(model=MODEL, messages=[*begun, {"role": "user", "content": "?"}])
    assert count < closed.input_tokens
