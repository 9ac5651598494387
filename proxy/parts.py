"""
The state of all parts of a server in one list: those of its engine, and those that only the front knows. For
probes, operators and metrics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvshare.part_problems import PartProblem, PartState
from kvshare.parts import PartReading, PartStatus, ServedPart
from kvshare.requests import SharingMode
from kvshare.status import EngineStatus
from proxy.context import ServerContext


def part_statuses(server: ServerContext, status: EngineStatus) -> tuple[PartStatus, ...]:
    """The list. `status`: the engine's, of now."""
    return server.part_history.seen((*_of_front(server), *status.parts))


def part_documents(parts: tuple[PartStatus, ...], *, with_details: bool) -> list[dict[str, Any]]:
    """JSON-ready. Without details, which may name addresses and files, for those who have no key."""
    return [_document(each, with_details=with_details) for each in parts]


def worst_states(parts: tuple[PartStatus, ...]) -> dict[ServedPart, PartState]:
    order, worst = list(PartState), dict[ServedPart, PartState]()
    for each in parts:
        worst[each.part] = max(each.state, worst.get(each.part, PartState.OK), key=order.index)
    return worst


def _document(part: PartStatus, *, with_details: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"part": part.part, "state": part.state, "since": round(part.since, 3)}
    name = part.name if with_details else part.public_name
    if name is not None:
        document["name"] = name
    if part.problem is not None:
        document["remedy"] = part.problem.remedy
        if with_details:
            document["detail"] = part.detail
    return document


def _of_front(server: ServerContext) -> Iterator[PartReading]:
    most = server.settings.sharing.max_mode
    problems = {
        SharingMode.OFF: PartProblem.SHARING_SWITCHED_OFF,
        SharingMode.EXACT: PartProblem.SHARING_EXACT_ONLY,
    }
    yield PartReading(ServedPart.SHARING, problems.get(SharingMode(most)), f"sharing.max_mode is {most}")
    cause = server.usage.problem
    yield PartReading(ServedPart.USAGE, None if cause is None else PartProblem.USAGE_NOT_WRITTEN, cause or "")
    live = server.live
    if live.problem is not None:
        yield PartReading(ServedPart.SETTINGS, PartProblem.SETTINGS_WRONG, live.problem)
    else:
        later = ", ".join(live.needs_restart)
        yield PartReading(ServedPart.SETTINGS, PartProblem.SETTINGS_TO_RESTART if later else None, later)
