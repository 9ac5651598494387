"""What the operator sees of plans, and does to what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.fake_vllm import FakeVllm
from tests.proxy.conftest import eventually, key_of, key_settings
from tests.proxy.relay.relay_server import Relay, chat_body, running_relay


async def test_evicting_here_drops_there(vllm: FakeVllm, tmp_path: Path) -> None:
    """What the operator evicts does not go on taking memory."""
    async with running_relay(tmp_path, vllm) as relay:
        await relay.chat("Rome")
        (node,) = relay.engine.sharing.tree.nodes()
        response = await relay.send("/admin/evict", {"node": node.node_id})
        assert response.status == 200, await response.text()
        await eventually(lambda: not vllm.segments)
        assert relay.num_nodes == 0


async def test_explain_tells_plan_and_replica(relay: Relay, vllm: FakeVllm) -> None:
    """It sends nothing, and names where the request would go."""
    await relay.chat("Rome")
    response = await relay.send("/admin/explain", chat_body("Oslo"))
    document = await response.json()
    found = (document["decision"], document["replica"])
    assert found == ("approx", vllm.url.removeprefix("http://")), document
    assert document["copied"] > 0
    assert len(vllm.generated) == 1


async def test_an_answer_names_its_plan_and_the_operator_sees_what_was_done(
    relay: Relay, vllm: FakeVllm
) -> None:
    """The plan stands in the headers, streaming too; what the replica reported, in /admin/requests."""
    await relay.chat("Rome")
    for stream in (False, True):
        response = await relay.chat("Reykjavik" if stream else "Oslo", stream=stream)
        counts = dict(part.split("=") for part in response.headers["X-KVShare-Plan"].split(","))
        assert response.headers["X-KVShare-Decision"] == "approx"
        unique_id = response.headers["X-KVShare-Request"]
        assert unique_id != vllm.tickets[-1].ticket_id  # its salt is made of that
        found = await relay.send(f"/admin/requests/{unique_id}", method="GET")
        document = await found.json()
        (plan,) = document["prompts"]
        assert plan["copied"] == int(counts["copied"]) > 0
        assert document["replica"] == relay.engine.fleet.replicas[0].name
        assert document["executed"]["decision"] == "approx"
        assert document["status"] == 200


async def test_the_way_of_a_request_is_timed_by_stage(relay: Relay) -> None:
    """One after the other, so together they are no longer than the time to the first token."""
    await relay.chat("Rome", stream=True)
    response = await relay.chat("Oslo", stream=True)
    path = f"/admin/requests/{response.headers['X-KVShare-Request']}"
    seconds = (await (await relay.send(path, method="GET")).json())["seconds"]
    first_token = seconds.pop("first_token")
    assert seconds.pop("total") >= first_token
    stages = {"body", "tokenize", "prefix", "fingerprint", "plan", "fetch", "ticket", "engine"}
    assert seconds.keys() == stages
    assert 0 < sum(seconds.values()) <= first_token + 1e-3
    metrics = await (await relay.send("/metrics", method="GET")).text()
    for stage in stages:
        times = 1 if stage in {"plan", "fetch"} else 2  # the first prompt has no candidate
        assert f'kvshare_stage_duration_seconds_count{{stage="{stage}"}} {times}.0' in metrics


async def test_the_operator_sees_what_a_prompt_was_stored_as(relay: Relay) -> None:
    """Once it is reported; what was stored before, is named again; without a ticket there is nothing."""
    stored = []
    extras: list[dict[str, Any]] = [{}, {}, {"kvshare": {"mode": "off"}}]
    for extra in extras:
        response = await relay.chat("Rome", **extra)
        path = f"/admin/requests/{response.headers['X-KVShare-Request']}"
        stored.append((await (await relay.send(path, method="GET")).json())["stored"])
    (node,) = relay.engine.sharing.tree.nodes()
    assert stored[0] == stored[1] == [{"node": node.node_id, "settled": True, "deviation": None}]
    assert stored[2] == [{"node": None, "settled": True, "deviation": None}]


async def test_what_was_done_instead_of_the_plan_is_said(relay: Relay, vllm: FakeVllm) -> None:
    await relay.chat("Rome")
    vllm.segments.clear()  # and the proxy has not heard of it yet
    response = await relay.chat("Reykjavik")
    document = await (
        await relay.send(f"/admin/requests/{response.headers['X-KVShare-Request']}", method="GET")
    ).json()
    assert response.headers["X-KVShare-Decision"] == "approx"
    assert document["executed"]["decision"] == "full"


async def test_an_administrator_sees_whose_a_namespace_is(vllm: FakeVllm, tmp_path: Path) -> None:
    """Tenant, scope and key names of what is stored now; not of keys that have stored nothing."""
    async with running_relay(tmp_path, vllm, auth__keys=key_settings()) as relay:
        for name in ("alice", "carol"):
            assert (await relay.chat("Rome", key=key_of(name))).status == 200
        await eventually(lambda: relay.num_nodes == 2)
        for path in ("stats", "tree"):
            answer = await relay.send(
                f"/admin/{path}", method="GET", Authorization=f"Bearer {key_of('root')}"
            )
            document = await answer.json()
            rows = {row["namespace"] for row in document["namespaces" if path == "stats" else "roots"]}
            assert rows == document["owners"].keys()
            assert sorted(document["owners"].values(), key=lambda owner: owner["scope"]) == [
                {"tenant": "acme", "scope": "private", "keys": ["carol"], "divided": False},
                {"tenant": "acme", "scope": "tenant", "keys": ["alice", "bob", "root"], "divided": False},
            ]
