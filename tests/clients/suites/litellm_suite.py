"""`litellm`: OpenAI's and Anthropic's ways, streams, tools, JSON, errors."""

import json
from typing import Any

import litellm
import pydantic
import pytest
from common import IS_EMBEDDED, MODEL, QUESTION, TOOL, URL, check_arguments

OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none", "num_retries": 0}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "none", "num_retries": 0}
MESSAGES = [{"role": "user", "content": QUESTION}]
WAYS = pytest.mark.parametrize("way", [OPENAI, ANTHROPIC], ids=["openai", "anthropic"])


class Weather(pydantic.BaseModel):
    city: str
    degrees: int


@WAYS
def test_chat(way: dict[str, Any]) -> None:
    answer = litellm.completion(**way, messages=MESSAGES, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8


@WAYS
def test_stream(way: dict[str, Any]) -> None:
    chunks = litellm.completion(**way, messages=MESSAGES, max_tokens=8, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@WAYS
def test_tools_in_two_rounds(way: dict[str, Any]) -> None:
    first = litellm.completion(
        **way,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        max_tokens=64,
        parallel_tool_calls=False,
    )
    message = first.choices[0].message
    (call,) = message.tool_calls
    check_arguments(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains, 12 C."}
    second = litellm.completion(
        **way, messages=[*MESSAGES, message.model_dump(), result], tools=[TOOL], max_tokens=8
    )
    assert second.choices[0].message is not None


@WAYS
def test_streamed_call(way: dict[str, Any]) -> None:
    chunks = litellm.completion(
        **way,
        messages=MESSAGES,
        tools=[TOOL],
        tool_choice="required",
        max_tokens=64,
        stream=True,
        parallel_tool_calls=False,
    )
    built = litellm.stream_chunk_builder(list(chunks), messages=MESSAGES)
    (call,) = built.choices[0].message.tool_calls
    check_arguments(json.loads(call.function.arguments))


def test_json_schema() -> None:
    answer = litellm.completion(**OPENAI, messages=MESSAGES, response_format=Weather, max_tokens=96)
    Weather.model_validate_json(answer.choices[0].message.content)


def test_responses() -> None:
    answer = litellm.responses(**OPENAI, input=QUESTION, max_output_tokens=16)
    assert answer.output


@pytest.mark.skipif(not IS_EMBEDDED, reason="vLLM embeds only with models for that")
def test_embedding() -> None:
    answer = litellm.embedding(**OPENAI, input=["a house"])
    assert len(answer.data[0]["embedding"]) == 384


def test_errors_have_their_classes() -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(**OPENAI, messages=MESSAGES, extra_body={"temperature": 9})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**OPENAI, messages=[{"role": "user", "content": "word " * 40_000}])
