"""What views say where something is missing, or is of another kind; how wide they are is in test_width.py."""

from __future__ import annotations

from typing import Any

import pytest

from kvshare.cli.views import draw
from tests.kvshare.cli.test_width import DIGEST, DOCUMENTS, LAYER, LIVE, ROWS, TIER, prompt

NOTHING: dict[str, Any] = {"added": [], "removed": [], "changed": {}}
OWNERS = {DIGEST: {"tenant": "north", "scope": "private", "keys": ["chat", "batch"]}}
LOADS = [{"load": "3+", "shared": "no", "slower": 0.12, "num_blocks_more": 1234, "num_blocks_less": 12}]
UNREADABLE = {
    "num_rows": 12,
    "lines": [{"source": "log.jsonl", "line": number, "reason": "no prompt"} for number in range(9)],
}
FEW: dict[str, Any] = {"edits": None, "parents": [], "children": [], "num_children": 0, "shared_with": []}
CASES = [
    ("tree", {"roots": []}, ["the store is empty"]),
    ("tree", {"roots": [prompt()], "owners": OWNERS}, ["namespace f3a9c1d2e4b5: tenant north (private)"]),
    ("stats", {"owners": OWNERS}, ["f3a9c1d2e4b5: tenant north (private), keys chat, batch"]),
    ("stats", {"control": {"loads": LOADS}}, ["3+ in flight: no; with more of it requests take +12% longer"]),
    ("stats", {"tenants": [{**TIER, **DOCUMENTS["stats"]["totals"], "tenant": "north"}]}, ["own tokens"]),
    ("tiers", {"tiers": [TIER]}, ["nothing is written to memory: the disk is full"]),
    ("node", FEW, ["parents none: a root", "children none"]),
    ("store_verify", {"damaged": [], "num_objects": 1}, ["1 object of KV", ": all are whole"]),
    (
        "evict",
        {"unreadable": "no database"},
        ["would evict the whole file, which cannot be read: no database"],
    ),
    ("evict", {"dry_run": False}, ["evicted 1 node and 2 segments"]),
    ("explain", {"donors": [], "prediction": None, "stage_ms": {}}, ["none was nominated"]),
    ("explain", {"stage_ms": {"fetch": 1.234, "plan": 0}}, ["planned in: fetch 1.23 ms, plan 0.00 ms"]),
    ("verify", {"shares": "nothing", "why": "it has a state"}, ["shares nothing", "it has a state"]),
    ("verify", {"layers": [{**LAYER, "rows": [{**ROWS, "name": "k", "moves": "half"}]}]}, ["12,399x"]),
    ("warm", {"failures": [], "prompts": []}, ["entries 12,345"]),
    (
        "replay-diff",
        {"arms": [], "only_in_a": [], "only_in_b": []},
        ["the two runs have no policy in common"],
    ),
    ("replay-live", {**LIVE, "data": {"unreadable": UNREADABLE}}, ["log.jsonl:4 no prompt", "and 7 more"]),
    ("config", {"rows": []}, ["all settings are the defaults; --all shows them"]),
    (
        "reloaded",
        {"settings": {}, "keys": NOTHING, "tenants": NOTHING, "rules": NOTHING},
        ["nothing changed", "server.port"],
    ),
    ("usage", {"rows": []}, ["no requests"]),
    ("top", {"tenants": [], "hit_share": None}, ["no requests in the last minute", "reused nothing: "]),
    ("tenants", {"tenants": []}, ["no tenants"]),
]


@pytest.mark.parametrize(
    ("view", "changes", "told"), CASES, ids=[f"{case[0]}: {case[2][0]}" for case in CASES]
)
def test_it_says_what_is_missing(
    view: str, changes: dict[str, Any], told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """In words, with blanks between columns taken as one."""
    draw(view, {**DOCUMENTS[view], **changes})
    shown = " ".join(capsys.readouterr().out.split())
    assert [text for text in told if text not in shown] == []


def test_what_a_document_says_is_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor are its escape sequences passed on to the terminal."""
    draw("ready", {**DOCUMENTS["ready"], "model": "a [red]model[/red]\x1b[31m!\x1b[0m"})
    assert "(model a [red]model[/red]!," in capsys.readouterr().out
