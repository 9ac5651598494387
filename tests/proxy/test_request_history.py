"""What an answer and the operator are told of a request: headers, and `/admin/requests`."""

from __future__ import annotations

from tests.proxy.conftest import Server, chat, key_of
from tests.proxy.fake_engine import Behaviour

CHAT = "/v1/chat/completions"


async def test_every_answer_names_its_plan(server: Server) -> None:
    """The first has nothing to share; the others find it, streamed or not."""
    first = await server.post(CHAT, chat("one text"))
    assert first.headers["X-KVShare-Decision"] == "full"
    assert first.headers["X-KVShare-Reason"] == "no_candidates"
    ids = {first.headers["X-KVShare-Request"]}
    for stream in (False, True):
        answer = await server.post(CHAT, chat("one text and more of it", stream=stream))
        assert answer.headers["X-KVShare-Decision"] in ("exact", "approx")
        counts = dict(part.split("=") for part in answer.headers["X-KVShare-Plan"].split(","))
        assert set(counts) == {"exact", "copied", "computed"}
        assert int(counts["exact"]) + int(counts["copied"]) > 0
        assert "X-KVShare-Reason" not in answer.headers
        ids.add(answer.headers["X-KVShare-Request"])
    assert len(ids) == 3


async def test_what_generates_nothing_has_no_plan(server: Server) -> None:
    for response in (await server.get("/v1/models"), await server.get("/health")):
        assert not [name for name in response.headers if name.lower().startswith("x-kvshare")]


async def test_an_operator_looks_a_request_up_by_its_id(server: Server) -> None:
    """Not by the client's own id, which may come twice; and there is nothing of the text in it."""
    answers = [
        await server.post(CHAT, chat("SECRET WORDS", max_tokens=4), **{"X-Request-Id": "mine"})
        for _ in range(2)
    ]
    ids = [answer.headers["X-KVShare-Request"] for answer in answers]
    found = [await (await server.get(f"/admin/requests/{each}")).json() for each in ids]
    assert [document["id"] for document in found] == ids
    for document in found:
        assert document["x_request_id"] == "mine"
        assert (document["status"], document["endpoint"], document["key"]) == (200, CHAT, "local")
        assert document["finish_reason"] == "length"
        assert document["completion_tokens"] == 4
        (plan,) = document["prompts"]
        assert plan["exact"] + plan["copied"] + plan["recomputed"] + plan["repaired"] == plan["prompt_tokens"]
        assert document["seconds"]["total"] >= document["seconds"]["first_token"] > 0
        assert "SECRET" not in str(document)
    latest = await (await server.get("/admin/requests?limit=1")).json()
    assert [document["id"] for document in latest["requests"]] == ids[1:]
    everything = await (await server.get("/admin/requests")).json()
    assert [document["id"] for document in everything["requests"]] == ids[::-1]


async def test_an_operator_sees_what_a_prompt_was_stored_as(server: Server) -> None:
    """One entry a prompt, in the order of the body; a request that says so is stored as nothing."""
    completion = {"model": "echo", "prompt": ["one text", "another"], "max_tokens": 4}
    bodies = (completion, {**completion, "kvshare": {"no_store": True}})
    answers = [await server.post("/v1/completions", body) for body in bodies]
    ids = [answer.headers["X-KVShare-Request"] for answer in answers]
    found = [await (await server.get(f"/admin/requests/{each}")).json() for each in ids]
    stored, not_stored = (document["stored"] for document in found)
    assert [entry["settled"] for entry in (*stored, *not_stored)] == [True] * 4
    assert all(entry["node"] for entry in stored)
    assert [entry["node"] for entry in not_stored] == [None, None]


async def test_an_answer_under_way_has_no_status_yet(server: Server) -> None:
    server.engine.behaviour = Behaviour(token_s=0.2)
    async with server.http.post(server.url + CHAT, json=chat("hello", stream=True)) as response:
        unique_id = response.headers["X-KVShare-Request"]
        document = await (await server.get(f"/admin/requests/{unique_id}")).json()
        assert document["status"] is None
        assert document["prompts"]


async def test_unknown_ids_and_wrong_limits_are_refused_in_words(server: Server) -> None:
    assert (await server.get("/admin/requests/nobody")).status == 404
    for wrong in ("0", "-1", "x", "1001", ""):
        response = await server.get(f"/admin/requests?limit={wrong}")
        assert response.status == 400
        error = (await response.json())["error"]
        assert (error["param"], error["message"]) == ("limit", f"limit: expected 1 to 1000, got {wrong!r}")
    error = (await (await server.get("/admin/requests?limt=5")).json())["error"]
    assert (error["param"], error["message"]) == ("limt", "limt: unknown argument; expected limit or tenant")


async def test_a_refused_request_is_there_with_its_status(server: Server) -> None:
    answer = await server.post(CHAT, chat("x" * 2000))
    assert answer.status == 400
    unique_id = answer.headers["X-KVShare-Request"]
    document = await (await server.get(f"/admin/requests/{unique_id}")).json()
    assert (document["status"], document["prompts"]) == (400, [])


async def test_only_admins_look_requests_up(guarded: Server) -> None:
    inferring, admin = ({"Authorization": f"Bearer {key_of(name)}"} for name in ("alice", "root"))
    answer = await guarded.post(CHAT, chat("hello"), **inferring)
    path = f"/admin/requests/{answer.headers['X-KVShare-Request']}"
    assert (await guarded.get(path, **inferring)).status == 403
    assert (await (await guarded.get(path, **admin)).json())["key"] == "alice"
    assert (await guarded.get("/admin/requests", **inferring)).status == 403
