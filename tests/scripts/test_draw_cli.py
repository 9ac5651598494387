"""The samples of docs/cli.md show what the commands print now, as far as lines and columns."""

import re

import pytest

from draw_cli import PAGE, blocks, outline, redrawn, samples
from kvshare.cli.doctor import run_vllm_checks
from kvshare.demo import MODEL_PATH
from tests.kvshare.cli.fake_vllm import connector, served, vllm

REDRAW = "run: .venv/bin/python scripts/draw_cli.py"
with_model = pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@with_model
def test_samples_show_what_is_printed(page: str) -> None:
    """Each sample that the script draws has the lines and the columns of today; numbers may differ."""
    drawn, there = samples(), dict(blocks(page))
    assert len(drawn) > 10
    assert drawn.keys() <= there.keys(), REDRAW
    for key, lines in drawn.items():
        assert outline(there[key]) == outline(lines), f"{key}: {REDRAW}"
    assert redrawn(redrawn(page, drawn), drawn) == redrawn(page, drawn)


def test_a_line_that_is_missing_is_noticed(page: str) -> None:
    """So is one too many; other numbers are not."""
    lines = dict(blocks(page))["kvshare doctor"]
    names = outline(lines)
    assert {"pages", "port", "break-even"} <= set(names)
    assert outline([line for line in lines if "pages" not in line]) != names
    assert outline([re.sub(r"\d", "7", line) for line in lines]) == names


def test_the_sample_of_a_running_vllm_has_each_check(page: str) -> None:
    """It is not drawn, as that needs a vLLM: its lines are those of the checks of one that is fine."""
    (lines,) = [lines for key, lines in blocks(page) if key.startswith("kvshare doctor --vllm-url")]
    with served(vllm()) as server, served(connector()) as control:
        checks = run_vllm_checks(server.url, control.url)
    assert outline(lines) == [check.name for check in checks]
