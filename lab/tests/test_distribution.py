"""lab/pyproject.toml: the lab goes with this version of KVShare, which finds its commands."""

from __future__ import annotations

import tomllib
from pathlib import Path

import typer
from packaging.requirements import Requirement

import kvshare
import kvshare_lab
from kvshare import extras
from kvshare.cli import plugins
from kvshare.cli.main import app

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]


def test_both_have_one_version() -> None:
    """And the lab asks for a KVShare of that version, with the largest extra."""
    assert kvshare_lab.__version__ == kvshare.__version__
    (product,) = (each for each in map(Requirement, PROJECT["dependencies"]) if each.name == "kvshare")
    assert product.specifier.contains(kvshare.__version__)
    assert product.extras == {list(extras.MODULES)[-1]}


def test_entry_points_are_the_commands_that_kvshare_lists() -> None:
    """Each names a Typer app that can be loaded, with the same help as the product has for it."""
    declared = PROJECT["entry-points"][plugins.GROUP]
    assert declared.keys() == plugins.LAB.keys()
    group = typer.main.get_command(app)
    assert isinstance(group, plugins.CommandGroup)
    for name in declared:
        with typer.Context(group) as context:
            listed = group.get_command(context, name)
            assert listed is not None
            assert listed.help == plugins.LAB[name]
            _, loaded, rest = group.resolve_command(context, [name, "--help"])
        assert loaded is not None
        assert type(loaded).__module__.startswith("typer.")
        assert rest == ["--help"]
        assert loaded.help is not None
