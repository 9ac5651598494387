"""Tools, JSON and what else agents ask for: the real command, the real model, the real `openai` client."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai import pydantic_function_tool
from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageParam,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionToolMessageParam,
)
from openai.types.shared_params import FunctionDefinition
from pydantic import BaseModel, Field

from tests.conftest import Server
from tests.weather import PARAMETERS

MODEL = "kvshare-demo"
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the weather in Paris, and what time is it?"}
]
WEATHER: FunctionDefinition = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": PARAMETERS,
}
TIME: FunctionDefinition = {
    "name": "get_time",
    "parameters": {"type": "object", "properties": {}, "additionalProperties": False},
}
TOOLS: list[ChatCompletionFunctionToolParam] = [
    {"type": "function", "function": WEATHER},
    {"type": "function", "function": TIME},
]


class Form(BaseModel):
    """What an answer must look like."""

    name: str = Field(max_length=12)
    kind: Literal["letter", "form"]
    pages: int = Field(ge=1, le=9)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key("ann"), max_retries=0)


def test_a_tool_that_must_be_called_is(client: openai.OpenAI) -> None:
    """Arguments follow the schema, and the transcript with the result is answered, in text if asked."""
    options: dict[str, Any] = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    choice: ChatCompletionNamedToolChoiceParam = {"type": "function", "function": {"name": "get_weather"}}
    first = client.chat.completions.create(
        messages=MESSAGES, tool_choice=choice, parallel_tool_calls=False, **options
    )
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert message.content is None
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    result: ChatCompletionToolMessageParam = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    turns = [*MESSAGES, message.model_dump(exclude_none=True), result]
    second = client.chat.completions.create(messages=turns, **options)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens
    last = client.chat.completions.create(messages=turns, tool_choice="none", **options)
    assert last.choices[0].message.tool_calls is None
    assert last.choices[0].message.content


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_of_calls_is_joined_to_the_whole_answer(client: openai.OpenAI, n: int) -> None:
    """The client's own accumulation gives what the whole answer has, for each choice."""
    options: dict[str, Any] = {
        "model": MODEL,
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "temperature": 0,
        "max_tokens": 120,
        "n": n,
    }
    whole = client.chat.completions.create(**options)
    with client.chat.completions.stream(**options) as stream:
        joined = stream.get_final_completion()
    for one, other in zip(whole.choices, joined.choices, strict=True):
        assert one.message.tool_calls
        calls = [(call.function.name, call.function.arguments) for call in one.message.tool_calls]
        assert calls == [
            (call.function.name, call.function.arguments) for call in other.message.tool_calls or ()
        ]
        assert one.finish_reason == other.finish_reason


def test_parse_gives_an_object_of_the_class(client: openai.OpenAI) -> None:
    """`response_format` of a class, as the client sends it, is followed."""
    answer = client.chat.completions.parse(
        model=MODEL, messages=MESSAGES, response_format=Form, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Form)


def test_parse_gives_arguments_of_the_class(client: openai.OpenAI) -> None:
    """So are the parameters of a strict tool, of the client's making."""
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=MESSAGES,
        tools=[pydantic_function_tool(Form)],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
    )
    assert answer.choices[0].message.tool_calls is not None
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Form)


def test_any_json_object(client: openai.OpenAI) -> None:
    """JSON mode: whatever it says, it is an object, or was cut off in it."""
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, response_format={"type": "json_object"}, temperature=0, max_tokens=60
    )
    text = answer.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)


def test_functions_of_old_clients(client: openai.OpenAI) -> None:
    """One call, in the words of the older API."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        functions=[WEATHER],
        function_call={"name": "get_weather"},
        max_tokens=120,
    )
    assert answer.choices[0].finish_reason == "function_call"
    call = answer.choices[0].message.function_call
    assert call is not None
    jsonschema.validate(json.loads(call.arguments), PARAMETERS)


def test_vllms_sampling_reaches_the_model(client: openai.OpenAI) -> None:
    """top_k 1 is greedy at any temperature; min_tokens with ignore_eos gives just as many."""
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8}
    greedy = client.chat.completions.create(temperature=0, **options)
    only = client.chat.completions.create(temperature=2, extra_body={"top_k": 1}, **options)
    assert only.choices[0].message.content == greedy.choices[0].message.content
    long = client.chat.completions.create(extra_body={"ignore_eos": True, "min_tokens": 8.0}, **options)
    assert long.usage is not None
    assert long.usage.completion_tokens == 8


def test_a_message_is_continued(client: openai.OpenAI) -> None:
    """The prompt ends with the message's own text, so it is shorter than the one that asks for another."""
    begun: list[ChatCompletionMessageParam] = [*MESSAGES, {"role": "assistant", "content": "The weather is"}]
    options: dict[str, Any] = {"model": MODEL, "messages": begun, "max_tokens": 2, "temperature": 0}
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    continued = client.chat.completions.create(extra_body=extra, **options)
    another = client.chat.completions.create(**options)
    assert continued.usage is not None
    assert another.usage is not None
    assert continued.usage.prompt_tokens < another.usage.prompt_tokens


def test_template_kwargs_are_the_templates_alone(client: openai.OpenAI) -> None:
    """What the template does not read does no harm; what the server says itself is refused."""
    options: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1}
    client.chat.completions.create(
        reasoning_effort="medium", extra_body={"chat_template_kwargs": {"enable_thinking": False}}, **options
    )
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            extra_body={"chat_template_kwargs": {"chat_template": "{{ messages }}"}}, **options
        )
    assert caught.value.param == "chat_template_kwargs"


def test_embeddings(client: openai.OpenAI) -> None:
    """Texts alike in meaning are closer than others."""
    texts = ["The cat sleeps.", "A cat is sleeping.", "Taxes are due in May."]
    answer = client.embeddings.create(model="all-MiniLM-L6-v2", input=texts)
    near, alike, far = (entry.embedding for entry in answer.data)

    def product(other: list[float]) -> float:
        return sum(a * b for a, b in zip(near, other, strict=True))

    assert product(alike) > product(far)
    assert product(near) == pytest.approx(1.0, abs=1e-3)
    assert answer.usage.prompt_tokens > 9


def test_tokens_of_a_chat_and_back(client: openai.OpenAI) -> None:
    """/tokenize counts what a completion is charged for; /detokenize gives the template's text."""
    root = str(client.base_url).removesuffix("/v1/")
    used = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1).usage
    assert used is not None
    body: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "return_token_strs": True}
    document: Any = client.post(f"{root}/tokenize", cast_to=object, body=body)
    assert document["count"] == used.prompt_tokens == len(document["token_strs"])
    text: Any = client.post(f"{root}/detokenize", cast_to=object, body={"tokens": document["tokens"]})
    assert MESSAGES[0]["content"] in text["prompt"]


def test_echo(client: openai.OpenAI) -> None:
    """The prompt's text is in front of the answer's, also where it came as tokens."""
    root = str(client.base_url).removesuffix("/v1/")
    document: Any = client.post(f"{root}/tokenize", cast_to=object, body={"prompt": "One two"})
    options: dict[str, Any] = {"model": MODEL, "max_tokens": 3, "temperature": 0}
    of_text = client.completions.create(prompt="One two", echo=True, **options)
    of_tokens = client.completions.create(prompt=document["tokens"], echo=True, **options)
    plain = client.completions.create(prompt="One two", **options)
    assert of_text.choices[0].text == "One two" + plain.choices[0].text
    assert of_tokens.choices[0].text.endswith(of_text.choices[0].text)
