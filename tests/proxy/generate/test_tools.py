"""Tools on /v1/chat/completions: what the engine is asked, and how calls in its answer reach the clients."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import (
    ChatCompletionFunctionToolParam,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageParam,
)
from openai.types.chat.chat_completion_assistant_message_param import FunctionCall
from openai.types.shared_params import FunctionDefinition

from kvshare.conversation.chat import Chat, ToolChoice, ToolUse
from kvshare.conversation.grammar import grammar_of
from kvshare.conversation.tools import ToolFormat
from tests.proxy.conftest import Server, chat, running_server
from tests.proxy.fake_engine import Behaviour

CHAT = "/v1/chat/completions"


def function(name: str) -> FunctionDefinition:
    parameters: dict[str, object] = {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    return {"name": name, "description": f"The {name} of a city", "parameters": parameters}


def tool(name: str) -> ChatCompletionFunctionToolParam:
    return {"type": "function", "function": function(name)}


def call_text(name: str, city: str) -> str:
    """A call as the fake engine's model writes it."""
    call = {"name": name, "arguments": {"city": city}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


TOOLS: list[ChatCompletionFunctionToolParam] = [tool("weather"), tool("time")]
MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What about Paris?"}]
ONE = call_text("weather", "Paris")
TWO = f"{ONE}\n{call_text('time', 'Lyon')}"


def calls_of(message: ChatCompletionMessage) -> list[ChatCompletionMessageFunctionToolCall]:
    calls = [call for call in message.tool_calls or () if call.type == "function"]
    assert len(calls) == len(message.tool_calls or ())
    return calls


async def test_a_call_is_no_text() -> None:
    """An answer that only calls has calls, null as content, and its own finish reason."""
    async with running_server(Behaviour(says=ONE)) as server, server.client() as client:
        answer = await client.chat.completions.create(model="echo", messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = calls_of(choice.message)
    assert call.type == "function"
    assert call.id
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}


async def test_text_before_calls_stays_text() -> None:
    """Parallel calls come in order, beside what is said."""
    async with running_server(Behaviour(says=f"Let me see.\n{TWO}")) as server, server.client() as client:
        answer = await client.chat.completions.create(model="echo", messages=MESSAGES, tools=TOOLS)
    (choice,) = answer.choices
    assert (choice.message.content or "").strip() == "Let me see."
    calls = calls_of(choice.message)
    assert [call.function.name for call in calls] == ["weather", "time"]
    assert len({call.id for call in calls}) == 2


async def test_a_stream_has_the_deltas_that_clients_join() -> None:
    """The first delta of a call has its index, id, type and name; the others are pieces of the arguments."""
    async with running_server(Behaviour(says=TWO)) as server, server.client() as client:
        stream = await client.chat.completions.create(
            model="echo", messages=MESSAGES, tools=TOOLS, stream=True
        )
        choices = [chunk.choices[0] async for chunk in stream]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    deltas = [call for choice in choices for call in choice.delta.tool_calls or ()]
    for index, name, city in ((0, "weather", "Paris"), (1, "time", "Lyon")):
        first, *rest = [delta for delta in deltas if delta.index == index]
        assert first.function is not None
        assert (first.type, first.function.name, first.function.arguments) == ("function", name, "")
        assert first.id
        pieces = [delta.function for delta in rest if delta.function is not None]
        assert len(pieces) == len(rest)
        assert all(delta.id is None for delta in rest)
        assert all(piece.name is None for piece in pieces)
        assert json.loads("".join(piece.arguments or "" for piece in pieces)) == {"city": city}
    assert not "".join(choice.delta.content or "" for choice in choices).strip()


async def test_the_client_joins_a_stream_to_the_whole_answer() -> None:
    """The openai client's own accumulation of a stream gives the message of the whole answer, per choice."""
    says = f"Well.\n{TWO}"
    options: dict[str, Any] = {"model": "echo", "messages": MESSAGES, "tools": TOOLS, "n": 2}
    async with running_server(Behaviour(says=says)) as server, server.client() as client:
        whole = await client.chat.completions.create(**options)
        async with client.chat.completions.stream(**options) as stream:
            joined = await stream.get_final_completion()
    for one, other in zip(whole.choices, joined.choices, strict=True):
        assert one.finish_reason == other.finish_reason == "tool_calls"
        assert one.message.content == other.message.content
        functions = [call.function for call in calls_of(one.message)]
        assert [(each.name, each.arguments) for each in functions] == [
            (each.function.name, each.function.arguments) for each in calls_of(other.message)
        ]


async def test_the_second_round_reaches_the_template() -> None:
    """A transcript with calls continues; arguments are objects, results have their tool's name."""
    messages: list[ChatCompletionMessageParam] = [
        *MESSAGES,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "P"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    ]
    async with running_server(Behaviour(says="It rains.")) as server, server.client() as client:
        answer = await client.chat.completions.create(model="echo", messages=messages, tools=TOOLS)
        (seen,) = server.engine.chats
    assert answer.choices[0].message.content == "It rains."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].message.tool_calls is None
    _, assistant, result = seen.messages
    assert assistant["content"] == ""
    assert assistant["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "P"}}
    assert (result["role"], result["content"], result["name"]) == ("tool", "rain", "weather")
    assert result["tool_call_id"] == "c1"


@pytest.mark.parametrize(
    ("given", "names", "choice"),
    [
        ({}, ["weather", "time"], ToolChoice()),
        ({"tool_choice": None}, ["weather", "time"], ToolChoice()),
        ({"tool_choice": "none"}, ["weather", "time"], ToolChoice(ToolUse.NONE)),
        ({"tool_choice": "required"}, ["weather", "time"], ToolChoice(ToolUse.REQUIRED)),
        (
            {"tool_choice": {"type": "function", "function": {"name": "time"}}},
            ["weather", "time"],
            ToolChoice(ToolUse.REQUIRED, "time"),
        ),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "time"}}],
                    },
                }
            },
            ["time"],
            ToolChoice(ToolUse.REQUIRED),
        ),
    ],
)
async def test_what_the_engine_is_asked(
    server: Server, given: dict[str, object], names: list[str], choice: ToolChoice
) -> None:
    """The tools, and whether they are called."""
    assert (await server.post(CHAT, chat(tools=TOOLS, **given))).status == 200
    (seen,) = server.engine.chats
    assert [each["function"]["name"] for each in seen.tools] == names
    assert seen.tool_choice == choice
    assert seen.parallel_tool_calls
    assert (server.engine.requests[0].sampling.grammar is not None) == (choice.use is ToolUse.REQUIRED)


