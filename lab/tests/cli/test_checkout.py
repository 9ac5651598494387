"""The commit that a published document carries."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kvshare_lab.checkout import checkout_commit
from tests.kvshare.cli.conftest import Cli


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=Ann", "-c", "user.email=ann@example.org"]
    return subprocess.check_output(["git", *identity, *arguments], cwd=folder, text=True).strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in a repository of its own, committed."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "package")
    git(tmp_path, "commit", "--quiet", "--message", "A package")
    return folder


def test_a_checkout_has_its_commit(package: Path) -> None:
    """Seven digits or more; changed files are said."""
    commit = checkout_commit(package)
    assert commit is not None
    assert git(package, "rev-parse", "HEAD").startswith(commit)
    (package / "__init__.py").write_text("changed = True\n")
    assert checkout_commit(package) == f"{commit}-dirty"


def test_an_installed_package_has_none(package: Path, tmp_path: Path) -> None:
    """Not even below another repository, as a virtual environment in a checkout is."""
    installed = package / "site-packages"
    installed.mkdir()
    (installed / "__init__.py").write_text("")
    assert checkout_commit(installed) is None


def test_benchmarks_carry_the_commit(cli: Cli) -> None:
    """`kvshare bench --json` says what `git` says of this checkout."""
    outcome = cli("bench", "index", "--stored", 200, "--queries", 5, "--no-dense", "--json")  # has no model
    assert outcome.code == 0, outcome.stderr
    assert outcome.document.get("commit") == checkout_commit()
