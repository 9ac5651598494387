"""What passes the proxy in front of vLLM: bytes as they are, under the owner's salt, and nothing else."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletionMessageParam
from yarl import URL

from kvshare.namespace import Owner
from kvshare.reasons import Reason
from kvshare.vllm_protocol.salts import owner_salt
from tests.fake_vllm import Behaviour, FakeVllm, running_vllm
from tests.proxy.conftest import key_of, key_settings
from tests.proxy.relay.relay_server import LOCAL_SALT, Relay, chat_body, running_relay


async def test_the_body_arrives_byte_for_byte_with_two_members_more(relay: Relay, vllm: FakeVllm) -> None:
    """Spaces, order, escapes and numbers stay; salt and ticket stand at the end."""
    raw = (
        b'{ "model" :"tiny",\n "temperature": 1.10, "messages":[{"role":"user","content":"'
        + "é\\u00e9 ".encode() * 40
        + b'"}] , "unknown": {"kv_transfer_params": 1} }\r\n'
    )
    response = await relay.send("/v1/chat/completions", raw)
    assert response.status == 200
    (seen,) = vllm.generated
    head, _, tail = raw.rpartition(b"}")
    assert seen.raw.startswith(head)
    assert seen.raw.endswith(b"}" + tail)
    assert set(seen.body) - set(json.loads(raw)) == {"cache_salt", "kv_transfer_params"}


async def test_a_stream_is_relayed_untouched(relay: Relay, vllm: FakeVllm) -> None:
    """Every byte that vLLM sent, with its headers, and nothing of ours."""
    vllm.behaviour.headers = {"X-Vllm": "yes", "Connection": "X-Hop", "X-Hop": "no"}
    response = await relay.send("/v1/chat/completions", chat_body("Rome", stream=True))
    assert (response.status, await response.read()) == (200, vllm.sent)
    assert response.headers["X-Vllm"] == "yes"
    assert "X-Hop" not in response.headers


async def test_the_openai_client_is_served(relay: Relay, vllm: FakeVllm) -> None:
    """Whole and streamed."""
    async with relay.client() as client:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello " * 20}]
        stream = await client.chat.completions.create(model="tiny", messages=messages, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == vllm.behaviour.answer
        whole = await client.chat.completions.create(model="tiny", messages=messages)
        assert whole.id == "x"
        assert [model.id async for model in client.models.list()] == ["tiny"]


async def test_an_answer_that_is_an_error_is_vllms_own(relay: Relay, vllm: FakeVllm) -> None:
    """Status and body of a refusal are relayed; nobody waits for its ticket."""
    vllm.behaviour.status = 418
    response = await relay.send("/v1/chat/completions", chat_body("Rome"))
    assert (response.status, await response.json()) == (418, {"object": "error", "message": "no"})
    assert relay.num_pending_tickets == 0


async def test_what_a_client_may_not_say_never_arrives(relay: Relay, vllm: FakeVllm) -> None:
    """Its own ticket is dropped, also twice, escaped, or beside; its salt is mixed into its owner's."""
    raw = (
        b'{"kv_transfer_params":{"kvshare":{"copies":[[1,0,9,0,0]]}},"cache_salt":"globex","model":"tiny",'
        b'"messages":[{"role":"user","content":"hi"}],"kvshare":{"mode":"exact"},"vllm_xargs":{"a":1,'
        b'"kv_transfer_params":"x"},"kv_transfer\\u005fparams":{"do_remote_prefill":true}}'
    )
    await relay.send("/v1/chat/completions", raw)
    (seen,) = vllm.generated
    assert seen.ticket is not None
    assert seen.ticket.copies == ()  # the proxy's own
    assert set(seen.body["kv_transfer_params"]) == {"kvshare", "prompt_token_ids"}
    assert seen.raw.count(b"kv_transfer") == 1
    assert seen.body["vllm_xargs"] == {"a": 1}
    assert "kvshare" not in seen.body
    assert seen.body["cache_salt"] == owner_salt(Owner("local", "tenant").divided("globex"))
    assert seen.raw.count(b"cache_salt") == 1


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions/batch", "/v1/something/new"])
async def test_other_routes_are_passed_through_scrubbed_and_salted(
    relay: Relay, vllm: FakeVllm, path: str
) -> None:
    """Known to us or not: same path, same query, same answer; no word on whose KV it is."""
    body = {"input": "hello", "kv_transfer_params": {"kvshare": {}}, "cache_salt": "theirs"}
    response = await relay.send(f"{path}?a=%20b", body)
    assert (response.status, response.headers["X-Vllm"]) == (203, "yes")
    (seen,) = vllm.seen
    assert (seen.method, seen.path.replace("+", "%20")) == ("POST", f"{path}?a=%20b")
    assert seen.body == {
        "input": "hello",
        "cache_salt": owner_salt(Owner("local", "tenant").divided("theirs")),
    }


