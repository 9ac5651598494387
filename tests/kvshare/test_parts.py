"""The list of parts: since when each is as it is, and what the log has of it."""

import logging

import pytest

from kvshare.part_problems import PartProblem, PartState
from kvshare.parts import PartHistory, PartReading, ServedPart, in_words

WELL = PartReading(ServedPart.STORE)
FULL = PartReading(ServedPart.STORE, PartProblem.STORE_NOT_WRITTEN, "the disk is full")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def parts_of(problem: PartProblem) -> list[ServedPart]:
    """Those whose word its name begins with."""
    return [part for part in ServedPart if problem.name.startswith(f"{part.name}_")]


def test_every_problem_has_a_state_a_finding_and_a_remedy() -> None:
    """Of every part, in states that are not ok; so each reading of it can be shown."""
    assert {part for problem in PartProblem for part in parts_of(problem)} == set(ServedPart)
    for problem in PartProblem:
        assert parts_of(problem)
        assert problem.state is not PartState.OK
        assert problem.text
        assert problem.remedy


def test_a_part_has_been_as_it_is_since_its_state_changed() -> None:
    """Not since its last reading; another detail is no other state."""
    now = 100.0
    history = PartHistory(clock=lambda: now)
    assert [each.since for each in history.seen([WELL])] == [100.0]
    now = 160.0
    (full,) = history.seen([FULL])
    assert (full.state, full.since) == (PartState.OFF, 160.0)
    now = 170.0
    (full,) = history.seen([PartReading(ServedPart.STORE, PartProblem.STORE_NOT_WRITTEN, "it is read-only")])
    assert (full.since, full.detail) == (160.0, "no prompt is stored: it is read-only")
    now = 180.0
    (well,) = history.seen([WELL])
    assert (well.state, well.since, well.detail, well.problem) == (PartState.OK, 180.0, None, None)


def test_parts_are_listed_in_one_order_and_replicas_by_name() -> None:
    """However they were read."""
    readings = [
        PartReading(ServedPart.USAGE),
        PartReading(ServedPart.REPLICA, name="b"),
        PartReading(ServedPart.INDEX),
        PartReading(ServedPart.REPLICA, PartProblem.REPLICA_SILENT, name="a"),
    ]
    seen = PartHistory().seen(readings)
    assert [each.label for each in seen] == ["replica a", "replica b", "index", "usage"]


def test_what_nobody_else_logs_is_one_warning_and_one_line_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """However often it is read; the warning says what to do."""
    history = PartHistory()
    problem = PartReading(ServedPart.USAGE, PartProblem.USAGE_NOT_WRITTEN, "No space left on device")
    for reading in (
        PartReading(ServedPart.USAGE),
        problem,
        problem,
        PartReading(ServedPart.USAGE),
        PartReading(ServedPart.USAGE),
    ):
        history.seen([reading])
    begun, over = warnings(caplog)
    assert "usage of keys and tenants is not kept: No space left on device. free space" in begun
    assert over == "usage: it is well again"


def test_what_others_log_is_not_logged_twice(caplog: pytest.LogCaptureFixture) -> None:
    """The store's keeper has a warning of its own."""
    history = PartHistory()
    for reading in (WELL, FULL, WELL):
        history.seen([reading])
    assert not warnings(caplog)


def test_one_line_says_what_is_wrong_without_addresses() -> None:
    """For those who have no key: details may name hosts and files."""
    readings = [
        PartReading(
            ServedPart.REPLICA,
            PartProblem.REPLICA_NO_CONNECTOR,
            "http://10.0.0.7:8001/info: refused",
            "gpu-1",
        ),
        WELL,
        PartReading(ServedPart.INDEX, PartProblem.INDEX_PAUSED, "1.0 MB of disk are free"),
    ]
    words = in_words(PartHistory().seen(readings))
    assert words == "replica gpu-1: it serves without sharing; the index is paused"


def test_no_summary_has_a_gap_where_the_detail_was() -> None:
    """Each problem of each part, as those without a key read it."""
    for problem in PartProblem:
        words = in_words(PartHistory().seen([PartReading(parts_of(problem)[0], problem, "secret")]))
        assert words == problem.text


def test_a_replica_that_is_called_by_its_address_has_another_name_in_public() -> None:
    """Its number among the replicas; administrators and the log have its address."""
    reading = PartReading(
        ServedPart.REPLICA, PartProblem.REPLICA_SILENT, name="10.0.0.5:8000", public_name="2"
    )
    seen = PartHistory().seen([reading])
    assert [each.label for each in seen] == ["replica 10.0.0.5:8000"]
    assert in_words(seen) == "replica 2: it does not answer and gets no requests"
