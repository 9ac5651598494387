"""What the proxy passes on unchanged: streams, routes that it does not know, and vLLM's errors."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.conftest import Server as EmbeddedServer
from tests.vllm_end_to_end.fleet import MODEL, WAIT_S, Fleet, ask, pair

TOO_LONG = {
    "model": MODEL,
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "one two three " * 5000}],
}

_CRASHING = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 3}
_TRIES = 5
_ENDLESS = {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}


def test_streams_are_vllms_own_bytes(fleet: Fleet) -> None:
    """Chunk by chunk the same as asked of vLLM directly, but for id and time."""
    messages = pair(13).donor_messages

    def chunks(client: openai.OpenAI) -> list[dict[str, Any]]:
        stream = client.chat.completions.create(  # type: ignore[call-overload]  # plain dictionaries
            model=MODEL,
            messages=messages,
            temperature=0,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
        )
        return [chunk.model_dump(exclude={"id", "created"}) for chunk in stream]

    with fleet.client("ann") as ann, fleet.client("ann", fleet.replicas[0].url) as direct:
        for _ in range(_TRIES):  # if the reader is late, vLLM puts two tokens into one chunk
            relayed, own = chunks(ann), chunks(direct)
            for chunk in (relayed[-1], own[-1]):
                chunk["usage"].pop("prompt_tokens_details")
            if len(relayed) == len(own):
                break
    assert relayed == own


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_vllm_computes_the_tokens_that_it_is_given_back(fleet: Fleet, path: str) -> None:
    """Not those of the messages beside them, so template and tokenizer have no turn."""
    text = "one two three"
    body = {"model": MODEL, "max_tokens": 1, "max_output_tokens": 16, "input": text}
    body["messages"] = [{"role": "user", "content": text}]
    numbers = []
    for given in ({}, {"kv_transfer_params": {"prompt_token_ids": [20] * 77}}):
        reply = httpx.post(fleet.replicas[0].url + path, json={**body, **given}, timeout=WAIT_S)
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        numbers.append(usage.get("prompt_tokens", usage.get("input_tokens")))
    assert numbers[0] != numbers[1] == 77


def test_routes_that_the_proxy_does_not_know_are_passed_through(fleet: Fleet) -> None:
    """vLLM's list of models comes through the proxy; routes outside /v1, and those that render, do not."""
    with fleet.client("ann") as ann:
        assert [model.id for model in ann.models.list()] == [MODEL]
        with pytest.raises(openai.PermissionDeniedError):
            ann.post("/chat/completions/render", body={"messages": []}, cast_to=object)
        with pytest.raises(openai.NotFoundError):
            ann.get("/../metrics-of-vllm", cast_to=object)


def test_errors_are_vllms_own(fleet: Fleet) -> None:
    """What vLLM refuses is refused in its own words, and the next request is served."""
    with fleet.client("ann") as ann:
        with pytest.raises(openai.BadRequestError, match="context length"):
            ask(ann, [{"role": "user", "content": "one two three " * 5000}])
        assert ask(ann, [{"role": "user", "content": "still there?"}])[1] > 0


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "words"),
    [
        ("", {"max_tokens": 0, "messages": []}, 400, "invalid_request_error", ""),
        ("", {"model": MODEL, "max_tokens": 5}, 400, "invalid_request_error", "messages: "),
        ("/count_tokens", {"model": MODEL}, 400, "invalid_request_error", "messages: "),
        ("", TOO_LONG, 400, "invalid_request_error", "prompt is too long: "),
        ("", TOO_LONG | {"stream": True}, 400, "invalid_request_error", "prompt is too long: "),
        ("", TOO_LONG | {"model": "nothing"}, 404, "not_found_error", ""),
        ("/nothing", {}, 404, "not_found_error", ""),
    ],
)
def test_errors_below_messages_are_in_anthropics_words(
    fleet: Fleet, path: str, body: dict[str, Any], status: int, kind: str, words: str
) -> None:
    """Whichever part of vLLM they come from."""
    headers = {"x-api-key": EmbeddedServer.key("ann")}
    answer = httpx.post(f"{fleet.proxy.url}/v1/messages{path}", json=body, headers=headers, timeout=WAIT_S)
    document = answer.json()
    assert (answer.status_code, document["type"], document["error"]["type"]) == (status, "error", kind)
    assert document["error"]["message"].startswith(words)
    assert document["request_id"] == answer.headers["request-id"]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        # As xgrammar does not support `multipleOf`, llguidance gets the whole schema, and crashes.
        (
            {"type": "object", "properties": {"a": _CRASHING, "b": {"type": "integer", "multipleOf": 3}}},
            "its compiler failed",
        ),
        ({"type": "array", "minItems": 2**40, "items": {"enum": [1]}}, "more than"),
        ({"$ref": "#/$defs/a", "$defs": {"a": _ENDLESS}}, "without end"),
    ],
)
def test_schemas_that_would_end_vllm_do_not_reach_it(
    fleet: Fleet, schema: dict[str, Any], reason: str
) -> None:
    """They are refused in the proxy's words, and vLLM answers the next request, as JSON."""
    # The process that compiles may still start.
    with fleet.client("ann").with_options(max_retries=10) as ann:

        def answer(schema: dict[str, Any]) -> str:
            named: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            said = ann.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "A number?"}],
                response_format=named,
                max_tokens=20,
                temperature=0,
            )
            return str(said.choices[0].message.content)

        with pytest.raises(openai.BadRequestError, match=reason):
            answer(schema)
        assert json.loads(answer({"enum": [7]})) == 7
        assert json.loads(answer({"type": "integer", "enum": [6, 9], "multipleOf": 3})) in (6, 9)
