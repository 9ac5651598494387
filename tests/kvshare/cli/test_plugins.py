"""Commands of other distributions: how `kvshare` finds and lists them, and what it says of missing ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvshare.cli import plugins
from kvshare.cli.main import app
from kvshare.cli.output import ExitCode, exit_code
from kvshare.errors import MissingExtraError
from tests.kvshare.cli.conftest import Cli
from tests.kvshare.cli.outcome import Outcome

LOADED = "the code of the other distribution was imported"
MODULE = f"""
import sys, typer

print("{LOADED}", file=sys.stderr)
app = typer.Typer(add_completion=False, rich_markup_mode=None)

@app.command("any name")
def greet(name: str) -> None:
    "Say hello."
    print("hello", name)
"""


@pytest.fixture
def with_other(process: Cli, tmp_path: Path) -> Cli:
    """The command line beside a distribution with the commands `greet`, `serve` and `broken`."""
    folder = tmp_path / "other"
    facts = folder / "other-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    names = {"greet": "other_commands:app", "serve": "other_commands:app", "broken": "no_such_module:app"}
    lines = [f"[{plugins.GROUP}]", *(f"{name} = {place}" for name, place in names.items())]
    (facts / "entry_points.txt").write_text("\n".join(lines))
    (folder / "other_commands.py").write_text(MODULE)

    def run(*arguments: object) -> Outcome:
        return process(*arguments, env={"PYTHONPATH": str(folder)})

    return run


def test_a_command_of_another_distribution_runs(with_other: Cli) -> None:
    """Under its entry point's name, with its own options and `kvshare`'s ways of asking for help."""
    assert with_other("greet", "Ann").stdout == "hello Ann\n"
    help_text = with_other("greet", "-h")
    assert help_text.code == 0
    assert help_text.stdout.startswith("Usage: python -m kvshare.cli.main greet [OPTIONS] ")


def test_it_is_listed_from_its_metadata(with_other: Cli) -> None:
    """Its code is not imported for `--help`, nor for a command of ours."""
    listed = with_other("--help")
    assert "  greet        A command of other." in listed.stdout
    assert LOADED not in listed.stderr
    assert LOADED not in with_other("version", "--format", "json").stderr
    assert LOADED in with_other("greet", "Ann").stderr


def test_our_own_commands_cannot_be_replaced(with_other: Cli) -> None:
    """`kvshare serve` serves, whatever is installed."""
    outcome = with_other("serve", "--dry-run")
    assert outcome.code == 0
    assert LOADED not in outcome.stderr


def test_a_command_that_cannot_be_imported_is_one_line(with_other: Cli) -> None:
    """It names the distribution and the module, as where an editable installation has lost its folder."""
    outcome = with_other("broken")
    assert outcome.code == ExitCode.USAGE
    assert outcome.stderr.count("\n") == 1
    assert "`kvshare broken` of other cannot be imported (No module named 'no_such_module')" in outcome.stderr


def test_the_nearest_name_is_suggested(with_other: Cli) -> None:
    """An unknown command is wrong usage; commands of the lab are among the suggestions."""
    outcome = with_other("bensh")
    assert outcome.code == ExitCode.USAGE
    assert "Did you mean 'bench'?" in outcome.stderr


@pytest.mark.parametrize(
    "arguments", [["bench"], ["bench", "ttft", "--json"], ["calibrate", "--help"], ["calibrate"]]
)
def test_without_the_lab_its_commands_say_how_to_get_it(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes after their name: the error, and the exit code of a missing extra."""
    monkeypatch.setattr(plugins, "_entry_points", dict)
    raised = CliRunner().invoke(app, arguments).exception
    assert isinstance(raised, MissingExtraError)
    assert str(raised) == (
        f"`kvshare {arguments[0]}` is a command of kvshare-lab, which is not installed: "
        "pip install ./lab in a checkout of KVShare"
    )
    assert exit_code(raised) is ExitCode.USAGE


def test_without_the_lab_its_commands_are_listed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that who reads `--help` knows that they exist."""
    monkeypatch.setattr(plugins, "_entry_points", dict)
    listed = CliRunner().invoke(app, ["--help"])
    assert listed.exit_code == 0
    for name in plugins.LAB:
        assert f"  {name} " in listed.stdout
