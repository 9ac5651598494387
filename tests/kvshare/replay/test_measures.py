"""Figures are what their rows say, and what is counted in buckets is right."""

import numpy as np
import pyarrow as pa
import pytest

from kvshare.replay.measures import (
    LENGTH_BUCKETS,
    LENGTH_EDGES,
    buckets,
    histogram,
    milliseconds,
    policy_results,
    policy_times,
    similarity,
    stretches,
    waterfalls,
)
from kvshare.replay.policies.oracle import GramTable
from kvshare.replay.results import PolicyResults, Row, Store, policy_label
from kvshare.replay.rows import SCHEMA, language_label, numbering


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


def _table(*rows: Row) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


def _results(*rows: Row) -> PolicyResults:
    return policy_results(_table(*rows), Store(), prefill_tokens_per_s=100.0)


def test_figures_by_hand() -> None:
    """Three requests, counted by hand; an empty prompt is a request without a hit."""
    document = _results(_row(0, 100, 90), _row(1, 100, 50), _row(2, 0, 0)).model_dump()
    assert document["token_hit_rate"] == pytest.approx(0.7)
    assert document["recomputed_fraction"] == pytest.approx(0.3)
    assert document["request_hit_rate"] == pytest.approx(2 / 3)
    shares = [document[f"request_hit_rate_{share}"] for share in (50, 70, 90)]
    assert shares == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert document["ttft_saved_s"] == pytest.approx({"mean": 1.4 / 3, "total": 1.4, "share": 0.7})
    coverage = document["coverage_histogram"]
    assert (len(coverage), coverage[0], coverage[50], coverage[90]) == (101, 1, 1, 1)


def test_no_requests_are_no_figures() -> None:
    """A log of which nothing could be read."""
    document = _results().model_dump()
    assert (document["num_requests"], document["token_hit_rate"], document["series"]) == (0, 0, ())
    assert document["storage"]["final_bytes"] == document["shift_tokens"]["count"] == 0
    assert policy_times(_table(), prefill_tokens_per_s=100.0).requests_per_s == 0


def test_groups_and_waterfall() -> None:
    """Requests are grouped by their row; losses add up from the oracle's tokens to the hits."""
    kvshare = {"arm": "kvshare", "num_repaired": 10, "cross_user": True}
    refused = {"num_refused": 5, "num_refused_generation": 2}
    own = [
        _row(0, 100, 60, **kvshare, **refused),
        _row(1, 700, 0, arm="kvshare", turn=2, reason="no_candidates"),
        _row(2, 20, 0, arm="kvshare", reason="short_prompt"),
    ]
    arm = _results(*own).model_dump()
    assert set(arm["by"]["length"]) == {"0-63", "64-127", "512-1023"}
    assert arm["by"]["turn"]["later"]["num_tokens"] == 700
    assert arm["by"]["origin"]["cross_user"]["num_hit_tokens"] == 60
    assert arm["reasons"] == {"no_candidates": 1, "short_prompt": 1}
    oracle = [_row(0, 100, 80), _row(1, 700, 0, turn=2), _row(2, 20, 18)]
    tables = {"oracle": _table(*oracle), "kvshare": _table(*own)}
    (waterfall,) = waterfalls({"oracle": "oracle", "kvshare": "kvshare"}, tables.__getitem__)
    steps = {step.name: step.num_tokens for step in waterfall.steps}
    losses = {"not_found": -5, "too_short": -18, "generation": -2, "refused": -3, "repaired": -10}
    assert steps == {"oracle": 98, **losses, "hit": 60}


