"""docs/reference.md and docs/cli.md are up to date: `scripts/write_reference.py` would change nothing."""

import re
from pathlib import Path

import pytest

from exposed_metrics import Exposed, ExposedMetric
from kvshare.errors import ErrorCode
from kvshare.settings import RuleSettings
from kvshare.telemetry import FallbackReason
from write_reference import (
    COMMANDS,
    PAGE,
    Row,
    Table,
    fields_of,
    metrics,
    options_again,
    settings,
    written_again,
)

ROOT = Path(__file__).resolve().parent.parent
TEXT = PAGE.read_text("utf-8")
CODE = re.compile(r"`([^`]+)`")


def test_the_page_is_up_to_date() -> None:
    assert written_again(TEXT) == TEXT, "run: .venv/bin/python scripts/write_reference.py"


def test_options_of_commands_are_up_to_date() -> None:
    page = COMMANDS.read_text("utf-8")
    assert options_again(page) == page, "run: .venv/bin/python scripts/write_reference.py"
    assert options_again(page.replace(", `--shared-tier`", "", 1)) == page


@pytest.mark.parametrize("line", ["| `server.port` | `8000` |", "| `adapter` |", "| `kvshare vllm` |"])
def test_a_row_that_is_missing_is_added(line: str) -> None:
    """At the end of its table, with the words that the code has for it."""
    start = line.replace("`kvshare vllm`", "[`kvshare vllm`](cli.md#kvshare-vllm)")
    without = "".join(row for row in TEXT.splitlines(True) if not row.startswith(start))
    assert len(without) < len(TEXT)
    (added,) = {*written_again(without).splitlines()} - {*without.splitlines()}
    assert added.startswith(start)
    assert len(added.strip("| ").split(" | ")[-1]) > 10


def test_a_row_of_what_is_gone_is_removed() -> None:
    more = TEXT.replace("| `server.port` |", "| `server.gone` | `1` |  | x |\n| `server.port` |", 1)
    assert written_again(more) == TEXT


def test_a_default_is_corrected_and_the_other_words_stay() -> None:
    row = next(line for line in TEXT.splitlines() if line.startswith("| `server.port` |"))
    changed = row.replace("`8000`", "`1`").replace("0 takes", "zero takes")
    again = written_again(TEXT.replace(row, changed))
    (now,) = (line for line in again.splitlines() if line.startswith("| `server.port` |"))
    assert "`8000`" in now
    assert "zero takes" in now


def test_labels_of_a_metric() -> None:
    """Values stay in the page's order while they are right; a label with free values has none."""
    exposed: Exposed = {
        "kvshare_plans_executed_total": ExposedMetric("Plans.", {"planned": {"full"}, "executed": {"full"}}),
        "kvshare_new": ExposedMetric("New.", {"tenant": {"acme"}}),
    }
    written = {
        "kvshare_plans_executed_total": ("", "`planned`: `full`, `exact`, `approx`; `executed`: `full`")
    }
    old, new = metrics(exposed, written)
    assert old.cells[1].startswith("`planned`: `full`, `exact`, `approx`; `executed`: ")
    assert set(CODE.findall(old.cells[1].split("; ")[1])) == {"executed", "exact", "approx", "full"}
    assert new == Row.of("kvshare_new", "`tenant`", "New.", "", fixed={1: "`tenant`"})


def test_words_of_new_rows() -> None:
    """A setting has its comment in config.yaml, a field its alias."""
    assert next(row for row in settings() if row.name == "server.port").cells[3] == "0 takes a free one"
    assert "in" in {row.name for row in fields_of(RuleSettings)}


def test_every_command_has_a_heading() -> None:
    """In docs/cli.md; the table here has no other."""
    commands = Table.below("Command line", TEXT.splitlines()).written.keys()
    headings = re.findall(r"^## (kvshare [\w-]+)$", COMMANDS.read_text("utf-8"), re.MULTILINE)
    assert set(headings) == commands


def test_every_header_of_ours() -> None:
    """The headers that begin with X-KVShare- are those that the proxy writes."""
    code = "".join(path.read_text("utf-8") for path in (ROOT / "proxy").rglob("*.py"))
    written = set(re.findall(r"X-KVShare-[A-Za-z]+", code))
    section = TEXT.split("## Headers\n")[1].split("\n## ")[0]
    assert set(re.findall(r"`(X-KVShare-[A-Za-z]+)`", section)) == written


def test_reasons_of_components_are_those_that_there_are() -> None:
    cells = Table.below("Components", TEXT.splitlines()).written.values()
    assert {word for row in cells for word in CODE.findall(row[2])} == set(FallbackReason)


def test_every_error_code_is_given_somewhere() -> None:
    """mypy finds a word that is not a code; this finds a code that nothing gives any more."""
    files = (file for folder in ("kvshare", "proxy") for file in (ROOT / folder).rglob("*.py"))
    names = {
        name for file in files for name in re.findall(r"\bErrorCode\.([A-Z_]+)\b", file.read_text("utf-8"))
    }
    assert names == {code.name for code in ErrorCode}
