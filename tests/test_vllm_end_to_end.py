"""
Production in small: two real `vllm serve` with the connector, the real proxy before them, the real `openai`
client, and the demo model, which can tell right answers from wrong ones.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import yaml

from kvshare.replay.live import LIVE_POLICIES, LiveOptions, replay_live
from kvshare.replay.options import ReplayOptions
from kvshare.replay.policies import parse_policies
from kvshare.settings import load_settings
from kvshare.vllm_protocol.messages import PROTOCOL
from kvshare_lab.demo_model.pairs import Pair, near_duplicate_pairs
from kvshare_lab.vllm.servers import Server, VllmOptions, free_ports, new_token, running, shared_vllm
from tests.conftest import KEYS
from tests.conftest import Server as EmbeddedServer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="vLLM's CPU wheel is built for Linux"),
]

MODEL = "bench"
TOOL_PARSER = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
# The demo model's own template knows no tools.
TOOLS_IN_TEMPLATE = "{% if tools %}<|system|>\n{{ tools[0].function.name }}<|end|>{% endif %}"


def log_tail(server: Server) -> str:
    return server.log_path.read_text(errors="replace")[-4000:]


@dataclass(frozen=True)
class Fleet:
    """Two replicas and the proxy before them."""

    replicas: tuple[Server, Server]
    proxy: Server

    def client(self, name: str, url: str | None = None) -> openai.OpenAI:
        base = url if url is not None else self.proxy.url
        return openai.OpenAI(
            base_url=f"{base}/v1", api_key=EmbeddedServer.key(name), max_retries=0, timeout=120
        )

    def why(self) -> str:
        """What the proxy counted, for the message of a failure."""
        counted = (
            f"{name} {value:g}" for name, value in self.counters().items() if value and "_bucket" not in name
        )
        return "\n".join([*counted, log_tail(self.proxy)])

    def counters(self) -> dict[str, float]:
        """The proxy's metrics by name and labels."""
        import urllib.request

        request = urllib.request.Request(
            f"{self.proxy.url}/metrics", headers={"Authorization": f"Bearer {EmbeddedServer.key('root')}"}
        )
        with urllib.request.urlopen(request, timeout=10) as reply:
            lines = reply.read().decode().splitlines()
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
        }


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One start for all tests of this file."""
    from kvshare.demo.export import export

    folder = tmp_path_factory.mktemp("fleet")
    model = export(folder / "demo")
    template = model / "chat_template.jinja"
    template.write_text(
        template.read_text().replace("<|begin|>", f"<|begin|>{TOOLS_IN_TEMPLATE}", 1), encoding="utf-8"
    )
    token = new_token()
    options = VllmOptions(
        dtype="float32", max_model_len=2048, max_num_batched_tokens=2048, enforce_eager=True
    )
    replicas = []
    for name in ("one", "two"):
        (folder / name).mkdir()
        replica = shared_vllm(model, folder / name, options, kv_bytes=1 << 29, token=token)
        replica.command = [*replica.command, *TOOL_PARSER]
        replicas.append(replica)
    proxy = proxy_with_keys(replicas, folder, token)
    with running(replicas), running([proxy]):
        yield Fleet((replicas[0], replicas[1]), proxy)


def proxy_with_keys(replicas: list[Server], folder: Path, token: str) -> Server:
    """`kvshare serve --engine vllm` with several tenants."""
    import hashlib

    keys = [
        {
            "name": name,
            "sha256": hashlib.sha256(EmbeddedServer.key(name).encode()).hexdigest(),
            "tenant": tenant,
            "scope": scope,
            "role": role,
        }
        for name, (tenant, scope, role) in KEYS.items()
    ]
    config = folder / "config.yaml"
    # What is fast on a busy machine is no question here: every plan that is right is made.
    settings = {"auth": {"keys": keys}, "cost": {"min_saved_s": -3600.0}, "index": {"dense": False}}
    config.write_text(yaml.safe_dump(settings))
    port = free_ports(1)[0]
    ends = [
        text
        for replica in replicas
        for text in ("--vllm-url", replica.url, "--vllm-control-url", str(replica.control_url))
    ]
    return Server(
        name="the proxy",
        command=[
            *(sys.executable, "-m", "kvshare.cli.main", "serve", "--engine", "vllm"),
            *("--port", str(port), "--config", str(config), "--store", str(folder / "store"), *ends),
        ],
        url=f"http://127.0.0.1:{port}",
        log_path=folder / "proxy.log",
        environment={"HF_HUB_OFFLINE": "1", "KVSHARE_VLLM_TOKEN": token},
        ready_path="/ready",
    )


def pair(seed: int) -> Pair:
    return next(near_duplicate_pairs(seed=seed, count=1))


def ask(client: openai.OpenAI, messages: list[dict[str, str]], **extra: Any) -> tuple[str, int, int]:
    """The answer, the prompt's tokens, and how many of them were not computed."""
    reply = client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]  # plain dictionaries
        temperature=0,
        max_tokens=12,
        extra_body=extra or None,
    )
    assert reply.usage is not None
    details = reply.usage.prompt_tokens_details
    cached = 0 if details is None else details.cached_tokens or 0
    return (reply.choices[0].message.content or "").strip(), reply.usage.prompt_tokens, cached


