"""Figures are what their rows say, and what is counted in buckets stays small and right."""

import numpy as np
import pytest

from kvshare.replay.arms.oracle import GramTable
from kvshare.replay.counts import Buckets, Series, Times, length_bucket
from kvshare.replay.measures import ArmMeasures, FigureSums, Measures
from kvshare.replay.results import Row, Store, arm_label
from kvshare.replay.rows import Numbering, language_label


def _row(index: int, num_tokens: int, num_hit: int, **changes: object) -> Row:
    row: Row = {
        "index": index,
        "arm": "oracle",
        "capacity_tokens": None,
        "turn": 0,
        "language": "English",
        "num_tokens": num_tokens,
        "num_hit": num_hit,
        "num_exact": 0,
        "num_repaired": 0,
        "num_copies": 1,
        "num_donors": 1,
        "shifts": [-3],
        "cross_user": False,
        "answered": False,
        "false_hit": False,
        "distance": None,
        "reason": None,
        "num_refused": 0,
        "num_refused_generation": 0,
        "embedded": False,
        "num_stored_bytes": 0,
        "lookup_s": 0.001,
        "plan_s": 0.0,
        "observe_s": 0.002,
    }
    return {**row, **changes}


def test_figures_by_hand() -> None:
    """Three requests, counted by hand; an empty prompt is a request without a hit."""
    sums = FigureSums(prefill_tokens_per_s=100.0)
    for row in (_row(0, 100, 90), _row(1, 100, 50), _row(2, 0, 0)):
        sums.add(row)
    document = sums.figures().model_dump()
    assert document["token_hit_rate"] == pytest.approx(0.7)
    assert document["recomputed_fraction"] == pytest.approx(0.3)
    assert document["request_hit_rate"] == pytest.approx(2 / 3)
    shares = [document[f"request_hit_rate_{share}"] for share in (50, 70, 90)]
    assert shares == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert document["ttft_saved_s"] == pytest.approx({"mean": 1.4 / 3, "total": 1.4, "share": 0.7})


def test_groups_and_waterfall() -> None:
    """Requests are grouped by their row; losses add up from the oracle's tokens to the hits."""
    measures = Measures({"oracle": "oracle", "kvshare": "kvshare"}, prefill_tokens_per_s=100.0)
    kvshare = {"arm": "kvshare", "num_repaired": 10, "cross_user": True}
    refused = {"num_refused": 5, "num_refused_generation": 2}
    measures.add([_row(0, 100, 80), _row(0, 100, 60, **kvshare, **refused)])
    measures.add([_row(1, 700, 0, turn=2), _row(1, 700, 0, arm="kvshare", turn=2, reason="no_candidates")])
    arm = measures.arms["kvshare"].results(Store()).model_dump()
    assert set(arm["by"]["length"]) == {"64-127", "512-1023"}
    assert arm["by"]["turn"]["later"]["num_tokens"] == 700
    assert arm["by"]["origin"]["cross_user"]["num_hit_tokens"] == 60
    assert arm["reasons"] == {"no_candidates": 1}
    measures.add([_row(2, 20, 18), _row(2, 20, 0, arm="kvshare", reason="short_prompt")])
    (waterfall,) = measures.waterfalls()
    steps = {step.name: step.num_tokens for step in waterfall.steps}
    losses = {"not_found": -5, "too_short": -18, "generation": -2, "refused": -3, "repaired": -10}
    assert steps == {"oracle": 98, **losses, "hit": 60}


def test_embedding_is_taken_off_what_is_saved_net() -> None:
    """Of requests that were embedded, as much as one text takes; what no clock had a part in stays."""
    measures = ArmMeasures(prefill_tokens_per_s=100.0)
    for index in range(3):
        measures.add(_row(index, 100, 50, embedded=index > 0))
    before = measures.results(Store())
    assert measures.times().ttft_saved_net_s.total == pytest.approx(1.5 - 0.003)
    assert measures.times(embedding_s=0.1).ttft_saved_net_s.total == pytest.approx(1.5 - 0.003 - 0.2)
    assert measures.results(Store()) == before


