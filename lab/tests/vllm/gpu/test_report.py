"""A report holds what was measured at any time, and names what was not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvshare.errors import EngineError
from kvshare_lab.vllm.gpu.report import Deadline, Figures, NotMeasurableError, Progress, Report


def report(seconds: float = 600, *parts: str) -> Report:
    return Report("SOME_ATTN", parts or ("parity", "soak"), Deadline(seconds))


async def passing(_: Progress) -> Figures:
    return {"passed": True}


async def test_a_part_that_fails_costs_the_others_nothing() -> None:
    """What was said stands where its figures would."""

    async def failing(_: Progress) -> Figures:
        raise EngineError("the connection broke")

    found = report()
    await found.add("parity", failing, least_s=1)
    await found.add("soak", passing, least_s=1)
    document = found.to_json()
    assert (document["parity"], document["soak"]) == (None, {"passed": True})
    assert document["not_measured"] == {"parity": "the connection broke"}
    assert document["passed"] is False


async def test_an_error_of_our_own_costs_the_others_nothing_either() -> None:
    """Minutes on a GPU are rare."""

    async def wrong(_: Progress) -> Figures:
        raise IndexError("list index out of range")

    found = report()
    await found.add("parity", wrong, least_s=0)
    await found.add("soak", passing, least_s=0)
    assert found.to_json()["not_measured"] == {"parity": "IndexError('list index out of range')"}
    assert found.to_json()["soak"] == {"passed": True}
    assert found.to_json()["passed"] is False


async def test_a_part_that_does_not_fit_is_not_begun_and_named() -> None:
    """That is no failure; what was measured before stays."""
    found = report(10)
    await found.add("parity", passing, least_s=1)
    await found.add("soak", passing, least_s=20)
    document = found.to_json()
    assert document["parity"] == {"passed": True}
    assert document["soak"] is None
    assert document["not_measured"] == {"soak": "9 s of 10 s were left, expected 20 s"}
    assert document["passed"] is True


async def test_a_part_begins_no_row_after_its_share_of_the_time() -> None:
    """So that the later parts are measured, too; what was begun is not cut off."""

    async def rows(progress: Progress) -> Figures:
        assert progress.left_s <= 0.25 * 600
        assert progress.has_time("short", 100)
        assert not progress.has_time("long", 200)
        return {}

    found = report()
    await found.add("parity", rows, least_s=1, share=0.25)
    assert found.to_json()["not_measured"]["parity.long"].endswith("expected 200 s")
    assert found.to_json()["parity"] == {}
    assert found.deadline.left_s > 500


async def test_a_part_is_cut_off_when_the_time_is_over_and_keeps_its_rows() -> None:
    """Those that it has measured by then; the next ones are not begun."""

    async def endless(progress: Progress) -> Figures:
        progress.keep({"rows": [1]})
        await asyncio.sleep(60)
        return {"rows": [1, 2]}

    async def nothing_yet(_: Progress) -> Figures:
        await asyncio.sleep(60)
        return {}

    found = report(0.3)
    await found.add("parity", endless, least_s=0)
    await found.add("soak", nothing_yet, least_s=0)
    document = found.to_json()
    assert document["parity"] == {"rows": [1]}
    assert document["not_measured"]["parity"] == "cut off after 0 s: not all of it"
    assert document["not_measured"]["soak"] == "cut off after 0 s"
    assert document["passed"] is True


async def test_a_timeout_inside_a_part_is_a_failure() -> None:
    """The time of the run is not over."""

    async def waiting(_: Progress) -> Figures:
        raise TimeoutError

    found = report()
    await found.add("parity", waiting, least_s=0)
    assert found.to_json()["not_measured"]["parity"] == "TimeoutError()"
    assert found.to_json()["passed"] is False


async def test_what_this_machine_cannot_show_is_no_failure() -> None:
    """The reason is in the document."""

    async def impossible(_: Progress) -> Figures:
        raise NotMeasurableError("py-spy is not installed")

    found = report()
    await found.add("parity", impossible, least_s=0)
    assert found.to_json()["not_measured"]["parity"] == "py-spy is not installed"
    assert found.to_json()["passed"] is True


async def test_the_document_is_whole_whenever_a_row_is_added(capsys: pytest.CaptureFixture[str]) -> None:
    """Parts to come are named; a part that has ended is noted on stderr with its figures."""
    seen: list[dict[str, Any]] = []

    async def rows(progress: Progress) -> Figures:
        progress.keep({"rows": [1]})
        assert not progress.has_time("row_2", 10_000)
        progress.lacks("donor_on_device", "not yet")
        return {"rows": [1]}

    found = report(600, "ttft", "load")
    found.on_change = lambda: seen.append(found.to_json())
    await found.add("ttft", rows, least_s=0)
    assert [each["ttft"] for each in seen] == [{"rows": [1]}, {"rows": [1]}]
    assert seen[0]["not_measured"] == {"load": "the run ended before this part"}
    assert set(seen[-1]["not_measured"]) == {"load", "ttft.row_2", "ttft.donor_on_device"}
    said = capsys.readouterr().err
    assert '{"rows": [1]}' in said
    assert "no ttft.row_2" in said


async def test_a_run_that_is_ended_keeps_the_part_at_work() -> None:
    """As SIGTERM does: the error goes on, the rows stay."""

    async def ended(progress: Progress) -> Figures:
        progress.keep({"rows": [1]})
        raise SystemExit(143)

    found = report()
    with pytest.raises(SystemExit):
        await found.add("parity", ended, least_s=0)
    assert found.to_json()["parity"] == {"rows": [1]}
    assert found.to_json()["not_measured"]["parity"] == "cut off after 0 s: not all of it"
