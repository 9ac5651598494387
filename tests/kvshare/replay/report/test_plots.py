"""Every plot, on ordinary data and on data that are hardly any: well-formed, and no number that is none."""

import re
import subprocess
import sys
from functools import cache
from typing import Any
from xml.etree import ElementTree

import pytest

from kvshare.replay.report.formats import digits, duration, short, size
from kvshare.replay.report.picture import COLOURS, TEMPLATES, Picture, drawing, tip
from kvshare.replay.report.plots import coverage, draw, looks
from kvshare.replay.report.reading import parse_report
from tests.kvshare.replay.report.small_results import STORES, results

NO_NUMBER = re.compile(r"\b(nan|inf|None)\b")
NAN = float("nan")
SVG = "{http://www.w3.org/2000/svg}"


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


@cache
def drawn(case: str) -> dict[str, Picture | None]:
    """Of one of the cases; drawing takes a second."""
    return draw(parse_report(CASES[case]))


def ordinary() -> dict[str, Picture]:
    """The plots of ordinary results."""
    return {name: picture for name, picture in drawn("ordinary").items() if picture is not None}


@pytest.mark.parametrize("case", CASES)
def test_every_plot_is_well_formed_and_has_no_number_that_is_none(case: str) -> None:
    """Whatever is missing, a plot is drawn without it or not at all."""
    for name, picture in drawn(case).items():
        if picture is not None:
            ElementTree.fromstring(picture.svg)
            assert not NO_NUMBER.search(picture.svg), name
            assert "script" not in picture.svg


def test_ordinary_results_draw_every_plot_but_the_one_of_single_requests() -> None:
    """Those need requests.parquet."""
    assert drawn("ordinary").keys() - ordinary().keys() == {"similarity-points"}


def test_the_same_results_give_the_same_bytes() -> None:
    """No time, no name that is drawn by lot."""
    again = draw(parse_report(results()))
    for name, picture in ordinary().items():
        same = again[name]
        assert same is not None
        assert (same.svg, same.png) == (picture.svg, picture.png), name


def test_savings_add_up_to_all_tokens() -> None:
    """Equal prefix, copies, repaired and computed: each token once."""
    found = ElementTree.fromstring(ordinary()["savings"].svg).findtext(f"{SVG}desc") or ""
    total, *parts = (int(number.replace(",", "")) for number in re.findall(r": ([\d,]+)  \(", found))
    assert total == 60 * 200 == sum(parts)
    assert len(parts) == 4


def test_every_plot_can_be_heard() -> None:
    """It has a title, and the values of its curves, bars or cells."""
    for name, picture in ordinary().items():
        root = ElementTree.fromstring(picture.svg)
        assert root.get("role") == "img"
        assert root.findtext(f"{SVG}title"), name
        assert root.findtext(f"{SVG}desc"), name


def test_every_colour_is_the_pages() -> None:
    """And so light, dark or printed with it; also those of matplotlib's style."""
    for name, picture in ordinary().items():
        assert set(re.findall(r"#[0-9a-f]{6}", picture.svg)) <= set(COLOURS.values()), name
        assert f"var(--soft,{COLOURS['soft']})" in picture.svg
    style = (TEMPLATES / "report.mplstyle").read_text(encoding="utf-8")
    assert set(re.findall(r"color: +([0-9a-f]{6})", style)) <= {one.strip("#") for one in COLOURS.values()}


def test_no_two_colours_are_equal() -> None:
    """In light: where they were, one of them would have the other's in the dark."""
    css = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    assert len(set(COLOURS.values())) == len(COLOURS) == css.count("light-dark(")


def test_arms_of_one_look_do_not_exist() -> None:
    """Colour or dash tells any two apart, as many as one would ask for."""
    stores = [(f"{name}:x={i}", name, None) for name in ("prefix", "kvshare", "chunks") for i in range(3)]
    found = looks(parse_report(results(4, stores=[*STORES, *stores])).infinite)
    assert len({tuple(look.values()) for look in found.values()}) == len(found) == 16


def test_the_legend_names_all_options() -> None:
    """However many there are: each has a line of its own."""
    arm = "kvshare:min_run=32:max_candidates=64:share_generation=2"
    picture = coverage(parse_report(results(20, stores=[*STORES, (arm, "kvshare", None)])).infinite)
    assert picture is not None
    assert all(f"{option}</text>" in picture.svg for option in arm.split(":"))


def test_labels_are_text() -> None:
    """Whatever is in them: no markup, no formula."""
    evil = "<script>alert(1)</script>&\"'$x_1$"
    with drawing(evil) as picture:
        axes = picture.figure.add_subplot(title=evil)
        (line,) = axes.plot([0, 1], [0, 1], label=evil)
        tip(line, evil)
        picture.figure.legend(loc="outside right upper")
    root = ElementTree.fromstring(picture.svg)
    assert "<script" not in picture.svg
    assert [text.text for text in root.iter(f"{SVG}text")].count(evil) == 2
    assert [title.text for title in root.iter(f"{SVG}title")] == [evil, evil]


def test_numbers_are_short() -> None:
    """Three digits, in the unit that fits."""
    assert [short(n) for n in (0, 1.5, 999, 1500, 999_950, 12e12)] == ["0", "1.5", "999", "1.5k", "1M", "12T"]
    assert [size(n) for n in (5, 123_456_789, None)] == ["5 B", "123 MB", "–"]
    assert [duration(s) for s in (0.0004, -3, 121, 7300, 1e9)] == [
        "0.4 ms",
        "-3 s",
        "2.02 min",
        "2.03 h",
        "11,574 days",
    ]
    assert [duration(None), duration(NAN), digits(None), digits(999.9, "ms")] == ["–", "–", "–", "1,000 ms"]


def test_matplotlib_is_loaded_to_draw_and_not_before() -> None:
    """Nor by `kvshare replay` while it replays."""
    program = (
        "import sys, kvshare.cli.replay, kvshare.replay.paper, kvshare.replay.report as report\n"
        "from kvshare.replay.report.picture import drawing\n"
        "print('matplotlib' in sys.modules)\n"
        "with drawing('nothing'): pass\n"
        "print('matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["False", "True"], done.stderr
