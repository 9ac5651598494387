"""When sharing is in the way, and of which cells that is said."""

from __future__ import annotations

import numpy as np
import pytest

from kvshare_lab.vllm.bounds import KINDS, Cell, Cells, prompt_of_kind, verdict
from kvshare_lab.vllm.prompts import unrelated_prompt


@pytest.mark.parametrize(
    ("off_ms", "on_ms", "missed"),
    [
        ([10.0] * 100, [10.9] * 100, []),  # 9 %, but less than 1 ms
        ([10.0] * 100, [11.1] * 100, ["p50"]),
        ([100.0] * 100, [102.9] * 100, []),
        ([100.0] * 100, [103.1] * 100, ["p50"]),
        ([100.0] * 100, [100.0] * 97 + [104.9] * 3, []),
        ([100.0] * 100, [100.0] * 97 + [105.1] * 3, ["p99"]),
        ([10.0] * 100, [10.0] * 97 + [12.9] * 3, []),  # 29 %, but less than 3 ms
        ([10.0] * 100, [10.0] * 97 + [13.1] * 3, ["p99"]),
        ([100.0] * 100, [50.0] * 100, []),
    ],
)
def test_a_bound_is_the_larger_of_share_and_milliseconds(
    off_ms: list[float], on_ms: list[float], missed: list[str]
) -> None:
    """3 % or 1 ms at the median, 5 % or 3 ms at the 99th percentile."""
    cell = Cell({"tokens": 256}, [each / 1e3 for each in off_ms], [each / 1e3 for each in on_ms])
    assert cell.missed == missed


def test_what_is_missed_is_said_in_words() -> None:
    """With both arms' milliseconds; cells are found by what their requests have in common."""
    cells = Cells()
    cells.of(load="alone", tokens=512).off_s.append(0.020)
    cells.of(load="alone", tokens=512).on_s.append(0.026)
    cells.of(load="alone", tokens=4096).off_s.append(0.1)
    cells.of(load="alone", tokens=4096).on_s.append(0.05)
    found = verdict(cells)
    assert len(found["cells"]) == 2
    (line,) = found["missed"]
    assert line == "alone 512: p50 26.0 ms instead of 20.0 (+30.0%), p99 26.0 ms instead of 20.0 (+30.0%)"
    assert not found["passed"]


def test_each_kind_of_prompt_shares_as_much_as_it_says() -> None:
    """A near-duplicate has nine tenths of the donor, a refused one a tenth, another one nothing."""
    rng = np.random.default_rng(0)
    donor = unrelated_prompt(rng, 2048)
    equal = {kind: float(np.mean(prompt_of_kind(rng, kind, donor) == donor)) for kind in KINDS}
    assert equal["shared"] == pytest.approx(0.9, abs=0.02)
    assert 0.02 < equal["refused"] < 0.2
    assert equal["unshared"] < 0.01
