"""What front ends send that no specification has, and that means what it looks like."""

from __future__ import annotations

import pytest

from kvshare.engine import SamplingParams
from tests.proxy.conftest import Server, chat

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


async def sampling(server: Server, path: str = CHAT, /, **given: object) -> SamplingParams:
    """What the engine is asked for a body with these parameters."""
    response = await server.post(path, chat() | {"prompt": "a"} | given)
    assert response.status == 200, await response.text()
    return server.engine.requests[-1].sampling


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"max_tokens": 4.0}, "max_tokens", 4),
        ({"max_completion_tokens": 4.0, "max_tokens": 9}, "max_tokens", 4),
        ({"max_tokens": -1}, "max_tokens", None),
        ({"max_tokens": -1.0}, "max_tokens", None),
        ({"max_completion_tokens": -1}, "max_tokens", None),
        ({"n": 2.0}, "n", 2),
        ({"seed": 7.0}, "seed", 7),
        ({"seed": -1}, "seed", None),
        ({"stop": ""}, "stop", ()),
        ({"stop": []}, "stop", ()),
        ({"stop": "x"}, "stop", ("x",)),
        ({"logprobs": True, "top_logprobs": 2.0}, "logprobs", 2),
        ({"temperature": 1}, "temperature", 1.0),
        ({"top_k": 40.0}, "top_k", 40),
        ({"top_k": 0}, "top_k", 0),
        ({"top_k": -1}, "top_k", 0),
        ({"min_p": 0.05}, "min_p", 0.05),
        ({"repetition_penalty": 1.1}, "repetition_penalty", 1.1),
        ({"min_tokens": 2}, "min_tokens", 2),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"stop_token_ids": [1, 2.0]}, "stop_token_ids", (1, 2)),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
    ],
)
async def test_a_value_arrives_as_it_is_meant(
    server: Server, given: dict[str, object], name: str, value: object
) -> None:
    """Numbers with a point, no limit as -1, no stop as an empty string, and vLLM's parameters."""
    arrived = getattr(await sampling(server, **given), name)
    assert arrived == value
    assert type(arrived) is type(value)