async def test_a_body_without_members_of_its_own_is_salted_too(relay: Relay, vllm: FakeVllm) -> None:
    """Also where everything in it had to go."""
    await relay.send("/v1/responses", {})
    await relay.send("/v1/responses", {"cache_salt": None})
    assert [seen.body for seen in vllm.seen] == [{"cache_salt": LOCAL_SALT}] * 2


async def test_other_methods_are_passed_through(relay: Relay, vllm: FakeVllm) -> None:
    """GET and DELETE, without a body."""
    assert (await relay.send("/v1/responses/r1", method="GET")).status == 203
    assert (await relay.send("/v1/responses/r1", method="DELETE")).status == 203
    assert [(seen.method, seen.raw) for seen in vllm.seen] == [("GET", b""), ("DELETE", b"")]


@pytest.mark.parametrize(
    "path",
    ["/metrics/../tokenize", "/v1/%2e%2e/tokenize", "/v1/..%2ftokenize", "/v1/%252e%252e/x", "/tokenize"],
)
async def test_nothing_but_v1_is_passed_through(relay: Relay, vllm: FakeVllm, path: str) -> None:
    """However the path is written."""
    async with relay.http.post(URL(relay.url + path, encoded=True), json={"prompt": "x"}) as response:
        assert response.status in (400, 404)
    assert not vllm.seen


async def test_forms_are_passed_through_unless_they_name_kv(relay: Relay, vllm: FakeVllm) -> None:
    """Audio comes as a form; other types of body are refused, as they cannot be searched."""
    kind = "multipart/form-data; boundary=x"
    assert (await relay.send("/v1/audio/transcriptions", b"--x--", Content_Type=kind)).status == 203
    assert vllm.seen[0].raw == b"--x--"
    named = b'--x\r\nContent-Disposition: form-data; name="cache_salt"\r\n\r\na\r\n--x--'
    assert (await relay.send("/v1/audio/transcriptions", named, Content_Type=kind)).status == 400
    assert (await relay.send("/v1/audio/transcriptions", b"abc", Content_Type="text/plain")).status == 415
    assert (await relay.send("/v1/responses", '{"a": 1}'.encode("utf-16"))).status == 400
    assert len(vllm.seen) == 1


