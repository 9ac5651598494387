"""
Whatever a client sends, it gets an OpenAI error object with the right status; nothing is stored and the
server lives.
"""

from __future__ import annotations

import json

import openai
import pytest

from tests.proxy.conftest import Server, chat
from tests.proxy.generate.refusals import CHAT, TEXT, check_refused


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "echo",}',
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"model": NaN}',
        b'{"temperature": -Infinity}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_what_is_no_json_object_is_refused(server: Server, path: str, body: bytes) -> None:
    """Malformed, deep, non-finite or non-UTF-8 JSON is a 400."""
    await check_refused(server, await server.post(path, body))


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"model": 5}, "model"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "function_call": "f"}]}, "messages[0].function_call"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ({"kvshare": {str(number): 1 for number in range(17)}}, "kvshare"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"kvshare": "off"}, "kvshare"),
        ({"kvshare": {"mode": "always"}}, "kvshare.mode"),
        ({"kvshare": {"no_store": 1}}, "kvshare.no_store"),
        ({"kvshare": {"max_deviation": -0.1}}, "kvshare.max_deviation"),
    ],
)
async def test_wrong_values_name_their_parameter(
    server: Server, extra: dict[str, object], param: str
) -> None:
    """A wrong type or range is a 400 that says which parameter and what is expected."""
    response = await server.post(CHAT, json.dumps(chat() | extra).encode())
    await check_refused(server, response, param=param)


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"max_tokens": 2**31}, "max_tokens", "from 1 to 2147483647, or -1 for no limit, got 2147483648"),
        ({"max_tokens": 0}, "max_tokens", "from 1 to 2147483647, or -1 for no limit, got 0"),
        ({"max_completion_tokens": 2**40}, "max_completion_tokens", "to 2147483647"),
        ({"top_k": 2**31}, "top_k", "2147483647, got 2147483648"),
        ({"min_tokens": 2**31}, "min_tokens", "2147483647, got 2147483648"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids[0]", "2147483647, got 2147483648"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "got '-1'"),
        ({"logit_bias": {"5": 1, "1.5": 1}}, "logit_bias", "got '1.5'"),
        ({"logit_bias": {"": 1}}, "logit_bias", "got ''"),
        (
            {"logit_bias": {str(2**31): 1}},
            "logit_bias",
            "from 0 to 2147483647 as keys, such as '50256', got '2147",
        ),
        ({"logit_bias": {"x" * 500: 1}}, "logit_bias", f"got '{'x' * 40}'"),
    ],
)
async def test_the_bounds_and_what_was_found_are_in_the_message(
    server: Server, extra: dict[str, object], param: str, words: str
) -> None:
    """Who reads the error learns both ends of a range, and which key or number was wrong."""
    response = await server.post(CHAT, chat() | extra)
    message = await check_refused(server, response, param=param)
    assert words in message


@pytest.mark.parametrize("extra", [{"user": "\ud800"}, {"\udfff": 1}, {"messages": ["a\ud83d"]}])
async def test_lone_surrogates_are_refused(server: Server, extra: dict[str, object]) -> None:
    """Half a character is no text, wherever it stands; both halves are."""
    await check_refused(server, await server.post(CHAT, json.dumps(chat() | extra).encode()))
    response = await server.post(CHAT, json.dumps(chat("\U0001f600")).encode())
    assert (await response.json())["choices"][0]["message"]["content"] == "\U0001f600"


async def test_unknown_kvshare_keys_are_refused(server: Server) -> None:
    """The kvshare object is ours: a key that is not understood is not ignored."""
    response = await server.post(CHAT, chat(kvshare={"mode": "off", "scope": "public"}))
    await check_refused(server, response, param="kvshare.scope", code="unknown_parameter")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("web_search_options", {}),
        ("length_penalty", True),
        ("use_beam_search", True),
        ("guided_regex", "a+"),
        ("chat_template", "{{ messages }}"),
        ("truncate_prompt_tokens", 5),
    ],
)
async def test_what_would_change_the_answer_is_not_ignored(server: Server, name: str, value: object) -> None:
    """A parameter that is not implemented is refused by name, with the way out."""
    response = await server.post(CHAT, chat(**{name: value}))
    message = await check_refused(server, response, param=name, code="unsupported_parameter")
    assert "--engine vllm" in message


async def test_spoken_messages_are_refused(server: Server) -> None:
    """What an assistant said aloud is on OpenAI's servers only."""
    messages = [{"role": "assistant", "content": None, "audio": {"id": "1"}}]
    response = await server.post(CHAT, chat() | {"messages": messages})
    await check_refused(server, response, param="messages[0].audio", code="unsupported_parameter")


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], [1.5]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": "b"}}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "messages": 5, "max_tokens": -2}, "max_tokens"),
    ],
)
async def test_wrong_prompts_are_refused(server: Server, extra: dict[str, object], param: str) -> None:
    """A prompt is text or token ids, or a list of either, and not empty."""
    response = await server.post(TEXT, json.dumps({"model": "echo"} | extra).encode())
    await check_refused(server, response, param=param)


@pytest.mark.parametrize(
    ("param", "extra"),
    [("echo", {"echo": True, "logprobs": 0}), ("suffix", {"suffix": "x"}), ("best_of", {"best_of": 2})],
)
async def test_completion_extras_are_refused(server: Server, param: str, extra: dict[str, object]) -> None:
    """echo with logprobs, suffix and best_of beyond n are not implemented and say so."""
    response = await server.post(TEXT, {"model": "echo", "prompt": "a", **extra})
    await check_refused(server, response, param=param, code="unsupported_parameter")


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_unknown_model(server: Server, path: str) -> None:
    """Another model's name is a 404 with OpenAI's code, and with the name that is served."""
    response = await server.post(path, chat() | {"prompt": "a", "model": "gpt-9"})
    message = await check_refused(server, response, status=404, param="model", code="model_not_found")
    assert "The model 'gpt-9' is not served here: expected 'echo'." in message


async def test_the_client_sees_typed_errors(server: Server) -> None:
    """The openai client turns the statuses and codes into its own exceptions."""
    async with server.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="echo", messages=[])
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="a")
    assert caught.value.param == "messages"


async def test_a_schema_that_is_nested_too_deeply_is_refused(server: Server) -> None:
    """Just before the parser gives up, what writes the schema again does: no depth is a failure."""
    for depth in range(850, 1000):
        schema = '{"a":' * depth + "1" + "}" * depth
        function = f'{{"name": "f", "parameters": {schema}}}'
        tools = f'[{{"type": "function", "function": {function}}}]'
        body = f'{json.dumps(chat(tool_choice="required"))[:-1]}, "tools": {tools}}}'
        assert (await server.post(CHAT, body.encode())).status in (200, 400)
