"""The lab goes with this version of KVShare, which finds its commands; its packages say what is in them."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement
from typer.core import TyperCommand, TyperGroup

import kvshare
import kvshare_lab
from kvshare import extras
from kvshare.cli import plugins
from kvshare.cli.main import app

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
PACKAGES = sorted(path.parent for path in Path(kvshare_lab.__file__).parent.rglob("__init__.py"))


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
        assert isinstance(loaded, TyperCommand | TyperGroup)
        assert rest == ["--help"]
        assert loaded.help is not None


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_package_says_what_its_modules_are(package: Path) -> None:
    """Its docstring names each module and each package in it."""
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))) or ""
    modules = {path.name for path in package.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert {name for name in modules | folders if name not in text} == set()
