"""The parts of a running server, as `kvshare doctor` shows them."""

from __future__ import annotations

from typing import Any

from kvshare.cli.running_checks import check_parts
from tests.kvshare.cli.fake_vllm import Fake
from tests.kvshare.cli.findings import Start, nowhere

WELL = {"part": "index", "state": "ok", "since": 1.0}
OFF = {
    "part": "store",
    "state": "off",
    "since": 1.0,
    "detail": "no prompt is stored: it is full",
    "remedy": "free space",
}
REPLICA = {
    "part": "replica",
    "name": "gpu-1",
    "state": "reduced",
    "since": 1.0,
    "detail": "it serves",
    "remedy": "start it",
}


def server_with(start: Start, *parts: dict[str, Any]) -> str:
    return start(Fake({"/admin/status": (200, {"parts": list(parts)})})).url


def test_each_part_that_is_not_well_is_a_warning(start: Start) -> None:
    """With its word, since when, what is wrong, and what to do; the server serves, so none is a failure."""
    checks = check_parts(server_with(start, OFF, WELL, REPLICA), None)
    assert [check.state for check in checks] == ["warn", "warn"]
    assert checks[0].detail.startswith("store is off since 1970-01-01")
    assert checks[0].detail.endswith(": no prompt is stored: it is full")
    assert checks[1].detail.startswith("replica gpu-1, since 1970-01-01")
    assert [check.remedy for check in checks] == ["free space", "start it"]


def test_a_server_that_is_well_is_one_line(start: Start) -> None:
    (check,) = check_parts(server_with(start, WELL, WELL), None)
    assert (check.state, "all 2 parts" in check.detail) == ("ok", True)


def test_a_server_that_does_not_say_is_not_judged(start: Start) -> None:
    """One of an older version, or none at all; other checks say that none answers."""
    assert check_parts(start(Fake({"/admin/status": (200, {})})).url, None) == []
    assert check_parts(nowhere(), None) == []
