"""Every plot, on ordinary data and on data that are hardly any: well-formed, and no number that is none."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from kvshare.replay.report.figures import draw
from kvshare.replay.report.plots import styles
from kvshare.replay.report.reading import parse_report
from kvshare.replay.report.svg import (
    Plane,
    Scale,
    axes,
    document,
    fit,
    legend,
    line,
    linear_ticks,
    text,
)
from tests.kvshare.replay.report.small_results import STORES, results

NO_NUMBER = re.compile(r"\b(nan|inf|None)\b", re.IGNORECASE)
NAN = float("nan")


def without(document: Any, *keys: str) -> Any:
    """The document with every value of these names taken out, wherever it stands."""
    if isinstance(document, dict):
        return {key: without(value, *keys) for key, value in document.items() if key not in keys}
    return [without(one, *keys) for one in document] if isinstance(document, list) else document


def spoilt(document: Any, bad: float) -> Any:
    """The document with every fraction in it replaced."""
    if isinstance(document, dict):
        return {key: value if "edges" in key else spoilt(value, bad) for key, value in document.items()}
    if isinstance(document, list):
        return [spoilt(one, bad) for one in document]
    return bad if isinstance(document, float) else document


CASES = {
    "ordinary": results(),
    "one request": results(1),
    "two requests": results(2),
    "no request": results(0),
    "no hit": results(40, hit=0.0),
    "everything hit": results(40, hit=1.0),
    "no arm": results(0, stores=()),
    "one arm": results(stores=(("prefix", "prefix", None),)),
    "finite stores only": results(stores=[store for store in STORES if store[2]]),
    "not a number": spoilt(results(), NAN),
    "infinite": spoilt(results(), float("inf")),
    "half the schema": without(
        results(), "similarity", "waterfall", "times", "tree", "series", "by", "storage"
    ),
    "no figures": without(results(), "token_hit_rate", "coverage_histogram", "num_copies", "ttft_saved_s"),
    "nothing": {},
}


@pytest.mark.parametrize("case", CASES)
def test_every_plot_is_well_formed_and_has_no_number_that_is_none(case: str) -> None:
    """Whatever is missing, a plot is drawn without it or not at all, with a reason."""
    for name, one in draw(parse_report(CASES[case])).items():
        if one.svg is None:
            assert one.missing, name
            continue
        ElementTree.fromstring(one.svg)
        assert not NO_NUMBER.search(one.svg), name
        assert "script" not in one.svg


def test_ordinary_results_draw_every_plot_but_the_one_of_single_requests() -> None:
    """Those need requests.parquet."""
    drawn = draw(parse_report(CASES["ordinary"]))
    assert [name for name, one in drawn.items() if one.svg is None] == ["similarity-points"]


def test_savings_add_up_to_all_tokens() -> None:
    """Equal prefix, copies, repaired and computed: each token once."""
    svg = draw(parse_report(results(60)))["savings"].svg
    assert svg is not None
    found = ElementTree.fromstring(svg).find("{http://www.w3.org/2000/svg}desc")
    assert found is not None
    total, *parts = (int(part.rsplit(" ", 1)[1]) for part in str(found.text).split("; "))
    assert total == 60 * 200 == sum(parts)


def test_arms_of_one_look_do_not_exist() -> None:
    """Colour or dash tells any two apart, as many as one would ask for."""
    stores = [(f"{name}:x={i}", name, None) for name in ("prefix", "kvshare", "chunks") for i in range(3)]
    looks = styles(parse_report(results(4, stores=[*STORES, *stores])).endless)
    assert len(set(looks.values())) == len(looks)


def test_nothing_is_drawn_outside_its_scale() -> None:
    """Values outside, or none, go to the edge."""
    scale = Scale(0, 10, 100, 200)
    assert [scale(value) for value in (-5, 0, 5, 10, 99, NAN)] == [100, 100, 150, 200, 200, 100]
    assert Scale(3, 3, 0, 10)(3) == 5
    assert Scale(1, 100, 0, 10, log=True)(10) == pytest.approx(5)
    assert Scale(1, 100, 0, 10, log=True)(-1) == 0


def test_ticks_are_round_and_within() -> None:
    """Few, readable, none outside."""
    assert linear_ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert linear_ticks(0, 0.37) == [0, 0.1, 0.2, 0.3]
    assert linear_ticks(5, 5) == [5]
    assert linear_ticks(0, NAN) == [0]


def test_labels_are_escaped_and_cut_in_the_middle() -> None:
    """A label from a command line is text, whatever is in it."""
    evil = "<script>alert(1)</script>&\"'"
    plane = Plane(Scale(0, 1, 0, 9), Scale(0, 1, 9, 0))
    parts = [
        text(1, 1, evil),
        legend(0, 0, [("line", evil, evil)], width=150),
        line(plane, [(0, 0), (1, 1)], "line", evil),
        axes(plane, x_ticks=[(0, evil)], y_ticks=[(0, evil)], x_name=evil, y_name=evil),
    ]
    picture = document(10, 10, title=evil, description=evil, parts=parts)
    ElementTree.fromstring(picture)
    assert "<script" not in picture
    assert fit("kvshare-open:min_run=32:max_candidates=64", 130) == "kvshare-o…didates=64"
    assert fit("short", 130) == "short"