def settled(fleet: Fleet, before: float) -> None:
    """Wait until the proxy has kept what was asked since it had `before` prompts."""
    deadline = time.monotonic() + 30
    while num_nodes(fleet) <= before:
        assert time.monotonic() < deadline, log_tail(fleet.proxy)
        time.sleep(0.05)
    time.sleep(0.5)  # a prompt is in the tree a little before it is in the index


def num_nodes(fleet: Fleet) -> float:
    return next(value for name, value in fleet.counters().items() if name.startswith("kvshare_tree_nodes"))


def rested(fleet: Fleet) -> float:
    """How many prompts the proxy has, once no more come: on a busy machine one may still be on its way."""
    before = -1.0
    while (now := num_nodes(fleet)) != before:
        before = now
        time.sleep(1.0)
    return now


def donate(fleet: Fleet, client: openai.OpenAI, messages: list[dict[str, str]]) -> None:
    before = rested(fleet)
    ask(client, messages)
    settled(fleet, before)


@pytest.mark.parametrize("seed", range(1, 7))
def test_a_near_duplicate_is_answered_right_from_another_prompts_kv(fleet: Fleet, seed: int) -> None:
    """Most of the second user's form is not computed, and the answer is that of his own values."""
    forms = pair(seed)
    with fleet.client("ann") as ann, fleet.client("bob") as bob:
        donate(fleet, ann, forms.donor_messages)
        answer, num_tokens, num_cached = ask(bob, forms.recipient_messages)
    assert answer == forms.answer
    assert num_cached > 0.4 * num_tokens, fleet.why()


@dataclass(frozen=True)
class Reply:
    """What a client of any route sees of an answer."""

    text: str
    num_tokens: int  # of the prompt
    num_cached: int
    decision: str | None  # None: it was not to be shared


def ask_messages(fleet: Fleet, messages: list[dict[str, str]], *, stream: bool, **kvshare: Any) -> Reply:
    """By POST /v1/messages and Anthropic's client, with a tool."""
    system = "\n".join(message["content"] for message in messages if message["role"] == "system")
    tool = {"name": "look_up", "input_schema": {"type": "object", "properties": {}}}
    with anthropic.Anthropic(
        base_url=fleet.proxy.url, api_key=EmbeddedServer.key("ann"), max_retries=0, timeout=120
    ) as client:
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 12,
            "system": system,
            "messages": [message for message in messages if message["role"] != "system"],
            "tools": [tool],
            "stream": stream,
            "extra_body": {"temperature": 0, "kvshare": kvshare},
        }
        raw: Any = client.messages.with_raw_response.create(**body)  # of a message or of a stream
        if stream:
            events = [event.model_dump() for event in raw.parse()]
            text = "".join(event["delta"].get("text", "") for event in events if "delta" in event)
            (usage,) = (event["usage"] for event in events if event["type"] == "message_delta")
        else:
            text, usage = raw.parse().content[0].text, raw.parse().usage.model_dump()
    num_cached = usage["cache_read_input_tokens"] or 0
    num_tokens = usage["input_tokens"] + num_cached + (usage["cache_creation_input_tokens"] or 0)
    return Reply(text, num_tokens, num_cached, raw.headers.get("X-KVShare-Decision"))


