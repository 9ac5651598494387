"""What is optional, by extra: the table of modules, pyproject.toml, and the error for what is missing."""

from __future__ import annotations

import sys
import tomllib
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvshare import extras
from kvshare.errors import MissingExtraError

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.mark.parametrize("extra", extras.MODULES)
def test_modules_are_those_that_pyproject_names(extra: str) -> None:
    """Each distribution of the extra has its module in the table, and no other module is there."""
    names = packages_distributions()
    known = {canonicalize_name(names[module][0]) for module in extras.MODULES[extra]}
    required = {
        canonicalize_name(Requirement(line).name)
        for line in PROJECT["optional-dependencies"][extra]
        if not line.startswith("kvshare[")
    }
    assert known == required


def test_each_extra_includes_the_one_before_it() -> None:
    """So one name is all that an error has to say; `dev` includes the largest, and what `core` tests with."""
    included = [*extras.MODULES, "dev"]
    for smaller, larger in pairwise(included):
        assert f"kvshare[{smaller}]" in PROJECT["optional-dependencies"][larger]
    assert "kvshare[core]" in PROJECT["optional-dependencies"]["dev"]


def test_what_is_missing_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the purpose, the modules of the extra and of those below it, and pip's command."""
    monkeypatch.setattr(
        extras, "MODULES", {"embedded": ("json", "no_such_module"), "replay": ("not_there_either",)}
    )
    assert extras.missing_modules("embedded") == ["no_such_module"]
    with pytest.raises(MissingExtraError) as raised:
        extras.require("replay", what="this test")
    assert str(raised.value) == (
        "this test needs libraries that are not installed (no_such_module, not_there_either): "
        "pip install 'kvshare[replay]'"
    )


def test_what_is_installed_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is raised where every module can be found."""
    monkeypatch.setattr(extras, "MODULES", {"embedded": ("json",)})
    extras.require("embedded", what="this test")


def test_a_module_that_is_unseen_is_not_found_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by an import nor by who looks before it imports; one that is loaded stays loaded."""
    monkeypatch.delitem(sys.modules, "tabnanny", raising=False)
    with extras.unseen("tabnanny", "json"):
        import json  # noqa: F401  it is loaded

        assert find_spec("tabnanny") is None
        with pytest.raises(ModuleNotFoundError):
            import tabnanny
    assert find_spec("tabnanny") is not None
    import tabnanny

    assert tabnanny.__name__ in sys.modules
