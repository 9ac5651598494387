"""Whether sharing pays on a running server, as `kvshare doctor` and `kvshare stats` show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvshare.cli.running_checks import check_control
from kvshare.cli.views import draw
from kvshare.sharing.control import Rung
from tests.kvshare.cli.fake_vllm import Fake
from tests.kvshare.cli.findings import Start, nowhere


def load(rung: Rung, slower: float | None, name: str = "4-7") -> dict[str, Any]:
    return {
        "load": name,
        "rung": int(rung),
        "shared": rung.text,
        "slower": slower,
        "num_blocks_more": 90,
        "num_blocks_less": 12,
    }


def control(*loads: Mapping[str, Any], share: float = 0.02) -> dict[str, Any]:
    return {"unshared_share": share, "num_requests": {}, "changes": {}, "loads": list(loads)}


FULL = load(Rung.EVERYTHING, -0.31)
NEW = load(Rung.EVERYTHING, None)
REDUCED = load(Rung.WANTED_SAVES, 0.12, "16-31")


@pytest.mark.parametrize(
    ("document", "state", "words"),
    [
        (control(FULL, NEW), "ok", ("2% of the time", "31% faster with it where 4-7 are in flight")),
        (control(load(Rung.EVERYTHING, 0.02)), "ok", ("2% slower",)),
        (control(NEW), "ok", ("too little yet",)),
        (control(), "ok", ("too little yet",)),
        (control(FULL, REDUCED), "warn", ("with 16-31 requests in flight prompts are stored only if",)),
        (control(FULL, share=0.0), "ok", ("unshared_share is 0",)),
        ({}, "ok", ("unknown",)),
    ],
)
def test_what_the_controller_of_a_running_server_found(
    start: Start, document: Mapping[str, Any], state: str, words: Sequence[str]
) -> None:
    """Where less is shared that is a warning, with the load; otherwise by how much sharing is faster."""
    check = check_control(start(Fake({"/admin/stats": (200, {"control": document})})).url, None)
    assert (check.name, check.state) == ("controller", state)
    assert all(word in check.detail for word in words), check.detail


def test_without_a_server_it_is_unknown() -> None:
    assert "unknown" in check_control(nowhere(), None).detail


def test_stats_show_each_load(capsys: pytest.CaptureFixture[str]) -> None:
    """What is shared there, by how much more of it takes longer, and what that rests on."""
    totals = dict.fromkeys(
        (
            *("num_nodes", "num_pinned", "max_depth", "num_tokens"),
            *("num_stored_tokens", "num_segments", "num_bytes"),
        ),
        0,
    )
    draw("stats", {"totals": totals, "namespaces": [], "control": control(FULL, REDUCED, NEW)})
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        "4-7 in flight: everything is shared; with more of it requests take -31% longer (90 and 12" in shown
    )
    assert "16-31 in flight: prompts are stored only if they resemble an earlier one; with more" in shown
    assert "everything is shared (90 and 12 blocks compared)" in shown