def ask_responses(fleet: Fleet, messages: list[dict[str, str]], *, stream: bool, **kvshare: Any) -> Reply:
    """By POST /v1/responses and OpenAI's client, with a tool."""
    tool = {"type": "function", "name": "look_up", "parameters": {"type": "object", "properties": {}}}
    with fleet.client("ann") as client:
        body: dict[str, Any] = {
            "model": MODEL,
            "max_output_tokens": 12,
            "input": messages,
            "tools": [tool],
            "temperature": 0,
            "stream": stream,
            "extra_body": {"kvshare": kvshare},
        }
        raw: Any = client.responses.with_raw_response.create(**body)  # of a response or of a stream
        if stream:
            *_, last = raw.parse()
            assert last.type == "response.completed"
            response = last.response
        else:
            response = raw.parse()
    usage = response.usage
    cached = usage.input_tokens_details.cached_tokens
    return Reply(response.output_text, usage.input_tokens, cached, raw.headers.get("X-KVShare-Decision"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "seed"), [(ask_messages, 50), (ask_responses, 60)])
def test_messages_and_responses_are_shared_like_chats(
    fleet: Fleet, asked: Callable[..., Reply], seed: int, stream: bool
) -> None:
    """Through the clients of both routes, tools in the body: copied, and answered as without sharing."""
    forms = pair(seed + stream)
    before = rested(fleet)
    asked(fleet, forms.donor_messages, stream=stream)
    settled(fleet, before)
    shared = asked(fleet, forms.recipient_messages, stream=stream)
    full = asked(fleet, forms.recipient_messages, stream=stream, mode="off")
    assert shared.text == full.text
    assert (shared.decision, full.decision) == ("approx", None)
    assert shared.num_tokens == full.num_tokens
    assert shared.num_cached > 0.3 * shared.num_tokens, fleet.why()


def test_another_tenant_gets_nothing_of_it(fleet: Fleet) -> None:
    """Neither from segments nor from vLLM's own prefix cache."""
    forms = pair(11)
    with fleet.client("ann") as ann, fleet.client("cid") as cid, fleet.client("eve") as eve:
        donate(fleet, ann, forms.donor_messages)
        # A question each: the second one of a tenant may be served from its own first.
        assert ask(cid, forms.recipient_messages)[2] == 0
        assert ask(eve, forms.donor_messages)[2] == 0


def test_a_log_is_replayed_through_vllm(fleet: Fleet, tmp_path: Path) -> None:
    """`kvshare replay --engine`: real times, and what vLLM says it had beside what was predicted."""
    forms = pair(31)
    log = tmp_path / "log.jsonl"
    log.write_text(
        "".join(json.dumps({"messages": m}) + "\n" for m in (forms.donor_messages, forms.recipient_messages))
    )
    options = ReplayOptions(
        paths=[log],
        out=tmp_path,
        policies=parse_policies(f"{LIVE_POLICIES},oracle"),
        settings=load_settings(),
        tokenizer="demo",
    )
    live = LiveOptions(fleet.proxy.url, key=EmbeddedServer.key("ann"), concurrency=1, max_tokens=2)
    with fleet.client("ann") as ann:
        donate(fleet, ann, forms.donor_messages)
    document = replay_live(options, live)
    assert document["errors"] == {}
    assert document["ttft_ms"]["p50"] > 0
    predicted = {arm["arm"]: arm["token_hit_rate"] for arm in document["predicted"]}
    assert predicted["oracle"] > 0.3
    assert document["reported"]["token_hit_rate"] > 0.4, fleet.why()


