"""The operator's questions reach the engine as they were asked."""

from __future__ import annotations

import pytest

from tests.proxy.conftest import Server, chat


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


async def test_explain_reads_a_chat_body_and_runs_nothing(server: Server) -> None:
    """The body is checked as for a completion; no generation begins."""
    response = await server.post("/admin/explain", chat(kvshare={"mode": "exact"}))
    assert await response.json() == {"prompt_tokens": 11, "mode": "exact", "rules": []}
    assert (await server.post("/admin/explain", chat(n=0))).status == 400
    assert (await server.post("/admin/explain", chat() | {"model": "other"})).status == 404
    assert not server.engine.requests
