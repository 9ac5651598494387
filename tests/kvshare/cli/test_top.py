"""`kvshare top`: what a server does now, by what its admin routes say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvshare.cli.top import _LOOKUP, summary
from proxy.request_record import LOOKUP_STAGES
from tests.kvshare.cli.conftest import Kvshare
from tests.kvshare.cli.fake_vllm import Fake
from tests.kvshare.cli.findings import Start

STATUS: dict[str, Any] = {
    "now": 1000.0,
    "version": "1",
    "model": "m",
    "num_running": 2,
    "num_waiting": 3,
    "num_nodes": 4,
    "kv_bytes": 5,
    "kv_budget_bytes": 6,
    "parts": [
        {"part": "index", "state": "ok", "since": 1.0},
        {
            "part": "store",
            "state": "off",
            "since": 1.0,
            "detail": "no prompt is stored: it is full",
            "remedy": "free",
        },
    ],
}


def request(
    at: float, tenant: str, *, reused: int = 0, lookup_s: float = 0.01, status: int = 200
) -> dict[str, Any]:
    prompt = {"prompt_tokens": 100, "exact": reused, "copied": 0, "saved_s": reused / 100}
    return {
        "id": f"{tenant}-{at:g}",
        "at": at,
        "tenant": tenant,
        "status": status,
        "prompts": [{**prompt, "decision": "exact" if reused else "full", "reason": None}],
        "seconds": {"total": 1.0, "first_token": None, "plan": lookup_s, "prefix": None},
    }


REQUESTS = [
    request(999, "acme", reused=80, lookup_s=0.5),
    request(990, "acme", reused=40),
    request(950, "globex", status=500),
    request(930, "globex", reused=100),  # longer ago than a minute
]


def test_figures_are_those_of_the_last_minute() -> None:
    """In all, and by tenant, those with most requests first; the slowest lookups stand apart."""
    found = summary(STATUS, REQUESTS)
    assert (found["requests"], found["requests_per_s"], found["failed"]) == (3, 3 / 60, 1)
    assert (found["reused_tokens"], found["hit_share"]) == (120, 0.4)
    assert found["saved_s"] == pytest.approx(1.2 - 0.52)
    assert [(row["tenant"], row["hit_share"]) for row in found["tenants"]] == [("acme", 0.6), ("globex", 0.0)]
    assert found["slowest_lookups"][0]["id"] == "acme-999"
    assert [part["part"] for part in found["not_well"]] == ["store"]


def test_with_very_many_requests_the_time_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older ones are not listed, so that they must not count as none."""
    monkeypatch.setattr("kvshare.cli.top._MOST_REQUESTS", 2)
    found = summary(STATUS, REQUESTS[:2])
    assert (found["window_s"], found["requests_per_s"]) == (10.0, 0.2)


def test_a_server_without_requests_is_shown() -> None:
    found = summary(STATUS, [])
    assert (found["hit_share"], found["tenants"], found["slowest_lookups"]) == (None, [], [])


def test_a_lookup_is_what_the_server_counts_as_one() -> None:
    assert _LOOKUP == LOOKUP_STAGES


def test_it_is_shown_once_where_no_terminal_is(start: Start, kvshare: Kvshare) -> None:
    """As text, and as JSON that is the same document."""
    answers = {"/admin/status": (200, STATUS), "/admin/requests": (200, {"requests": REQUESTS})}
    url = start(Fake(answers)).url
    shown = kvshare("top", "--url", url)
    assert shown.code == 0
    for words in ("0.05/s", "2 running", "3 waiting", "40.0 %", "acme", "store", "it is full"):
        assert words in shown.stdout
    written = kvshare("top", "--once", "--json", "--url", url).document
    assert written == json.loads(json.dumps(summary(STATUS, REQUESTS)))