def test_who_and_which_turn_may_be_unknown() -> None:
    """As a group of their own; nothing shared has no origin at all."""
    measures = Measures({"oracle": "oracle"}, prefill_tokens_per_s=100.0)
    measures.add([_row(0, 100, 80, turn=None, cross_user=None)])
    measures.add([_row(1, 100, 0, turn=None, cross_user=False)])
    by = measures.arms["oracle"].results(Store()).by
    assert (set(by["turn"]), set(by["origin"])) == ({"unknown"}, {"unknown", "none"})


def test_times_are_within_two_percent() -> None:
    """Percentiles from buckets against the sorted values."""
    values = np.random.default_rng(0).lognormal(-7, 1.5, 5000)
    times = Times()
    for value in values:
        times.add(float(value))
    for percent in (50, 90, 99):
        assert times.percentile(percent) == pytest.approx(np.percentile(values, percent), rel=0.03)
    assert times.milliseconds().max == pytest.approx(1000 * values.max())
    assert Times().milliseconds().p99 == 0.0


def test_series_keeps_sums_in_few_stretches() -> None:
    """Ten thousand requests in at most 200 stretches, none lost."""
    series = Series()
    for index in range(10_000):
        series.add(index, num_tokens=2, num_hit=1, num_bytes=index)
    stretches = series.stretches
    assert 100 <= len(stretches) <= 200
    assert [stretch[0] for stretch in stretches] == sorted(stretch[0] for stretch in stretches)
    assert sum(stretch[1] for stretch in stretches) == sum(stretch[3] for stretch in stretches) == 10_000
    assert stretches[-1][4] == 9999


def test_histogram_buckets_are_half_open() -> None:
    """An edge belongs to the bucket that it opens; the last bucket is open."""
    buckets = Buckets([0, 10, 20], (0, 9.9, 10, 500))
    assert buckets.histogram().model_dump() == {
        "edges": (0, 10, 20),
        "counts": (2, 1, 1),
        "mean": pytest.approx(129.975),
        "max": 500,
        "count": 4,
    }


def test_gram_table_is_a_dictionary() -> None:
    """Over many levels: what was put last is found, what was never put is not."""
    rng = np.random.default_rng(1)
    table, expected = GramTable(), {}
    for start in range(0, 60_000, 3000):
        hashes = rng.integers(0, 40_000, 3000).astype(np.uint64) * np.uint64(2**40 + 15)
        positions = np.arange(start, start + 3000, dtype=np.int64)
        table.put(hashes, positions)
        expected.update(zip(hashes.tolist(), positions.tolist(), strict=True))
        asked = rng.integers(0, 40_000, 500).astype(np.uint64) * np.uint64(2**40 + 15)
        assert table.find(asked).tolist() == [expected.get(code, -1) for code in asked.tolist()]


@pytest.mark.parametrize(
    ("language", "label"),
    [
        ("English", "English"),
        ("zh-Hant", "zh-Hant"),
        ("unknown", "unknown"),
        ("my card is 4111 1111", "other"),
        ("a long sentence of somebody", "other"),
        ("", "other"),
    ],
)
def test_languages_are_labels_or_other(language: str, label: str) -> None:
    """What does not look like a language is not written down."""
    assert language_label(language) == label


def test_labels() -> None:
    """As reports show them."""
    assert arm_label("prefix", None) == "prefix"
    assert arm_label("prefix", 1_000_000) == "prefix @ 1,000,000 tokens"
    assert [length_bucket(n) for n in (0, 63, 64, 40_000)] == ["0-63", "0-63", "64-127", "32768-"]
    numbering = Numbering()
    assert [numbering(name) for name in ("x", "y", "x")] == [0, 1, 0]
