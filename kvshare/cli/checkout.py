"""Which commit of KVShare runs, so that the figures that a benchmark publishes can be measured again."""

from __future__ import annotations

import subprocess
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def checkout_commit(package: Path = _PACKAGE) -> str | None:
    """
    The commit of the checkout that `package` lies in, with "-dirty" where tracked files differ from it.

    None without git, and where the package was installed: a folder of another repository does not count.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(package, "describe", "--always", "--dirty", "--exclude=*", "--abbrev=7")


def _git(folder: Path, *arguments: str) -> str | None:
    """What git prints in the folder; None where there is no git, or it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
