"""What a client may not say is cut out of a body, what is the proxy's is added, and nothing else changes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshare.errors import RequestError
from proxy.json_text import parse_object
from proxy.relay.media_parts import PROMPTS
from proxy.relay.sanitize import sanitized, with_members

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)
FORBIDDEN = ["kvshare", "cache_salt", "kv_transfer_params", "ec_transfer_params"]
names = st.sampled_from(["a", "b", "\u00e9", 'quo"te', "{", "", *FORBIDDEN])
bodies = st.dictionaries(names, values, max_size=6)


@settings(deadline=None)
@given(bodies, st.sampled_from([None, 0, 2]), st.booleans())
def test_what_is_not_touched_stays_as_it_was(
    body: dict[str, object], indent: int | None, ascii_only: bool
) -> None:
    """Without a member that a client may not send, the result is the very bytes."""
    allowed = {name: value for name, value in body.items() if name not in FORBIDDEN}
    try:
        raw = json.dumps(allowed, indent=indent, ensure_ascii=ascii_only).encode()
    except UnicodeEncodeError:
        return
    assert sanitized(raw, parse_object(raw)) == raw
    assert with_members(raw, {}) == raw


@settings(deadline=None)
@given(bodies, st.dictionaries(st.sampled_from(["x", "y"]), values, max_size=2), st.sampled_from([None, 2]))
def test_members_are_cut_and_added(
    body: dict[str, object], added: dict[str, object], indent: int | None
) -> None:
    """The result is JSON with exactly the members that should be there."""
    raw = json.dumps(body, indent=indent).encode() + b"\r\n"
    clean = sanitized(raw, parse_object(raw))
    expected = {name: value for name, value in body.items() if name not in FORBIDDEN} | added
    members = {name: json.dumps(value).encode() for name, value in added.items()}
    assert json.loads(with_members(clean, members)) == expected


@pytest.mark.parametrize("kind", ["image_embeds", "audio_embeds", "video_embeds"])
@pytest.mark.parametrize("typed", [True, False])
def test_embeddings_in_place_of_media_are_refused(kind: str, typed: bool) -> None:
    """With its type or without, as vLLM reads them; a text that only mentions them passes."""
    part = {kind: "AAAA"} | ({"type": kind} if typed else {})
    for role, before in (("user", [{"type": "text", "text": kind}]), ("system", [])):
        body = {"messages": [{"role": "user", "content": kind}, {"role": role, "content": [*before, part]}]}
        with pytest.raises(RequestError, match=kind):
            sanitized(json.dumps(body).encode(), body)
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": kind}]}, {"content": None}, 3]}
    raw = json.dumps(body).encode()
    assert sanitized(raw, body) == raw


@pytest.mark.parametrize("are_listed", [False, True])
def test_ids_of_media_are_removed(are_listed: bool) -> None:
    """vLLM takes two media with one id for the same, whoever sent them. Calls of tools keep theirs."""
    part: dict[str, object] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    call = {"role": "assistant", "tool_calls": [{"uuid": "1"}], "content": "uuid"}
    named = [{"role": "user", "content": [{**part, "uuid": "cat"}, {"image_url": "x", "uuid": None}]}, call]
    plain = [{"role": "user", "content": [part, {"image_url": "x"}]}, call]
    body = {"messages": [named, named] if are_listed else named, "uuid": 1}
    found = json.loads(sanitized(json.dumps(body).encode(), body))
    assert found == {"messages": [plain, plain] if are_listed else plain, "uuid": 1}


def test_a_uuid_that_is_no_mediums_stays() -> None:
    """Arguments and results of tools, their schemas, documents of a chat, states and texts may have one."""
    named = {"uuid": "1", "image_embeds": "AAAA", "content": {"uuid": "2"}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {**named, "ids": [named]}}}
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {**named, "content": [named]}}
    tool = {"name": "f", "parameters": {"properties": {"uuid": {"type": "string"}, "image_embeds": {}}}}
    body = {
        "messages": [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "assistant", "content": [use, {"type": "text", "text": json.dumps(named)}, "uuid", 3]},
            {"role": "tool", "content": json.dumps(named), "uuid": "3"},
        ],
        "input": [
            {"type": "custom_tool_call", "input": named, "arguments": [named]},
            {"type": "function_call_output", "output": json.dumps(named)},
            [1, 2, [3]],
        ],
        "documents": [named, "uuid"],
        "tools": [tool, {"content": [named]}],
        "metadata": {"content": [named]},
        "state": {"content": [named]},
    }
    raw = json.dumps(body, indent=1).encode()
    assert sanitized(raw, body) is raw


def test_documents_of_a_chat_are_the_clients() -> None:
    """Only what is ranked may hold media there; messages of the same body lose their ids."""
    part = {"type": "image_url", "image_url": "x", "uuid": "cat"}
    documents = [{"title": "t", "content": [{"uuid": "9", "text": "t", "image_embeds": "no medium"}]}]
    turn = {"role": "user", "content": [part]}
    body = {"messages": [turn], "documents": documents}
    found = json.loads(sanitized(None, body, path="/v1/chat/completions"))
    assert found["documents"] == documents
    assert "uuid" not in found["messages"][0]["content"][0]
    ranked = {"query": "q", "documents": [turn]}
    assert "uuid" not in sanitized(None, ranked, path="/v1/rerank").decode()


@settings(deadline=None)
@given(st.lists(st.sampled_from(["list", "content", "output"]), max_size=8), st.sampled_from(PROMPTS))
def test_no_nesting_hides_a_part(nests: list[str], name: str) -> None:
    def nested(part: dict[str, object]) -> dict[str, object]:
        value: object = [part]
        for nest in nests:
            value = [value if nest == "list" else {nest: value, "type": "x"}]
        return {name: [{"content": value}], "model": "m"}

    body = nested({"type": "image_url", "image_url": "x", "uuid": "cat"})
    before = json.dumps(body).encode()
    assert json.loads(sanitized(before, body)) == nested({"type": "image_url", "image_url": "x"})
    assert json.dumps(body).encode() == before
    with pytest.raises(RequestError, match="audio_embeds") as refused:
        sanitized(None, nested({"audio_embeds": "AAAA"}))
    assert refused.value.param == name


def test_a_part_below_too_many_others_is_refused() -> None:
    content: list[object] = [{"uuid": "cat"}]
    for _ in range(5000):
        content = [{"content": content}]
    with pytest.raises(RequestError, match="deeply"):
        sanitized(b"{}", {"messages": [{"content": content}]})


def test_embeddings_are_refused_in_several_chats_at_once() -> None:
    """One of vLLM's routes takes lists of messages."""
    body = {"messages": [[{"role": "user", "content": [{"image_embeds": "AAAA"}]}]]}
    with pytest.raises(RequestError, match="image_embeds"):
        sanitized(None, body)


def test_every_one_of_equal_names_is_cut() -> None:
    """Also the one that is written in another way; what only looks like one of them stays."""
    raw = b'{"a":1, "cache_salt" : 2,"b":3,"cache\\u005fsalt":[{"kv":1}], "c":{"cache_salt":1} }'
    clean = sanitized(raw, parse_object(raw))
    assert json.loads(clean) == {"a": 1, "b": 3, "c": {"cache_salt": 1}}
    assert clean.count(b"salt") == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"3",
        b'"x"',
        b"{",
        b'{"a"}',
        b'{"a":}',
        b'{"a":1,}',
        b'{,"a":1}',
        b'{"a":1 "b":2}',
        b'{"a":1}}',
        b"{'a':1}",
        b'{1:"a"}',
        b'\xef\xbb\xbf{"a":1}',
        b'{"a":"\xff"}',
        '{"a":1}'.encode("utf-16"),
        b'{"a":' + b"[" * 100_000,
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"kvshare": null, "a": NaN}',
        b'{"kvshare": null, "a": "\\ud800"}',
    ],
)
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    """What cannot be read cannot be searched."""
    with pytest.raises(RequestError):
        parse_object(raw)
