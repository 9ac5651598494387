"""`langchain-openai`: chat, streams, tools, structured output in all its ways, Responses, embeddings."""

import contextlib
from typing import Literal

import openai
import pytest
from common import IS_EMBEDDED, MODEL, QUESTION, URL
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Bern", "Rome"]  # a small model writes free text to no end
    degrees: int


def chat(**options: object) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{URL}/v1",
        api_key="none",
        model=MODEL,
        max_tokens=96,
        temperature=0,
        max_retries=0,
        **options,
    )


def test_invoke() -> None:
    answer = chat().invoke([HumanMessage(QUESTION)])
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0


def test_stream() -> None:
    assert "".join(chunk.content for chunk in chat().stream(QUESTION))


def test_bound_tools_in_two_rounds() -> None:
    bound = chat().bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    first = bound.invoke(QUESTION)
    (call,) = first.tool_calls
    assert call["name"] == "Weather"
    assert set(call["args"]) == {"city", "degrees"}
    result = ToolMessage("It rains, 12 C.", tool_call_id=call["id"])
    assert chat().invoke([HumanMessage(QUESTION), first, result]).content


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_structured_output(method: str) -> None:
    asked = "The weather of Bern as JSON with the keys city (text) and degrees (number)."
    model = chat().with_structured_output(Weather, method=method, include_raw=True)
    if method == "json_mode":  # it promises JSON, not this schema, and a small model may not come to its end
        with contextlib.suppress(openai.LengthFinishReasonError):
            assert model.invoke(asked)["raw"]
        return
    found = model.invoke(asked)
    assert isinstance(found["parsed"], Weather), found["parsing_error"]


def test_responses() -> None:
    assert chat(use_responses_api=True).invoke(QUESTION).text


@pytest.mark.skipif(not IS_EMBEDDED, reason="vLLM embeds only with models for that")
def test_embeddings() -> None:
    embeddings = OpenAIEmbeddings(
        base_url=f"{URL}/v1", api_key="none", model=MODEL, check_embedding_ctx_length=False
    )
    assert len(embeddings.embed_query("a house")) == 384


def test_errors_have_their_classes() -> None:
    with pytest.raises(openai.BadRequestError):
        chat(top_p=7).invoke(QUESTION)
