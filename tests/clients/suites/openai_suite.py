"""The `openai` package: chat, tools, JSON, Responses, embeddings, errors."""

import json
from collections.abc import Sequence
from typing import cast

import openai
import pydantic
import pytest
from common import IS_EMBEDDED, MODEL, PARAMETERS, QUESTION, TOOL, URL, check_arguments
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageParam,
    ChatCompletionNamedToolChoiceParam,
)
from openai.types.responses import FunctionToolParam

CLIENT = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0)
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": QUESTION}]
TOOLS = [cast("ChatCompletionFunctionToolParam", TOOL)]
FLAT_TOOL: FunctionToolParam = {
    "type": "function",
    "name": "weather",
    "parameters": PARAMETERS,
    "strict": True,
}


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


def test_chat() -> None:
    answer = CLIENT.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=8, n=2)
    assert [choice.finish_reason for choice in answer.choices] == ["length", "length"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_stream() -> None:
    chunks = list(
        CLIENT.chat.completions.create(
            model=MODEL, messages=MESSAGES, max_tokens=8, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_tools_in_two_rounds() -> None:
    """A call is asked for, its result is sent, and an answer comes."""
    first = CLIENT.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=64,
    )
    (choice,) = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    check_arguments(json.loads(call.function.arguments))
    second = CLIENT.chat.completions.create(
        model=MODEL,
        messages=[
            *MESSAGES,
            cast("ChatCompletionAssistantMessageParam", choice.message),
            {"role": "tool", "tool_call_id": call.id, "content": "It rains, 12 C."},
        ],
        tools=TOOLS,
        tool_choice="none",
        max_tokens=8,
    )
    assert second.choices[0].message.content
    assert second.choices[0].message.tool_calls is None or second.choices[0].message.tool_calls == []


def test_parallel_calls() -> None:
    """The model may call as often as it likes; each call follows its schema."""
    answer = CLIENT.chat.completions.create(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=160, temperature=0
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert len({call.id for call in calls}) == len(calls)
    complete = calls if answer.choices[0].finish_reason == "tool_calls" else calls[:-1]
    for call in complete:
        assert call.type == "function"
        check_arguments(json.loads(call.function.arguments))


def test_streamed_call() -> None:
    choice: ChatCompletionNamedToolChoiceParam = {"type": "function", "function": {"name": "weather"}}
    with CLIENT.chat.completions.stream(
        model=MODEL, messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=64
    ) as stream:
        arguments = [
            event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"
        ]
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls is not None
    (call,) = final.choices[0].message.tool_calls
    assert len(arguments) > 1
    check_arguments(json.loads(call.function.arguments))


def test_json_schema() -> None:
    parsed = CLIENT.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Weather, max_tokens=96, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Weather)


def test_json_object() -> None:
    answer = CLIENT.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Answer in JSON with the key city."}],
        response_format={"type": "json_object"},
        max_tokens=200,
        temperature=0,
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_responses() -> None:
    answer = CLIENT.responses.create(
        model=MODEL, input=QUESTION, instructions="Be short.", max_output_tokens=16
    )
    assert answer.output_text
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"


def test_responses_stream() -> None:
    with CLIENT.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=16) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")


def test_responses_tools_in_two_rounds() -> None:
    first = CLIENT.responses.create(
        model=MODEL,
        input=[{"role": "user", "content": QUESTION}],
        tools=[FLAT_TOOL],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=64,
    )
    (call,) = [item for item in first.output if item.type == "function_call"]
    check_arguments(json.loads(call.arguments))
    second = CLIENT.responses.create(
        model=MODEL,
        input=[
            {"role": "user", "content": QUESTION},
            {
                "type": "function_call",
                "call_id": call.call_id,
                "name": call.name,
                "arguments": call.arguments,
            },
            {"type": "function_call_output", "call_id": call.call_id, "output": "It rains, 12 C."},
        ],
        max_output_tokens=16,
    )
    assert second.output_text


def test_responses_json_schema() -> None:
    parsed = CLIENT.responses.parse(model=MODEL, input=QUESTION, text_format=Weather, max_output_tokens=96)
    assert isinstance(parsed.output_parsed, Weather)


@pytest.mark.skipif(not IS_EMBEDDED, reason="vLLM embeds only with models for that")
def test_embeddings() -> None:
    answer = CLIENT.embeddings.create(model=MODEL, input=["a house", "a home", "seven"])
    first, near, far = (entry.embedding for entry in answer.data)
    assert dot(first, near) > dot(first, far)


def dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))


def test_errors_have_their_classes() -> None:
    with pytest.raises(openai.NotFoundError):
        CLIENT.chat.completions.create(model="nobody", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError):
        CLIENT.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=9)
    with pytest.raises(openai.BadRequestError):
        CLIENT.responses.create(model=MODEL, input=QUESTION, temperature=9)


def test_models() -> None:
    assert MODEL in {entry.id for entry in CLIENT.models.list()}
