"""The operator's questions reach the engine as they were asked."""

from __future__ import annotations

import pytest

from tests.proxy.conftest import Server, chat, key_of


@pytest.mark.parametrize(
    ("path", "what", "arguments"),
    [
        ("/admin/stats", "stats", {}),
        ("/admin/tree?depth=2&sort=bytes", "tree", {"depth": "2", "sort": "bytes"}),
        ("/admin/node/12?tokens=true", "node", {"id": "12", "tokens": "true"}),
        ("/admin/diff?a=1&b=2", "diff", {"a": "1", "b": "2"}),
    ],
)
async def test_questions_carry_their_arguments(
    server: Server, path: str, what: str, arguments: dict[str, str]
) -> None:
    """Path and query become the arguments, as text."""
    response = await server.get(path)
    assert (response.status, await response.json()) == (200, {"what": what, "arguments": arguments})


async def test_the_path_wins_over_the_query(server: Server) -> None:
    """A node is the one in the path, whatever the query says."""
    response = await server.get("/admin/node/12?id=13")
    assert (await response.json())["arguments"] == {"id": "12"}


async def test_bad_arguments_are_400(server: Server) -> None:
    """What the engine refuses is an error object that names the argument."""
    response = await server.get("/admin/node/first")
    assert response.status == 400
    assert (await response.json())["error"]["param"] == "id"


async def test_evict_passes_its_body(server: Server) -> None:
    """The JSON object of the request is the argument, with its types."""
    response = await server.post("/admin/evict", {"node": 3, "dry_run": True})
    assert await response.json() == {"what": "evict", "arguments": {"node": 3, "dry_run": True}}
    assert (await server.post("/admin/evict", b"[]")).status == 400


@pytest.mark.parametrize(
    ("what", "body"), [("pin", {"node": 3}), ("unpin", {"all": True}), ("unpin", {"namespace": "abcd"})]
)
async def test_pins_pass_their_body(server: Server, what: str, body: dict[str, object]) -> None:
    """As with evict; they are no questions that a GET could ask."""
    response = await server.post(f"/admin/{what}", body)
    assert await response.json() == {"what": what, "arguments": body}
    assert (await server.get(f"/admin/{what}")).status == 405


async def test_only_an_administrator_pins(guarded: Server) -> None:
    for name, status in (("alice", 403), ("root", 200)):
        response = await guarded.post("/admin/pin", {"node": 3}, Authorization=f"Bearer {key_of(name)}")
        assert response.status == status


async def test_explain_reads_a_chat_body_and_runs_nothing(server: Server) -> None:
    """The body is checked as for a completion; no generation begins."""
    response = await server.post("/admin/explain", chat(kvshare={"mode": "exact"}))
    assert await response.json() == {"prompt_tokens": 11, "mode": "exact", "rules": []}
    assert (await server.post("/admin/explain", chat(n=0))).status == 400
    assert (await server.post("/admin/explain", chat() | {"model": "other"})).status == 404
    assert not server.engine.requests


@pytest.mark.parametrize(
    ("api", "body", "num_tokens"),
    [
        ("completions", {"prompt": "hello"}, 5),
        ("responses", {"input": "hello"}, 11),
        ("messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}, 11),
    ],
)
async def test_explain_reads_the_bodies_of_every_api(
    server: Server, api: str, body: dict[str, object], num_tokens: int
) -> None:
    """`api` names it; the body is checked as that API's."""
    response = await server.post(f"/admin/explain?api={api}", {"model": "echo", **body})
    assert (await response.json())["prompt_tokens"] == num_tokens
    assert (await server.post(f"/admin/explain?api={api}", {"model": "echo"})).status == 400
    assert not server.engine.requests


async def test_explain_takes_one_prompt_of_a_known_api(server: Server) -> None:
    several = await server.post("/admin/explain?api=completions", {"model": "echo", "prompt": ["a", "b"]})
    unknown = await server.post("/admin/explain?api=embeddings", {"model": "echo", "input": "a"})
    params = [(await response.json())["error"]["param"] for response in (several, unknown)]
    assert params == ["prompt", "api"]
