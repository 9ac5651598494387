"""The commit of this checkout, which published documents carry."""

import subprocess
from pathlib import Path

import kvshare

_PRODUCT = Path(kvshare.__file__).parent


def checkout_commit(package: Path = _PRODUCT) -> str | None:
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