async def test_nulls_are_absent(server: Server) -> None:
    """Every parameter may be null, which leaves it to the engine."""
    names = (
        *(
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stop",
            "n",
        ),
        *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens"),
        *("ignore_eos", "stop_token_ids", "skip_special_tokens", "stream", "stream_options", "logprobs"),
        *("top_logprobs", "tools", "tool_choice", "functions", "function_call", "parallel_tool_calls"),
        *("response_format", "guided_json", "structured_outputs", "reasoning_effort", "verbosity", "kvshare"),
        *("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "user", "suffix"),
        *("echo", "best_of", "modalities", "audio", "prediction", "web_search_options", "service_tier"),
    )
    plain = await sampling(server)
    assert await sampling(server, **dict.fromkeys(names)) == plain
    plain = await sampling(server, TEXT)
    assert await sampling(server, TEXT, **dict.fromkeys(names)) == plain
    assert plain.max_tokens == 16


async def test_no_limit_of_a_completion(server: Server) -> None:
    """-1 is no limit where nothing at all is OpenAI's 16."""
    assert (await sampling(server, TEXT, max_tokens=-1)).max_tokens is None


@pytest.mark.parametrize(
    ("given", "kwargs"),
    [
        ({}, {}),
        ({"verbosity": "medium"}, {}),
        ({"reasoning_effort": "medium"}, {"enable_thinking": True, "reasoning_effort": "medium"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"},
            {"enable_thinking": False, "reasoning_effort": "high"},
        ),
    ],
)
async def test_what_the_template_is_given(
    server: Server, given: dict[str, object], kwargs: dict[str, object]
) -> None:
    """As vLLM gives it: an effort also switches thinking on or off."""
    await sampling(server, **given)
    assert server.engine.chats[0].template_kwargs == kwargs


async def test_a_message_is_continued(server: Server) -> None:
    """`continue_final_message` is the chat's; a prompt without the generation prompt is the template's."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    await sampling(server, messages=messages, continue_final_message=True, add_generation_prompt=False)
    await sampling(server, messages=messages, continue_final_message=True)
    await sampling(server, messages=messages)
    assert [seen.continue_final_message for seen in server.engine.chats] == [True, True, False]


async def test_messages_as_clients_write_them(server: Server) -> None:
    """Nulls, unknown members, refusals, and reasoning by both of its names."""
    messages = [
        {"role": "developer", "content": "a", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {}}], "x": 1},
        {"role": "assistant", "content": None, "refusal": "no", "tool_calls": None, "audio": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "never"}], "annotations": []},
        {"role": "assistant", "content": "c", "reasoning": "d"},
        {"role": "user", "content": ""},
        {"role": "user", "content": "e"},
    ]
    await sampling(server, messages=messages)
    seen = server.engine.chats[0].messages
    assert [message["role"] for message in seen] == [
        "system", "user", "assistant", "assistant", "assistant", "user", "user"
    ]  # fmt: skip
    assert [message["content"] for message in seen] == ["a", "b", "no", "never", "c", "", "e"]
    assert seen[4]["reasoning_content"] == "d"


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/models/echo", "/health", "/ready", "/version", "/metrics", "/admin/stats"]
)
async def test_a_slash_at_the_end_changes_nothing(server: Server, path: str) -> None:
    """Clients that join URLs carelessly get the same answer, under the same name in metrics."""
    one, other = await server.get(path), await server.get(f"{path}/")
    assert (one.status, other.status) == (200, 200)
    if path != "/metrics":
        assert await one.json() == await other.json()
    metrics = await (await server.get("/metrics")).text()
    assert f'endpoint="{path}/"' not in metrics


async def test_a_slash_at_the_end_of_what_is_posted(server: Server) -> None:
    """No redirect, which some clients do not follow."""
    for path in (CHAT, TEXT):
        response = await server.post(f"{path}/", chat() | {"prompt": "a"})
        assert response.status == 200
        assert not response.history


async def test_a_slash_at_the_end_needs_the_same_key(guarded: Server) -> None:
    """What asks for a key asks for it under every name."""
    for path in ("/v1/models", "/v1/models/", "/version", "/version/", "/admin/stats/", "/metrics/"):
        assert (await guarded.get(path)).status == 401
    assert (await guarded.get("/health/")).status == 200
    response = await guarded.post("/tokenize", {"prompt": "a"})
    assert response.status == 401


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"max_tokens": 0},
            "Invalid 'max_tokens': expected a number of tokens from 1 to 2147483647, or -1 for no limit, "
            "got 0.",
        ),
        ({"stop": 5}, "Invalid 'stop': expected a string or a list of strings, got 5."),
        (
            {"logit_bias": {"a": 1}},
            "Invalid 'logit_bias': expected token ids from 0 to 2147483647 as keys, such as '50256', "
            "got 'a'.",
        ),
        (
            {"min_tokens": 5, "max_tokens": 4},
            "Invalid 'min_tokens': expected at most 'max_tokens', which is 4, got 5.",
        ),
        (
            {"continue_final_message": True},
            "Invalid 'continue_final_message': expected an assistant's message as the last one.",
        ),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "Invalid 'add_generation_prompt': expected false with 'continue_final_message', got true.",
        ),
        (
            {"reasoning_effort": "maximal"},
            "Invalid 'reasoning_effort': expected 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or "
            "'max', got 'maximal'.",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "any"},
            "Invalid 'tool_choice': expected 'none', 'auto', 'required' or an object that names a function, "
            "got a string.",
        ),
        (
            {"response_format": {"type": "xml"}},
            "Invalid 'response_format.type': expected 'text', 'json_object' or 'json_schema'.",
        ),
        (
            {"guided_json": "{"},
            "Invalid 'guided_json': expected a JSON schema, got a string that is not JSON.",
        ),
        (
            {"guided_json": {}, "response_format": {"type": "json_object"}},
            "Send only one of 'response_format' and 'guided_json': each is the answer's format.",
        ),
        (
            {"kvshare": {"scope": "all"}},
            "Unknown key 'kvshare.scope': expected one of mode, max_deviation, no_store, rules.",
        ),
        (
            {"model": "gpt-9"},
            "The model 'gpt-9' is not served here: expected 'echo'. GET /v1/models lists what is.",
        ),
    ],
)
async def test_what_errors_say(server: Server, given: dict[str, object], message: str) -> None:
    """The field, what was expected, what was found. What pydantic says is in test_wrong_values.py."""
    response = await server.post(CHAT, chat() | given)
    assert response.status in (400, 404)
    assert (await response.json())["error"]["message"] == message


@pytest.mark.parametrize(
    "given",
    [
        {"messages": [{"role": "user", "content": ["SECRET"]}]},
        {"messages": ["SECRET"]},
        {"messages": "SECRET"},
        {"prompt": "SECRET", "messages": [{"role": "user", "content": {"SECRET": "SECRET"}}]},
        {"stop": ["SECRET"], "n": 0},
        {"tools": ["SECRET"]},
        {"guided_json": "SECRET"},
    ],
)
async def test_errors_never_quote_text(server: Server, given: dict[str, object]) -> None:
    """Error bodies end up in logs of clients and gateways."""
    response = await server.post(CHAT, chat() | given)
    assert response.status == 400
    assert "SECRET" not in await response.text()
