"""An administrator's questions and commands reach the engine as they were sent."""

from __future__ import annotations

import pytest

from kvshare.admin import DiffQuestion, Evict, NodeQuestion, Pin, StatsQuestion, TreeQuestion, Unpin
from tests.proxy.conftest import Server, chat, key_of


@pytest.mark.parametrize(
    ("path", "question", "status"),
    [
        ("/admin/stats", StatsQuestion(), 200),
        ("/admin/tree?depth=2&sort=hits", TreeQuestion(depth=2, sort="hits"), 200),
        ("/admin/node/1", NodeQuestion(1), 200),
        ("/admin/node/1?id=2", NodeQuestion(1), 200),  # the path wins over the query
        ("/admin/node/12", NodeQuestion(12), 400),  # it is not stored
        ("/admin/diff?a=1&b=2", DiffQuestion(1, 2), 200),
    ],
)
async def test_questions_carry_their_arguments(
    server: Server, path: str, question: object, status: int
) -> None:
    """Path and query become the arguments; what they leave out has its default."""
    response = await server.get(path)
    assert (response.status, server.engine.asked) == (status, [question])


@pytest.mark.parametrize(("path", "param"), [("node/first", "id"), ("node/12?tokens=1", "tokens")])
async def test_bad_arguments_are_400(server: Server, path: str, param: str) -> None:
    """They do not reach the engine, and the error object names the argument."""
    response = await server.get(f"/admin/{path}")
    assert response.status == 400
    assert (await response.json())["error"]["param"] == param
    assert server.engine.asked == []


@pytest.mark.parametrize(
    ("what", "body", "command"),
    [
        ("evict", {"all": True, "dry_run": True}, Evict(all=True, dry_run=True)),
        ("evict", {"all": True}, Evict(all=True)),
        ("pin", {"node": 3}, Pin(node=3)),
        ("unpin", {"all": True}, Unpin(all=True)),
        ("unpin", {"namespace": "abcd"}, Unpin(namespace="abcd")),
    ],
)
async def test_commands_carry_their_body(
    server: Server, what: str, body: dict[str, object], command: object
) -> None:
    """The JSON object of the request has the arguments. A GET changes nothing."""
    await server.post(f"/admin/{what}", body)
    assert server.engine.asked == [command]
    assert (await server.get(f"/admin/{what}")).status == 405
    assert (await server.post(f"/admin/{what}", b"[]")).status == 400
    assert server.engine.asked == [command]


async def test_only_an_administrator_pins(guarded: Server) -> None:
    for name, status in (("alice", 403), ("root", 200)):
        response = await guarded.post("/admin/unpin", {"all": True}, Authorization=f"Bearer {key_of(name)}")
        assert response.status == status


async def test_explain_reads_a_chat_body_and_runs_nothing(server: Server) -> None:
    """The body is checked as for a completion; no generation begins."""
    response = await server.post("/admin/explain", chat(kvshare={"mode": "exact"}))
    assert await response.json() == {
        "prompt_tokens": 11,
        "mode": "exact",
        "planned_for": {"tenant": "local", "key": None},
        "rules": [],
    }
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