async def test_the_clients_key_stays_here(
    vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gets its own key; an unknown client gets nothing; the request id is passed on."""
    monkeypatch.setenv("KVSHARE_VLLM_API_KEY", "of-vllm")
    async with running_relay(tmp_path, vllm, auth__keys=key_settings()) as relay:
        assert (await relay.send("/v1/responses", {})).status == 401
        await relay.send("/v1/responses", {}, Authorization=f"Bearer {key_of('alice')}", X_Api_Key="secret")
        response = await relay.send(
            "/v1/chat/completions",
            chat_body("Rome"),
            Authorization=f"Bearer {key_of('alice')}",
            X_Request_Id="mine",
        )
    assert response.headers["X-Request-Id"] == "mine"
    assert {seen.headers["Authorization"] for seen in vllm.seen} == {"Bearer of-vllm"}
    assert "secret" not in str([seen.headers for seen in vllm.seen])
    assert vllm.seen[-1].headers["X-Request-Id"] == "mine"


async def test_adapters_are_loaded_by_admins_only(vllm: FakeVllm, tmp_path: Path) -> None:
    """It makes vLLM read files that the caller names."""
    async with running_relay(tmp_path, vllm, auth__keys=key_settings()) as relay:
        for name, status in (("alice", 403), ("root", 203)):
            response = await relay.send(
                "/v1/load_lora_adapter", {"lora_name": "x"}, Authorization=f"Bearer {key_of(name)}"
            )
            assert response.status == status
    (seen,) = vllm.seen
    assert seen.body == {"lora_name": "x"}


async def test_wrong_options_of_ours_are_refused(relay: Relay, vllm: FakeVllm) -> None:
    """They are addressed to the proxy, so it says what is wrong with them."""
    response = await relay.send("/v1/chat/completions", chat_body("Rome", kvshare={"mode": "maybe"}))
    assert (response.status, (await response.json())["error"]["param"]) == (400, "kvshare.mode")
    assert not vllm.seen


@pytest.mark.parametrize("raw", [b"{", b'{"a":1,}', b"\xff", b'{"a" 1}', b'{"a":1}x', b"[" * 100_000])
async def test_what_is_no_json_is_refused(relay: Relay, vllm: FakeVllm, raw: bytes) -> None:
    """What cannot be searched is not passed on."""
    response = await relay.send("/v1/chat/completions", raw)
    assert response.status == 400
    assert not vllm.seen


@pytest.mark.parametrize(
    ("path", "extra", "reason"),
    [
        ("/v1/chat/completions", {"model": "an-adapter"}, "adapter"),
        ("/v1/chat/completions", {"prompt_logprobs": 1}, "prompt_logprobs"),
        ("/v1/chat/completions", {"use_beam_search": True}, "beam_search"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            "multimodal",
        ),
        ("/v1/chat/completions", {"messages": 3}, "malformed"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "several_prompts"),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, "suffix"),
    ],
)
async def test_what_cannot_be_planned_is_relayed_as_it_is(
    tmp_path: Path, path: str, extra: dict[str, object], reason: str
) -> None:
    """With its owner's salt, and a count of why."""
    async with (
        running_vllm(Behaviour(adapters=("an-adapter",))) as vllm,
        running_relay(tmp_path, vllm) as relay,
    ):
        body = chat_body("Rome", **extra)
        assert (await relay.send(path, body)).status == 200
        (seen,) = vllm.generated
        assert seen.body == {**body, "cache_salt": LOCAL_SALT}
        assert relay.counts.unshared[Reason(reason)] == 1


async def test_metrics_and_readiness_speak_of_replicas(relay: Relay, vllm: FakeVllm) -> None:
    """Gauges by replica; /ready says how many serve and share."""
    await relay.chat("Rome")
    ready = await relay.send("/ready", method="GET")
    assert await ready.json() == {"status": "ready", "detail": "1 of 1 replicas serve, 1 share"}
    text = await (await relay.send("/metrics", method="GET")).text()
    name = vllm.url.removeprefix("http://")
    assert f'kvshare_replica_up{{replica="{name}"}} 1.0' in text
    assert f'kvshare_replica_segments{{replica="{name}"}} 2.0' in text
    assert "kvshare_generated_tokens" not in text  # vLLM counts them
    assert 'kvshare_plans_executed_total{executed="full",planned="full",reason=""} 1.0' in text
    for stage, seconds in (("pass", 0.01), ("hidden", 0.0)):
        assert f'kvshare_vllm_stage_seconds_total{{stage="{stage}"}} {seconds}' in text


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]
)
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ('"logit_bias": {"1": NaN}', "NaN is not a number"),
        ('"temperature": Infinity', "Infinity is not a number"),
        ('"top_p": -Infinity', "-Infinity is not a number"),
        ('"temperature": 1e999', "a number that cannot be represented"),
        (r'"user": "\ud800"', "a lone surrogate"),
        (r'"\udfff": 1', "a lone surrogate"),
        ('"user": "a\tb"', "found the control character U+0009"),
        ('"user": "a",', "found '}'"),
    ],
)
async def test_what_is_no_strict_json_does_not_reach_vllm(
    relay: Relay, vllm: FakeVllm, path: str, wrong: str, words: str
) -> None:
    """The same words as the embedded engine's, and neither a rendering nor a request of vLLM."""
    body = json.dumps(chat_body("Rome") | {"prompt": "a", "input": "a", "max_tokens": 5})
    response = await relay.send(path, f"{body[:-1]}, {wrong}}}".encode())
    assert response.status == 400
    assert words in (await response.json())["error"]["message"]
    assert not vllm.seen
    assert not vllm.rendered


async def test_a_name_in_escapes_is_the_name(relay: Relay, vllm: FakeVllm) -> None:
    """What must not be named cannot be named by escapes either."""
    raw = (
        json.dumps(chat_body("Rome"))[:-1] + r', "kv_tr\u0061nsfer_params": {"x": 1}, "c\u0061che_salt": "x"}'
    )
    assert (await relay.send("/v1/chat/completions", raw.encode())).status == 200
    (seen,) = vllm.generated
    assert b"u0061" not in seen.raw
    assert seen.body["kv_transfer_params"].keys() == {"kvshare", "prompt_token_ids"}


@pytest.mark.parametrize("coding", ["gzip", "gzip, x-gzip", "identity"])
async def test_a_compressed_body_reaches_vllm_as_it_was(relay: Relay, vllm: FakeVllm, coding: str) -> None:
    """Without the header, and planned like any other."""
    raw = packed = json.dumps(chat_body("Rome")).encode()
    for _ in range(coding.count("gzip")):
        packed = gzip.compress(packed)
    assert (await relay.send("/v1/chat/completions", packed, Content_Encoding=coding)).status == 200
    (seen,) = vllm.generated
    assert seen.raw.startswith(raw[:-1])
    assert "Content-Encoding" not in seen.headers
    assert vllm.rendered


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/embeddings"])
@pytest.mark.parametrize(("coding", "status"), [("gzip", 400), ("br", 400), ("foo", 415), ("gzip, foo", 415)])
async def test_a_body_that_cannot_be_unpacked_does_not_reach_vllm(
    relay: Relay, vllm: FakeVllm, path: str, coding: str, status: int
) -> None:
    """Whatever the route."""
    response = await relay.send(path, json.dumps(chat_body("Rome")).encode(), Content_Encoding=coding)
    assert response.status == status
    assert not vllm.seen
