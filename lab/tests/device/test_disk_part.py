"""Donors on the disk of a simulated server: what is read, and what is computed meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from kvshare_lab.device.profile import read_profile
from kvshare_lab.device.verdicts import ratios

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("default")]  # vLLM's own

LEAST = {2.0: 1.3, 5.0: 1.9, 12.0: 3.2}  # by GB/s: times of a full prefill of 30,000 tokens, 1 % changed
NEVER_UNDER = 0.97


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    from kvshare_lab.device.disk_part import FromDisk, from_disk

    return list(from_disk(read_profile("h100"), FromDisk(tuple(LEAST), requests=3), seed=0))


def test_a_part_is_read_and_the_rest_computed(found: list[dict[str, Any]]) -> None:
    """So much of it as the disk gives in time: the faster it is, the less is computed."""
    last = [row["requests"][-1]["shared"] for row in found if row["arm"] == "steady"]
    computed = [each["computed"] for each in last]
    assert computed == sorted(computed, reverse=True)
    assert all(300 < number < 30000 for number in computed)
    for each in last:
        assert each["stage_s"]["disk"] > 0
        assert each["stage_s"]["ahead"] <= each["stage_s"]["pass"] < each["ttft_s"]
        assert each["ttft_s"] < each["stage_s"]["ahead"] + each["stage_s"]["disk"], "one next to the other"


def test_a_disk_pays_as_much_as_was_asked(found: list[dict[str, Any]]) -> None:
    """Once its rate is known. Nothing is slower than in full: before that, and when it is half as fast."""
    for row in found:
        gains = [each["full"]["ttft_s"] / each["shared"]["ttft_s"] for each in row["requests"]]
        assert min(gains) >= NEVER_UNDER
        if row["arm"] == "steady":
            assert gains[-1] >= LEAST[row["gb_per_s"]]


def test_the_verdicts_have_the_middle_and_the_worst(found: list[dict[str, Any]]) -> None:
    gains = ratios({"disk": found})
    assert {"disk 2 GB/s steady", "disk 6 GB/s slower, worst"} <= gains.keys()
    assert all(gain >= NEVER_UNDER for gain in gains.values())