async def test_without_a_need_to_call_text_is_text() -> None:
    """What looks like a call is text for who forbids calls, or has no tools."""
    async with running_server(Behaviour(says=ONE)) as server:
        asked: list[dict[str, object]] = [
            {"tools": TOOLS, "tool_choice": "none"},
            {"tools": []},
            {"tools": None},
        ]
        for given in asked:
            document = await (await server.post(CHAT, chat(**given))).json()
            assert document["choices"][0]["message"] == {
                "role": "assistant",
                "content": ONE,
                "refusal": None,
            }


async def test_parallel_calls_can_be_forbidden(server: Server) -> None:
    """`parallel_tool_calls` reaches the grammar and the parser."""
    await server.post(CHAT, chat(tools=TOOLS, parallel_tool_calls=False))
    assert not server.engine.chats[0].parallel_tool_calls


async def test_functions_of_old_clients() -> None:
    """`functions` are answered by one `function_call`, whole and in a stream."""
    body = chat(functions=[function("weather"), function("time")], function_call="auto")
    async with running_server(Behaviour(says=ONE)) as server:
        document = await (await server.post(CHAT, body)).json()
        stream = await (await server.post(CHAT, body | {"stream": True})).text()
    (choice,) = document["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"]["name"] == "weather"
    assert json.loads(choice["message"]["function_call"]["arguments"]) == {"city": "Paris"}
    assert "tool_calls" not in choice["message"]
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"].get("function_call", {}) for chunk in chunks]
    assert [delta["name"] for delta in deltas if "name" in delta] == ["weather"]
    assert json.loads("".join(delta.get("arguments", "") for delta in deltas)) == {"city": "Paris"}
    assert chunks[-1]["choices"][0]["finish_reason"] == "function_call"


async def test_messages_of_old_clients(server: Server) -> None:
    """A function's call and its result are a tool's, by the same id."""
    call: FunctionCall = {"name": "weather", "arguments": "{}"}
    messages: list[ChatCompletionMessageParam] = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "weather", "content": "rain"},
    ]
    response = await server.post(CHAT, chat(functions=[function("weather")]) | {"messages": messages})
    assert response.status == 200
    (seen,) = server.engine.chats
    assert not seen.parallel_tool_calls
    _, assistant, result = seen.messages
    (called,) = assistant["tool_calls"]
    assert called["function"] == {"name": "weather", "arguments": {}}
    assert (result["role"], result["name"], result["content"]) == ("tool", "weather", "rain")
    assert result["tool_call_id"] == called["id"]