def test_what_a_client_says_about_kv_is_ignored(fleet: Fleet) -> None:
    """Salts and transfer parameters of a body do not reach vLLM as they are."""
    messages = pair(12).donor_messages
    stolen = {
        "cache_salt": "kvshare-private-somebody",
        "kv_transfer_params": {"kvshare": {"protocol": PROTOCOL, "copies": [[1, 0, 100, 0, 0]]}},
    }
    with fleet.client("ann") as ann, fleet.client("dot") as dot:  # new here
        donate(fleet, ann, messages)
        assert ask(dot, messages, **stolen)[2] == 0


@pytest.mark.parametrize("seed", [14, 15])
def test_a_clients_salt_divides_what_its_key_shares(fleet: Fleet, seed: int) -> None:
    """vLLM's own prefix cache for an equal prompt, and copies for a near-duplicate: a to a, not a to b."""
    forms, is_equal = pair(seed), seed == 14
    messages = forms.donor_messages if is_equal else forms.recipient_messages
    one, other = (f"{seed} {name}" for name in "ab")  # new: other tests' forms are near-duplicates, too
    with fleet.client("ann") as ann, fleet.client("bob") as bob:
        before = rested(fleet)
        ask(ann, forms.donor_messages, cache_salt=one)
        settled(fleet, before)
        assert ask(bob, messages, cache_salt=other)[2] == 0
        answer, num_tokens, num_cached = ask(bob, messages, cache_salt=one)
    assert is_equal or answer == forms.answer
    assert num_cached > 0.4 * num_tokens, fleet.why()
    with fleet.client("ann") as ann:
        for salt in ("", 5, "x" * 129):
            with pytest.raises(openai.BadRequestError, match="cache_salt"):
                ask(ann, messages, cache_salt=salt)


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
        relayed, own = chunks(ann), chunks(direct)
    for chunk in (relayed[-1], own[-1]):
        chunk["usage"].pop("prompt_tokens_details")
    assert relayed == own


def test_a_request_goes_where_its_donor_is(fleet: Fleet) -> None:
    """Each replica has its own prompts; every near-duplicate finds the one that has its donor."""
    pairs = [pair(20 + seed) for seed in range(4)]
    with fleet.client("ann") as ann:
        for forms in pairs:
            donate(fleet, ann, forms.donor_messages)
        for forms in pairs:
            answer, num_tokens, num_cached = ask(ann, forms.recipient_messages)
            assert answer == forms.answer
            assert num_cached > 0.3 * num_tokens  # a model that nobody measured: much is repaired
    served = [
        value for name, value in fleet.counters().items() if name.startswith("kvshare_replica_segments")
    ]
    assert len(served) == 2
    assert all(served)


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


TOO_LONG = {
    "model": MODEL,
    "max_tokens": 5,
    "messages": [{"role": "user", "content": "one two three " * 5000}],
}


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
    answer = httpx.post(f"{fleet.proxy.url}/v1/messages{path}", json=body, headers=headers, timeout=120)
    document = answer.json()
    assert (answer.status_code, document["type"], document["error"]["type"]) == (status, "error", kind)
    assert document["error"]["message"].startswith(words)
    assert document["request_id"] == answer.headers["request-id"]


_CRASHING = {"type": "integer", "minimum": -(2**63), "maximum": -(2**63) + 3}
_ENDLESS = {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}


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
    with fleet.client("ann") as ann:

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


def test_doctor_finds_nothing_wrong(fleet: Fleet) -> None:
    replica = fleet.replicas[0]
    found = subprocess.run(
        [
            *(sys.executable, "-m", "kvshare.cli.main", "doctor"),
            *("--vllm-url", replica.url, "--vllm-control-url", str(replica.control_url)),
        ],
        env={**os.environ, "KVSHARE_VLLM_TOKEN": replica.environment["KVSHARE_VLLM_TOKEN"]},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


def test_a_lost_replica_takes_its_prompts_with_it(fleet: Fleet) -> None:
    """The other one goes on serving; what only the lost one had is computed. Runs last: one is killed."""
    forms = pair(40)
    with fleet.client("ann") as ann:
        donate(fleet, ann, forms.donor_messages)
        fleet.replicas[0].stop()
        for seed in range(41, 45):
            other = pair(seed)
            assert ask(ann, other.recipient_messages)[0] == other.answer
        assert ask(ann, forms.recipient_messages)[0] == forms.answer