def test_similarity_by_hand() -> None:
    """Distances of the response cache against what the oracle has; a first prompt is in no bucket."""
    response = [_row(at, 100, 0, arm="response", distance=[None, 0.01, 0.3][at]) for at in range(3)]
    oracle = [_row(0, 100, 0), _row(1, 100, 95), _row(2, 100, 10)]
    tables = {"response": _table(*response), "oracle": _table(*oracle)}
    found = similarity({"response": "response", "oracle": "oracle"}, tables.__getitem__)
    assert found is not None
    counts = np.array(found.counts)
    assert (counts.sum(), counts[0, 9], counts[7, 1]) == (2, 1, 1)
    assert {one.distance: one.share for one in found.thresholds}[0.05] == pytest.approx(1 / 3)
    assert similarity({"oracle": "oracle"}, tables.__getitem__) is None


def test_embedding_is_taken_off_what_is_saved_net() -> None:
    """Of requests that were embedded, as much as one text takes."""
    rows = _table(*(_row(index, 100, 50, embedded=index > 0) for index in range(3)))
    for embedding_s, spent_s in ((0.0, 0.0), (0.1, 0.2)):
        times = policy_times(rows, prefill_tokens_per_s=100.0, embedding_s=embedding_s)
        assert times.ttft_saved_net_s.total == pytest.approx(1.5 - 0.003 - spent_s)


def test_who_and_which_turn_may_be_unknown() -> None:
    """As a group of their own; nothing shared has no origin at all."""
    unknown = _row(0, 100, 80, turn=None, cross_user=None)
    by = _results(unknown, _row(1, 100, 0, turn=None, cross_user=False)).by
    assert (set(by["turn"]), set(by["origin"])) == ({"unknown"}, {"unknown", "none"})


def test_languages_after_the_first_sixty_are_other() -> None:
    """Those that came first keep their name."""
    by = _results(*(_row(at, 10, 0, language=f"l{at % 65}") for at in range(130))).by["language"]
    assert (len(by), by["l59"].num_requests, by["other"].num_requests) == (61, 2, 10)


def test_percentiles_are_those_of_the_values() -> None:
    """In milliseconds; of no values, zero."""
    values = np.random.default_rng(0).lognormal(-7, 1.5, 5000)
    times = milliseconds(values)
    for percentile, percent in ((times.p50, 50), (times.p90, 90), (times.p99, 99)):
        assert percentile == pytest.approx(1000 * np.percentile(values, percent), rel=0.03)
    assert times.max == pytest.approx(1000 * values.max())
    assert milliseconds([]).p99 == 0.0


def test_series_keeps_sums_in_few_stretches() -> None:
    """Ten thousand requests in at most 200 stretches, none lost."""
    series = stretches(_table(*(_row(index, 2, 1, num_stored_bytes=index) for index in range(10_000))))
    assert 100 <= len(series) <= 200
    assert [stretch.first for stretch in series] == sorted(stretch.first for stretch in series)
    assert sum(stretch.num_requests for stretch in series) == 10_000
    assert sum(stretch.num_hit for stretch in series) == 10_000
    assert series[-1].num_bytes == 9999


def test_histogram_buckets_are_half_open() -> None:
    """An edge belongs to the bucket that it opens; the last bucket is open."""
    assert histogram((0, 10, 20), (0, 9.9, 10, 500)).model_dump() == {
        "edges": (0, 10, 20),
        "counts": (2, 1, 1),
        "mean": pytest.approx(129.975),
        "max": 500,
        "count": 4,
    }


def test_gram_table_is_a_dictionary() -> None:
    """Over many levels: what was put last is found, what was never put is not."""
    rng = np.random.default_rng(1)
    table, expected = GramTable(), dict[int, int]()
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
    assert policy_label("prefix", None) == "prefix"
    assert policy_label("prefix", 1_000_000) == "prefix @ 1,000,000 tokens"
    assert [LENGTH_BUCKETS[at] for at in buckets(LENGTH_EDGES, (0, 63, 64, 40_000))] == [
        "0-63",
        "0-63",
        "64-127",
        "32768-",
    ]
    numbers = numbering()
    assert [numbers[name] for name in ("x", "y", "x")] == [0, 1, 0]
