"""Bodies as Open WebUI, LibreChat and two coding agents send them: every one is answered with a 200."""

import json
import urllib.request

import pytest
from common import MODEL, PARAMETERS, TOOL, URL

ANTHROPIC_TOOL = {"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}

BODIES = {
    "open webui, chat": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Hello"}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.8,
            "top_k": 40,
            "min_p": 0.05,
            "repeat_penalty": 1.1,
            "max_tokens": 8,
            "metadata": {"chat_id": "c", "message_id": "m"},
            "features": {"web_search": False},
            "session_id": "s",
        },
    ),
    "open webui, title": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": '### Task:\nGenerate a title. JSON: { "title": "..." }'}
            ],
            "stream": False,
            "max_completion_tokens": 8,
        },
    ),
    "open webui, native function calling": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Weather in Bern?"}]},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {
                            "index": 0,
                            "id": "call_1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"city": "Bern", "unit": "C"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            ],
            "tools": [TOOL],
            "stream": True,
            "max_tokens": 8,
        },
    ),
    "librechat, chat": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "user": "u",
            "stream": True,
            "temperature": 1,
            "top_p": 1,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}],
            "stop": None,
            "max_tokens": 8,
        },
    ),
    "librechat, title by functions": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Write a title for: Hello"}],
            "functions": [
                {
                    "name": "output_formatter",
                    "parameters": {
                        "type": "object",
                        "properties": {"title": {"type": "string", "maxLength": 20}},
                        "required": ["title"],
                    },
                }
            ],
            "function_call": {"name": "output_formatter"},
            "max_tokens": 64,
        },
    ),
    "coding agent, messages": (
        "/v1/messages?beta=true",
        {
            "model": MODEL,
            "max_tokens": 8,
            "stream": True,
            "temperature": 1,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c;"},
                {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "<system-reminder>Today is Monday.</system-reminder>"},
                        {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}},
                    ],
                }
            ],
            "tools": [ANTHROPIC_TOOL],
            "metadata": {"user_id": "user_1_account__session_2"},
        },
    ),
    "coding agent, responses": (
        "/v1/responses",
        {
            "model": MODEL,
            "instructions": "You are an agent.",
            "input": [
                {
                    "type": "message",
                    "role": "developer",
                    "content": [{"type": "input_text", "text": "<permissions>none</permissions>"}],
                },
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
            ],
            "tools": [
                {
                    "type": "function",
                    "name": "shell",
                    "description": "Runs a command.",
                    "strict": False,
                    "parameters": {
                        "type": "object",
                        "properties": {"command": {"type": "array", "items": {"type": "string"}}},
                        "required": ["command"],
                        "additionalProperties": False,
                    },
                }
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "reasoning": None,
            "store": False,
            "stream": True,
            "include": [],
            "prompt_cache_key": "k",
            "max_output_tokens": 16,
        },
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_body(name: str) -> None:
    path, body = BODIES[name]
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none", "x-api-key": "none"}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers=headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        text = reply.read().decode()
    assert reply.status == 200
    ends = {
        "/v1/chat/completions": "data: [DONE]",
        "/v1/messages?beta=true": "event: message_stop",
        "/v1/responses": "event: response.",
    }
    if body.get("stream"):
        assert ends[path] in text
        assert '"error"' not in text.replace('"error":null', "")
