"""Every way to reach another tenant's KV over HTTP fails; the paired way to one's own works."""

import json
import random
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest

from tests.conftest import Server

MODEL = "kvshare-demo"
WORDS = ("launch", "code", "Weasel", "seven", "harbour", "nobody", "ledger", "amber", "north", "may", "know")


def canary(name: str) -> str:
    """A long text of one tenant; another name gives a text that has nothing in common with it."""
    return " ".join(random.Random(name).choices(WORDS, k=120))


def cached(server: Server, key: str, text: str, **extra: Any) -> int:
    """Prompt tokens of a request that came from stored KV."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key(key), max_retries=0) as client:
        reply = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": text}],
            max_tokens=2,
            temperature=0,
            extra_body=extra or None,
        )
    server.settle()
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    return reply.usage.prompt_tokens_details.cached_tokens or 0


def test_a_tenant_shares_with_itself_and_with_nobody_else(server: Server) -> None:
    """The same text: cached for the tenant's other key, new to another tenant and to private keys."""
    text = canary("shared")
    assert cached(server, "ann", text) == 0
    assert cached(server, "bob", text) > 100
    for stranger in ("cid", "dot", "eve", "root"):
        assert cached(server, stranger, text) == 0, stranger
        assert cached(server, stranger, text) > 100, stranger


@pytest.mark.parametrize(
    "claim",
    [
        {"user": "ann"},
        {"prompt_cache_key": "north"},
        {"safety_identifier": "ann"},
        {"metadata": {"tenant": "north", "namespace": "north"}},
        {"cache_salt": "north"},
    ],
)
def test_nothing_in_the_body_makes_somebody_else_of_a_caller(server: Server, claim: dict[str, Any]) -> None:
    """Identity comes from the key; a claim is either ignored or refused, never believed."""
    text = canary(json.dumps(claim))
    assert cached(server, "ann", text) == 0
    try:
        assert cached(server, "cid", text, **claim) == 0
    except openai.BadRequestError:
        assert cached(server, "cid", text) == 0


def test_near_duplicates_of_a_foreign_prompt_stay_foreign(server: Server) -> None:
    """Neither a shared prefix, nor a shared middle, nor the same meaning crosses a tenant."""
    text = canary("near")
    cached(server, "ann", text)
    for probe in (text + " And now?", "Another start. " + text, text.replace("Weasel", "Ferret")):
        assert cached(server, "cid", probe, kvshare={"no_store": True}) == 0
        assert cached(server, "bob", probe, kvshare={"no_store": True}) > 0


@pytest.mark.parametrize("key", ["ann", "cid", "dot"])
@pytest.mark.parametrize("route", ["/admin/stats", "/admin/tree", "/metrics"])
def test_operators_routes_are_for_operators(server: Server, key: str, route: str) -> None:
    """An inference key learns nothing about what is stored."""
    request = urllib.request.Request(
        server.url + route, headers={"Authorization": f"Bearer {server.key(key)}"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=60)
    with caught.value as answer:
        assert answer.code in (401, 403)
        body = answer.read()
    assert json.loads(body)["error"]["message"]


def test_no_foreign_candidate_ever_reached_the_planner(server: Server) -> None:
    """The alarm counter of all the tests above is still zero, and no prompt text is in the metrics."""
    request = urllib.request.Request(
        f"{server.url}/metrics", headers={"Authorization": f"Bearer {server.key('root')}"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if line.startswith("kvshare_isolation_denials_total")]
    assert [float(line.split()[-1]) for line in lines] == [0.0]
    assert "Weasel" not in text