HELLO = [{"role": "user", "content": "hello"}]
CHAT_TOOL = {"messages": HELLO, "tool_choice": "required", "parallel_tool_calls": False}
MESSAGES_TOOL = {"messages": HELLO, "max_tokens": 9, "tool_choice": {"type": "tool", "name": "now"}}
EMPTY = {"type": "object", "properties": {}}
NO_PARAMETERS: list[dict[str, Any]] = [{}, {"parameters": None}, {"parameters": {}}, {"parameters": EMPTY}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *(
            (CHAT, CHAT_TOOL | {"tools": [{"type": "function", "function": {"name": "now", **given}}]})
            for given in NO_PARAMETERS
        ),
        (CHAT, {"messages": HELLO, "functions": [{"name": "now"}], "function_call": {"name": "now"}}),
        *(
            (
                "/v1/responses",
                {
                    "input": "hello",
                    "tools": [{"type": "function", "name": "now", **given}],
                    "tool_choice": {"type": "function", "name": "now"},
                },
            )
            for given in NO_PARAMETERS
        ),
        *(
            ("/v1/messages", MESSAGES_TOOL | {"tools": [{"name": "now", "input_schema": given}]})
            for given in ({}, EMPTY)
        ),
    ],
)
async def test_a_tool_without_parameters_has_none(server: Server, path: str, body: dict[str, Any]) -> None:
    """On every route an absent, null or empty list of parameters leaves a call with `{}`."""
    response = await server.post(path, {"model": "echo", **body})
    assert response.status == 200, await response.text()
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = ({"type": "function", "function": {"name": "now", "parameters": nothing}},)
    expected = grammar_of(Chat((), tools, ToolChoice(ToolUse.REQUIRED, "now")), ToolFormat.HERMES)
    assert server.engine.requests[0].sampling.grammar == expected


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "tool", "tool_call_id": "c1", "content": "rain"}],
        [*MESSAGES, {"role": "tool", "tool_call_id": "c1", "content": "rain"}],
        [
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            {
                "role": "assistant",
                "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": "{}"}}],
            },
        ],
        [
            {
                "role": "assistant",
                "tool_calls": [{"id": "c2", "function": {"name": "weather", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
    ],
)
async def test_a_result_without_its_call_is_refused(
    server: Server, path: str, messages: list[dict[str, Any]]
) -> None:
    """As on the other routes and with OpenAI: the message is named."""
    response = await server.post(path, chat(tools=TOOLS) | {"messages": messages})
    error = (await response.json())["error"]
    number = next(number for number, message in enumerate(messages) if message["role"] == "tool")
    assert (response.status, error["param"]) == (400, f"messages[{number}].tool_call_id")
    assert "no call before it has this id" in error["message"]


async def test_logprobs_of_calls_are_all_there() -> None:
    """Tokens whose text is held back until it is certain come with what follows."""
    body = chat(tools=TOOLS, logprobs=True, stream=True)
    async with running_server(Behaviour(says=ONE)) as server:
        stream = await (await server.post(CHAT, body)).text()
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    logprobs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    tokens = [token["token"] for entry in logprobs if entry for token in entry["content"]]
    assert "".join(tokens) == ONE


def joined_stream(text: str) -> tuple[dict[str, Any], list[str], str | None]:
    """The message of a stream of chunks, the tokens of its log-probabilities, and its finish reason."""
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    calls: dict[int, str] = {}
    for delta in (call for choice in choices for call in choice["delta"].get("tool_calls", ())):
        calls[delta["index"]] = calls.get(delta["index"], "") + delta["function"]["arguments"]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    tokens = [token["token"] for each in choices if each["logprobs"] for token in each["logprobs"]["content"]]
    return {"content": content, "arguments": list(calls.values())}, tokens, choices[-1]["finish_reason"]


def is_object(arguments: str) -> bool:
    try:
        return isinstance(json.loads(arguments), dict)
    except ValueError:
        return False


CUTS: list[dict[str, Any]] = [
    *({"max_tokens": number} for number in (1, 11, 14, 30, 45, 60, 77, 78, 90, 92, 100, 130, len(TWO))),
    *({"stop": [stop]} for stop in ("Par", "name", "weather", "}", "</tool", "\n<", "time", "Ly", "zz", "<")),
]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("tool_choice", ["required", "auto"])
async def test_a_cut_call_is_never_a_finished_one(cut: dict[str, Any], tool_choice: str) -> None:
    """
    Wherever the tokens or a stop string end an answer: `tool_calls` has whole objects only, no markup is
    text, a stream is the whole answer, and log-probabilities are those of what is shown.
    """
    body = chat(tools=TOOLS, tool_choice=tool_choice, logprobs=True, **cut)
    async with running_server(Behaviour(says=TWO)) as server:
        (choice,) = (await (await server.post(CHAT, body)).json())["choices"]
        message, tokens, end = joined_stream(await (await server.post(CHAT, body | {"stream": True})).text())
    arguments = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", ())]
    content = choice["message"]["content"] or ""
    assert ({"content": content, "arguments": arguments}, choice["finish_reason"]) == (message, end)
    is_whole = bool(arguments) and all(map(is_object, arguments))
    if "max_tokens" in cut:
        assert end == ("length" if cut["max_tokens"] < len(TWO) else "tool_calls")
    else:
        assert end == ("tool_calls" if is_whole else "stop")
    assert len(content) < (1 if tool_choice == "required" else 3)
    assert [token["token"] for token in choice["logprobs"]["content"]] == tokens
    assert TWO.startswith("".join(tokens))
    shown = len("".join(tokens).rstrip())
    if len(arguments) < 2:
        assert shown <= (len(ONE) if arguments else len(content))
    if is_whole and len(arguments) == 1:
        assert shown >= TWO.index("}}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("cut", "stop_reason"),
    [
        ({"stop_sequences": ["Par"]}, "stop_sequence"),
        ({"stop_sequences": ["time"]}, "stop_sequence"),
        ({"max_tokens": 40}, "max_tokens"),
        ({"max_tokens": len(ONE) + 14}, "max_tokens"),
        ({}, "tool_use"),
    ],
)
async def test_a_cut_call_of_messages(cut: dict[str, Any], stop_reason: str, stream: bool) -> None:
    """`tool_use` is the end of whole calls only, and no block of text has markup."""
    tools = [{"name": name, "input_schema": function(name)["parameters"]} for name in ("weather", "time")]
    body = {"model": "echo", "max_tokens": 400, "messages": HELLO, "tools": tools}
    body |= {"tool_choice": {"type": "any"}, "stream": stream, **cut}
    async with running_server(Behaviour(says=TWO)) as server:
        text = await (await server.post("/v1/messages", body)).text()
    if not stream:
        document = json.loads(text)
        assert document["stop_reason"] == stop_reason
        assert {block["type"] for block in document["content"]} == {"tool_use"}
    else:
        assert f'"stop_reason":"{stop_reason}"' in text.replace(": ", ":")
        assert '"text_delta"' not in text


@pytest.mark.parametrize(
    ("says", "limit", "statuses"),
    [
        (TWO, None, ["completed", "completed"]),
        (TWO, len(ONE) - 13, ["completed"]),
        (TWO, len(ONE) - 30, ["incomplete"]),
        (TWO, len(ONE) + 14, ["completed"]),
        (TWO, len(TWO) - 30, ["completed", "incomplete"]),
        ('<tool_call>{"name": "time", "arguments": {"a": "\n"}}</tool_call>', None, ["incomplete"]),
    ],
)
async def test_a_cut_call_of_responses(says: str, limit: int | None, statuses: list[str]) -> None:
    """Items that are no whole calls are incomplete; the head of another call is no item."""
    tools = [{"type": "function", **function(name)} for name in ("weather", "time")]
    body = {"model": "echo", "input": "hi", "tools": tools, "tool_choice": "required"}
    async with running_server(Behaviour(says=says)) as server:
        response = await server.post("/v1/responses", body | {"max_output_tokens": limit})
        stream = await server.post("/v1/responses", body | {"max_output_tokens": limit, "stream": True})
        document, text = await response.json(), await stream.text()
    assert [(item["type"], item["status"]) for item in document["output"]] == [
        ("function_call", status) for status in statuses
    ]
    assert document["status"] == ("completed" if limit is None else "incomplete")
    assert text.count('"response.output_item.done"') >= len(statuses)
    assert "output_text" not in text


async def test_metrics_count_calls() -> None:
    """The request's finish reason is that of the client."""
    async with running_server(Behaviour(says=ONE)) as server:
        await server.post(CHAT, chat(tools=TOOLS))
        await server.post(CHAT, chat(tools=TOOLS, stream=True))
        metrics = await (await server.get("/metrics")).text()
    (line,) = [
        line for line in metrics.splitlines() if 'finish_reason="tool_calls"' in line and "_total" in line
    ]
    assert line.endswith(" 2.0")


async def test_thoughts_are_no_text() -> None:
    """Where the prompt ends inside a thought, the answer's begins with it; clients know two names for it."""
    messages = [{"role": "user", "content": "Why?<think>"}]
    async with running_server(Behaviour(says="Hm.</think>Because.")) as server:
        document = await (await server.post(CHAT, {"model": "echo", "messages": messages})).json()
        stream = await (
            await server.post(CHAT, {"model": "echo", "messages": messages, "stream": True})
        ).text()
    message = document["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Because.", "Hm.")
    chunks = [json.loads(line[6:]) for line in stream.split("\n\n") if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Because."


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": "weather"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice.function.name",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        ({"tools": TOOLS, "functions": [function("f")]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"functions": [function("f")], "function_call": {"name": "g"}}, "function_call.name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0].function",
        ),
    ],
)
async def test_what_is_no_tool_is_refused(server: Server, given: dict[str, object], param: str) -> None:
    """A wrong form is a 400 that names the field."""
    response = await server.post(CHAT, chat() | given)
    error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param), error
