"""The `anthropic` package: messages, tools, JSON, errors, counting."""

import anthropic
import pytest
from anthropic.types import CacheControlEphemeralParam, Message, MessageParam, ToolParam, ToolResultBlockParam
from common import IS_EMBEDDED, MODEL, PARAMETERS, QUESTION, URL, check_arguments

CLIENT = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0)
MESSAGES: list[MessageParam] = [{"role": "user", "content": QUESTION}]
TOOL: ToolParam = {"name": "weather", "description": "The weather of a city.", "input_schema": PARAMETERS}


def text_of(message: Message) -> str:
    block = message.content[0]
    assert block.type == "text"
    return block.text


def test_message() -> None:
    answer = CLIENT.messages.create(model=MODEL, messages=MESSAGES, system="Be short.", max_tokens=8)
    assert text_of(answer)
    assert answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 8


def test_stream() -> None:
    with CLIENT.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=8) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == text_of(final)
    assert final.usage.output_tokens == 8


def test_tools_in_two_rounds() -> None:
    first = CLIENT.messages.create(
        model=MODEL,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_tokens=64,
    )
    assert first.stop_reason == "tool_use"
    (call,) = [block for block in first.content if block.type == "tool_use"]
    check_arguments(call.input)
    result: ToolResultBlockParam = {
        "type": "tool_result",
        "tool_use_id": call.id,
        "content": "It rains, 12 C.",
    }
    second = CLIENT.messages.create(
        model=MODEL,
        messages=[
            *MESSAGES,
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result]},
        ],
        tools=[TOOL],
        tool_choice={"type": "none"},
        max_tokens=8,
    )
    assert text_of(second)


def test_parallel_calls() -> None:
    answer = CLIENT.messages.create(
        model=MODEL, messages=MESSAGES, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=160
    )
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert calls
    complete = calls if answer.stop_reason == "tool_use" else calls[:-1]
    for call in complete:
        check_arguments(call.input)


def test_streamed_call() -> None:
    with CLIENT.messages.stream(
        model=MODEL,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        max_tokens=64,
    ) as stream:
        pieces = [
            event.delta.partial_json
            for event in stream
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
        ]
        final = stream.get_final_message()
    assert len(pieces) > 1
    (call,) = [block for block in final.content if block.type == "tool_use"]
    check_arguments(call.input)


def test_blocks_as_agents_send_them() -> None:
    """System and contents as blocks with cache marks, a thought in the history, an error of a tool."""
    mark: CacheControlEphemeralParam = {"type": "ephemeral"}
    answer = CLIENT.messages.create(
        model=MODEL,
        system=[{"type": "text", "text": "Be short.", "cache_control": mark}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": QUESTION, "cache_control": mark}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "The tool may help.", "signature": "x"},
                    {
                        "type": "tool_use",
                        "id": "toolu_1",
                        "name": "weather",
                        "input": {"city": "Bern", "unit": "C"},
                    },
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": "no network",
                        "is_error": True,
                    },
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
        tools=[{**TOOL, "cache_control": mark}],
        tool_choice={"type": "none"},
        metadata={"user_id": "somebody"},
        max_tokens=8,
    )
    assert text_of(answer)


def test_count_tokens() -> None:
    counted = CLIENT.messages.count_tokens(model=MODEL, messages=MESSAGES)
    answer = CLIENT.messages.create(model=MODEL, messages=MESSAGES, max_tokens=1)
    assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)


def test_errors_have_their_classes() -> None:
    with pytest.raises(anthropic.NotFoundError):
        CLIENT.messages.create(model="nobody", messages=MESSAGES, max_tokens=1)
    with pytest.raises(anthropic.BadRequestError) as error:
        CLIENT.messages.create(model=MODEL, messages=[], max_tokens=1)
    if IS_EMBEDDED:  # vLLM has its own words there
        assert isinstance(error.value.body, dict)
        assert error.value.body["error"]["type"] == "invalid_request_error"
